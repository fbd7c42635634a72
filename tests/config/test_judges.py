"""A judge on the run's own role: what it needs, and what a run without one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.rewards import judge_length
from roll.rewards import reward_options
from tests.config.good import changed, load, mistakes

JUDGED: dict[str, Any] = {"rewards.math.worker_cls": "llm_judge", "rewards.math.judge_model_type": "cluster"}
ROLE: dict[str, Any] = {
    "device_mapping": [0, 1],
    "strategy_args": {"strategy_name": "hf_infer"},
    "model_args": {"model_name_or_path": "judge/model"},
}


def test_the_role_is_needed_where_it_is_asked(tmp_path: Path) -> None:
    (problem,) = mistakes(tmp_path, changed(JUDGED))
    assert problem.key == "reward_model"
    assert "is needed by rewards.math" in problem.rule
    plan = load(tmp_path, changed(JUDGED | {"reward_model": ROLE})).plan
    role = plan.roles["reward_model"]
    assert (role.strategy_name, role.world_size, role.model_path) == ("hf_infer", 2, "judge/model")


@pytest.mark.parametrize(
    "rewards",
    [
        {"components": {"judge": {"worker_cls": "llm_judge", "reward_kwargs": {"model_type": "cluster"}}}},
        {"components": {"llm_judge": {}}, "judge_model_type": "cluster"},
        {"worker_cls": "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker"}
        | {"judge_model_type": "cluster"},
    ],
)
def test_every_way_to_ask_it_starts_it(tmp_path: Path, rewards: dict[str, Any]) -> None:
    plan = load(tmp_path, changed({"reward_model": ROLE, "rewards": {"math": rewards}})).plan
    assert "reward_model" in plan.roles


OWN: dict[str, Any] = {
    "worker_cls": "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
    "tag_included": ["essay"],
    "judge_model_type": "inference",
    "judge_prompt": "Qwen2.5-7B-Instruct-RLVR-prompt",
    "device_mapping": [0, 1],
    "model_args": {"model_name_or_path": "judge/model", "model_type": "trl", "dtype": "bf16"},
    "generating_args": {"max_new_tokens": 100, "temperature": 0.8, "top_p": 0.8, "top_k": 50, "num_beams": 1},
    "strategy_args": {"strategy_name": "hf_infer", "strategy_config": None},
}
"""A judge as ROLL's published files have it."""


def test_a_judge_on_the_devices_of_its_section(tmp_path: Path) -> None:
    loaded = load(tmp_path, changed({"rewards.essays": OWN}))
    engines, askers = (loaded.plan.roles[name] for name in ("judge.essays", "rewards.essays"))
    assert (engines.strategy_name, engines.device_mapping, engines.world_size) == ("hf_infer", (0, 1), 2)
    assert (engines.model_path, engines.worker_cls) == ("judge/model", None)
    assert "actor_train" in engines.colocated_with
    assert (askers.strategy_name, askers.device_mapping, askers.world_size) == (None, (), 2)
    assert askers.worker_cls == "llm_judge"
    options = reward_options("essays", loaded.config.rewards["essays"])[1]
    wanted = {"temperature": 0.8, "top_p": 0.8, "max_tokens": 100, "extra_body": {"top_k": 50}}
    assert {name: options[name] for name in wanted} == wanted
    own = changed({"rewards.essays": OWN | {"reward_kwargs": {"max_tokens": 7}}})
    assert reward_options("essays", load(tmp_path, own).config.rewards["essays"])[1]["max_tokens"] == 7
    served = changed({"rewards.essays": OWN | {"model_args": {}}, "reward_pretrain": "shared/judge"})
    assert load(tmp_path, served).plan.roles["judge.essays"].model_path == "shared/judge"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"device_mapping": None}, "rewards.essays.device_mapping"),
        ({"strategy_args": {"strategy_name": "fsdp2_infer"}}, "rewards.essays.strategy_args.strategy_name"),
        ({"world_size": 3}, "rewards.essays.world_size"),
        ({"model_args": {"model_name_or_path": "/no/such"}}, "rewards.essays.model_args.model_name_or_path"),
        (
            {"worker_cls": None}
            | {
                "components": {
                    "llm_judge": {},
                    "b": {"worker_cls": "llm_judge", "reward_kwargs": {"model_type": "cluster"}},
                }
            },
            "rewards.essays.judge_model_type",
        ),
    ],
)
def test_mistakes_are_found_in_its_section(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    data = changed({"rewards.essays": OWN | changes, "reward_model": ROLE})
    assert [
        problem.key for problem in mistakes(tmp_path, data, check_files=True) if "file_name" not in problem.key
    ] == [key]


def test_a_judge_that_nobody_asks_is_not_started(tmp_path: Path) -> None:
    loaded = load(tmp_path, changed({"reward_model": ROLE}))
    assert "reward_model" not in loaded.plan.roles
    assert any(notice.key == "reward_model" for notice in loaded.warnings)


def test_devices_and_strategy(tmp_path: Path) -> None:
    asynchronous = {"async_generation_ratio": 1, "actor_train.device_mapping": [0], "actor_infer.device_mapping": [1]}
    owned = changed(asynchronous | {"rewards.essays": OWN})
    assert "rewards.essays.device_mapping" in [problem.key for problem in mistakes(tmp_path, owned)]
    found = mistakes(tmp_path, changed(JUDGED | asynchronous | {"reward_model": ROLE}))
    assert any(problem.key == "reward_model.device_mapping" for problem in found)
    trained = changed(JUDGED | {"reward_model": ROLE | {"strategy_args": {"strategy_name": "fsdp2_infer"}}})
    assert [problem.key for problem in mistakes(tmp_path, trained)] == ["reward_model.strategy_args.strategy_name"]
    sampled = load(tmp_path, changed(JUDGED | {"reward_model": ROLE | {"generating_args": {"temperature": 0.3}}}))
    assert any("options of llm_judge" in notice.text for notice in sampled.warnings)


def test_room_for_a_question() -> None:
    assert judge_length(1000, None) == 4048
    assert judge_length(1000, 3000) == 3000


def test_keys_of_judges_that_no_judge_reads_are_told(tmp_path: Path) -> None:
    changes = {"rewards.math.judge_prompt": "correctness"}
    loaded = load(tmp_path, changed(changes))
    assert [notice.key for notice in loaded.warnings if "judge" in notice.key] == ["rewards.math.judge_prompt"]
    loaded = load(tmp_path, changed(changes | {"rewards.math.worker_cls": "llm_judge"}))
    assert [notice.key for notice in loaded.warnings if "judge" in notice.key] == []
