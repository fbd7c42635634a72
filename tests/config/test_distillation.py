"""Configurations of distillation, offline and on the student's own samples: what loads, and what is refused in
words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config.loader import load_config
from roll.config.pipelines import definition_of
from roll.config.reading.errors import ConfigError
from roll.methods.opd_keys import coefficients
from roll.methods.policy_plan import needs_old_log_probs, needs_reference
from roll.methods.supervised import SupervisedPlan
from roll.methods.teachers import check_vocabularies
from tests.config.good import GOOD, LAKE, changed, load, mistakes

TEACHER = {
    "model_args": {"model_name_or_path": "my/teacher"},
    "strategy_args": {"strategy_name": "fsdp2_infer"},
    "device_mapping": [0],
}
DISTILL: dict[str, Any] = {
    "pipeline": "distill",
    "student_pretrain": "my/student",
    "teacher_pretrain": "my/teacher",
    "student": {
        "data_args": {"file_name": "rows.jsonl"},
        "strategy_args": {"strategy_name": "fsdp2_train"},
        "training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "device_mapping": [0, 1],
    },
    "teacher": {"strategy_args": {"strategy_name": "fsdp2_infer"}, "device_mapping": [2]},
}


def rules(tmp_path: Path, data: dict[str, Any]) -> dict[str, str]:
    return {problem.key: problem.rule for problem in mistakes(tmp_path, data)}


def opd(**keys: Any) -> dict[str, Any]:
    """A good RLVR file whose roles have ROLL's names for a student, with a teacher."""
    data = changed({})
    data["student_train"], data["student_infer"] = data.pop("actor_train"), data.pop("actor_infer")
    return {**data, "is_pure_opd": True, "teacher": TEACHER, **keys}


def test_columns_and_plan_of_offline_distillation(tmp_path: Path) -> None:
    loaded = load(tmp_path, DISTILL)
    plan = loaded.plan
    assert isinstance(plan, SupervisedPlan)
    assert (plan.data_args.prompt, plan.data_args.response) == (None, "solution"), "the first row says which"
    assert (plan.global_batch_size, plan.frozen_runs_ahead) == (16, True)
    assert {role.model_path for role in plan.roles.values()} == {"my/student", "my/teacher"}


def test_answer_key_does_not_replace_a_written_response_column(tmp_path: Path) -> None:
    data = {**DISTILL, "question_key": "q", "answer_key": "a"}
    data["student"] = {**DISTILL["student"], "data_args": {"file_name": "rows.jsonl", "messages": "m", "response": "r"}}
    plan = load(tmp_path, data).plan
    assert isinstance(plan, SupervisedPlan)
    assert (plan.data_args.prompt, plan.data_args.messages, plan.data_args.response) == (None, "m", "r")


def test_a_teacher_or_a_cache_is_needed(tmp_path: Path) -> None:
    without = {key: value for key, value in DISTILL.items() if key != "teacher"}
    assert "teacher_cache" in rules(tmp_path, without)["teacher"]
    (tmp_path / "index.json").write_text("{}")
    assert load(tmp_path, {**without, "teacher_cache": str(tmp_path)}).plan.roles.keys() == {"student"}


def test_a_teacher_by_an_engine_is_refused_by_name(tmp_path: Path) -> None:
    data = {**DISTILL, "teacher": {**DISTILL["teacher"], "strategy_args": {"strategy_name": "sglang"}}}
    assert "log-probs by an engine" in rules(tmp_path, data)["teacher.strategy_args.strategy_name"]


def test_rolls_names_of_roles_and_one_teacher(tmp_path: Path) -> None:
    """``student_train``, ``student_infer`` and one section under ``teacher``, whose log-probs are compared with the
    trainer's; mistakes have the names that were written."""
    loaded = load(tmp_path, opd())
    config = loaded.config
    assert {"actor_train", "actor_infer", "teacher"} <= loaded.plan.roles.keys()
    assert loaded.plan.roles["teacher"].model_path == "my/teacher"
    assert needs_old_log_probs(config)
    assert rules(tmp_path, opd(actor_train=GOOD["actor_train"])).keys() == {"student_train"}
    wrong = opd(teacher={**TEACHER, "device_mapping": None, "strategy_args": {"strategy_name": "sglang"}})
    wrong["student_train"] = {**wrong["student_train"], "infer_batch_size": 0}
    found = rules(tmp_path, wrong)
    assert {"teacher.device_mapping", "teacher.strategy_args.strategy_name", "student_train.infer_batch_size"} <= set(
        found
    )


def test_documented_top_level_opd_kl_coef_counts(tmp_path: Path) -> None:
    """In ROLL it is no field, and ignored without a word."""
    two = {"a": {**TEACHER, "opd_kl_coef": 0.2}, "b": TEACHER}
    config = load(tmp_path, opd(opd_kl_coef=0.7, teacher=two)).config
    assert coefficients(config) == {"a": 0.2, "b": 0.7}


def test_a_lora_student_keeps_its_teacher(tmp_path: Path) -> None:
    """In ROLL the student's own base is scored in the teacher's place, and the teacher never starts."""
    data = opd()
    data["student_train"] = {**data["student_train"], "model_args": {"lora_target": "all-linear"}}
    loaded = load(tmp_path, data)
    assert "teacher" in loaded.plan.roles and not needs_reference(loaded.config)


def test_several_teachers_for_top_k_have_tags(tmp_path: Path) -> None:
    assert "teacher.b.tag_included" in rules(tmp_path, opd(opd_form="topk", teacher={"a": TEACHER, "b": TEACHER}))


def test_agents_have_teachers_too(tmp_path: Path) -> None:
    """In a file of environments the same keys mean the same; the sampling that decides is theirs."""
    data = {**LAKE, "is_pure_opd": True, "teacher": TEACHER}
    loaded = load(tmp_path, data)
    assert loaded.plan.roles["teacher"].model_path == "my/teacher" and needs_old_log_probs(loaded.config)
    assert "teacher" in rules(tmp_path, {**data, "teacher": None})
    two = {"lakes": {**TEACHER, "tag_included": [*LAKE["custom_envs"]]}, "b": {**TEACHER, "tag_included": ["laek"]}}
    found = rules(tmp_path, {**data, "teacher": two})
    assert "names no tag that is trained on: there are lake" in found["teacher.b.tag_included"]
    served = {"strategy_name": "remote", "strategy_config": {"base_url": "http://127.0.0.1:1/v1"}}
    data |= {"teacher": {**TEACHER, "device_mapping": None, "strategy_args": served}}
    sampled = {**data["train_env_manager"], "generating_args": {"temperature": 0.5}}
    engines = {"device_mapping": [0, 1]}
    found = rules(tmp_path, {**data, "train_env_manager": sampled, "actor_infer": engines})
    assert "full_vocabulary" in found["train_env_manager.generating_args.temperature"]


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"estimator": "reinforce"}, []),
        ({"estimator": "grpo"}, ["estimator"]),
        ({"estimator": "reinforce", "gamma": 0.9}, ["gamma"]),
    ],
)
def test_keys_of_advantages_without_effect_are_noted(tmp_path: Path, keys: dict[str, Any], wanted: list[str]) -> None:
    notices = load(tmp_path, opd(**keys)).warnings
    assert [notice.key for notice in notices if "its own log-ratio" in notice.text] == wanted


def test_estimators_with_another_minimum_and_truncated_sampling_are_noted(tmp_path: Path) -> None:
    """ROLL's example samples with top_p .99 and top_k 100, and offers k3, abs and mse as rewards."""
    data = opd(kl_penalty="k3")
    sampling = {**data["student_infer"].get("generating_args", {}), "top_p": 0.99, "top_k": 100}
    data["student_infer"] = {**data["student_infer"], "generating_args": sampling}
    notes = {f"{notice.key}: {notice.text}" for notice in load(tmp_path, data).warnings}
    assert any(note.startswith("kl_penalty: ") and "another minimum" in note for note in notes)
    assert any(note.startswith("student_infer.") and "truncated sampling" in note for note in notes)


def vocabulary(folder: Path, tokens: dict[str, int], added: dict[str, int]) -> str:
    folder.mkdir()
    entries = [{"id": number, "content": token} for token, number in added.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": entries}))
    return str(folder)


def test_vocabularies_are_compared_added_tokens_included(tmp_path: Path) -> None:
    """ROLL compares none, and cuts the teacher's at ``vocab_size``, before the token that ends a turn."""
    student = vocabulary(tmp_path / "student", {"a": 0, "b": 1}, {"<end>": 2})
    same = vocabulary(tmp_path / "same", {"b": 1, "a": 0}, {"<end>": 2})
    other = vocabulary(tmp_path / "other", {"a": 0, "b": 1}, {"<stop>": 2})
    check_vocabularies(student, same, "teacher_pretrain", tmp_path)
    with pytest.raises(ConfigError, match=r"1 token id differs, the first is 2 \(student '<end>', teacher '<stop>'\)"):
        check_vocabularies(student, other, "teacher_pretrain", tmp_path)


def test_the_launcher_of_either_form(tmp_path: Path) -> None:
    """``use_opd`` is RLVR's, ``is_pure_opd`` has a launcher of its own."""
    file = tmp_path / "config.yaml"
    loaded = load(tmp_path, opd())
    assert loaded.pipeline.name == "opd" and load_config(None, file, check_files=False).pipeline.name == "opd"
    mixed = changed({"use_opd": True, "teacher": TEACHER})
    assert load(tmp_path, mixed).pipeline is definition_of("rlvr")


@pytest.mark.parametrize("is_taught", [False, True])
def test_an_evaluation_asks_no_teacher(is_taught: bool) -> None:
    keys = ["adv_estimator=reinforce", "+is_pure_opd=true", "+teacher.model_args.model_name_or_path=my/teacher"]
    loaded = load_config(None, "tiny/evaluate_config", None, keys if is_taught else [], check_files=False)
    loaded.pipeline.check_services(loaded)
    loaded.pipeline.check_parts(loaded)
