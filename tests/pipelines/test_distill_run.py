"""Distillation runs against a plain loop, in several layouts, from a cache and continued; on-policy distillation with
one teacher and with several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.config.reading.errors import ConfigError
from roll.datasets import EpochOrder
from roll.preflight import check_parts
from tests.pipelines.conftest import Run
from tests.serving.conftest import Serving
from tests.support.tiny_runs import (
    GENERATING,
    FinishedRun,
    TinyWorld,
    constant_rate,
    distill_settings,
    load_changed,
    role,
    training_args,
    untimed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RATE, STEPS, ROWS, TOP, WEIGHT = 1e-3, 3, 8, 6, 0.6
NUMBERS = ("student/loss", "student/nll", "student/kd_loss", "student/teacher_top_k_mass", "student/grad_norm")


def sequence(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], int]:
    """Token ids of a row, and how many of them are the prompt's."""
    prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True)["input_ids"]
    answer = tokenizer(row["response"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    return prompt + answer, len(prompt)


def plain_distillation(world: TinyWorld, steps: int = STEPS, on_prompt: bool = False) -> list[dict[str, float]]:
    """One row and one token at a time: the forward KL over the teacher's tokens and the rest, of every distribution
    that an answer's token was predicted from, its first and its end token's included."""
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    student = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(world.teacher, dtype=torch.float32)
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE, weight_decay=0.0)
    rows = [json.loads(line) for line in world.demonstrations.read_text().splitlines()]
    order = EpochOrder(64, 7, "distill", True).of_epoch(0)
    found = []
    for step in range(steps):
        nll, kd, mass = [], [], []
        for index in order[step * ROWS : (step + 1) * ROWS]:
            ids, start = sequence(tokenizer, rows[index])
            tokens = torch.tensor([ids])
            q = student(input_ids=tokens).logits[0].float().log_softmax(-1)
            with torch.no_grad():
                p = teacher(input_ids=tokens).logits[0].float().log_softmax(-1)
            for place in range(1 if on_prompt else start, len(ids)):
                nll.append(-q[place - 1, ids[place]])
                top = p[place - 1].topk(TOP)
                own = q[place - 1][top.indices]
                rest_p, rest_q = 1 - top.values.exp().sum(), 1 - own.exp().sum()
                kd.append((top.values.exp() * (top.values - own)).sum() + rest_p * (rest_p / rest_q).log())
                mass.append(top.values.exp().sum())
        means = [torch.stack(values).mean() for values in (nll, kd, mass)]
        loss = (1 - WEIGHT) * means[0] + WEIGHT * means[1]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        found.append(dict(zip(NUMBERS, map(float, (loss, *means, norm)), strict=True)))
    return found


@pytest.fixture(scope="module")
def wanted(world: TinyWorld) -> list[dict[str, float]]:
    return plain_distillation(world)


@pytest.fixture(scope="module")
def whole(run: Run, world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, Path]:
    """A run that fills a cache, with validations and a checkpoint."""
    cache = tmp_path_factory.mktemp("cache")
    changes = {"teacher_cache": str(cache), "save_steps": 2, "eval_steps": 2, "student.infer_batch_size": 6}
    changes["validation"] = {"data_args": {"file_name": str(world.validation_answers)}}
    return run(changes, pipeline="distill"), cache


def assert_same(run: FinishedRun, wanted: list[dict[str, float]], rel: float = 2e-4) -> None:
    for row, numbers in zip(run.steps, wanted, strict=True):
        for name in NUMBERS:
            assert row[name] == pytest.approx(numbers[name], rel=rel, abs=2e-6), (row["step"], name)


def test_the_first_answer_token_and_the_end_token_are_distilled(
    whole: tuple[FinishedRun, Path], wanted: list[dict[str, float]]
) -> None:
    """ROLL's divergence is one position late: it masks the distribution that predicts token t + 1 by the label of t.
    And its teacher's vocabulary ends before the tokens that were added, such as the one that ends a turn."""
    assert_same(whole[0], wanted)
    assert wanted[2]["student/loss"] < wanted[0]["student/loss"], "three steps must change something"


def test_validation_runs_and_counts_every_row(whole: tuple[FinishedRun, Path], world: TinyWorld) -> None:
    """ROLL's stops the run at its first validation. 8 rows, 6 at a time: the last ones are not left out."""
    rows = whole[0].with_metric("val/kd_loss")
    assert [row["step"] for row in rows] == [2, 3]
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    model = AutoModelForCausalLM.from_pretrained(whole[0].output / "model", dtype=torch.float32)
    total, count = 0.0, 0
    for line in world.validation_answers.read_text().splitlines():
        ids, start = sequence(tokenizer, json.loads(line))
        with torch.no_grad():
            table = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        total -= float(table.gather(1, torch.tensor(ids[1:])[:, None])[start - 1 :].sum())
        count += len(ids) - start
    assert rows[1]["val/nll"] == pytest.approx(total / count, rel=1e-4)


def test_a_cache_serves_a_student_without_a_teacher(
    run: Run, whole: tuple[FinishedRun, Path], wanted: list[dict[str, float]]
) -> None:
    changes: dict[str, Any] = {"teacher_cache": str(whole[1]), "teacher": None}
    again = run(changes, pipeline="distill")
    assert_same(again, wanted)
    assert [row["student/cached_rows"] for row in again.steps] == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="lacks"):
        run(changes | {"seed": 8, "distill_on_prompt": True}, pipeline="distill")


def test_it_goes_on_where_it_was(run: Run, whole: tuple[FinishedRun, Path]) -> None:
    """ROLL's workers join ``resume_from_checkpoint: true`` with a path, and its teacher looks for a checkpoint of
    itself. The teacher is a step ahead when the checkpoint is written: those rows are drawn again."""
    checkpoint = whole[0].output / "checkpoints" / "checkpoint-2"
    resumed = run({"resume_from_checkpoint": str(checkpoint)}, pipeline="distill")
    assert [row["step"] for row in resumed.steps] == [2]
    same = {name: value for name, value in untimed(resumed.steps[0]).items() if name.startswith("student/")}
    for name, value in same.items():
        assert whole[0].steps[2][name] == pytest.approx(value, rel=1e-6), name


def layout(strategy: str, config: dict[str, Any], micro: int, accumulation: int, **more: Any) -> dict[str, Any]:
    teacher = strategy.replace("_train", "_infer")
    return {
        "student.device_mapping": [0, 1],
        "student.training_args": constant_rate(training_args(micro, accumulation, RATE)),
        "student.strategy_args": {"strategy_name": strategy, "strategy_config": config},
        "teacher": role(teacher, [0, 1], infer_batch_size=3, **more)
        | {"strategy_args": {"strategy_name": teacher, "strategy_config": config if "megatron" in strategy else {}}},
        **{f"student.{key}": value for key, value in more.items()},
    }


LAYOUTS = {
    "two ranks, without padding": layout("fsdp2_train", {}, 1, 4, use_remove_padding=True),
    "token budget": layout(
        "fsdp_train", {}, 2, 2, use_dynamic_batching_in_train=True, max_tokens_per_microbatch_in_train=200
    ),
    "packed, ZeRO-2": layout(
        *("deepspeed_train", {"zero_optimization": {"stage": 2}}, 2, 2),
        use_sequence_packing=True,
        sequence_packing_args={"algorithm": "load_balance"},
    ),
    "Megatron, two tensor ranks": layout("megatron_train", {"tensor_model_parallel_size": 2}, 2, 4),
}


@pytest.mark.default_rows("packed, ZeRO-2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_numbers(run: Run, wanted: list[dict[str, float]], name: str) -> None:
    """ROLL cuts the teacher's vocabulary without tensor parallelism and not with it: two layouts, two losses."""
    assert_same(run(LAYOUTS[name], pipeline="distill"), wanted)


@pytest.fixture
def served_teacher(world: TinyWorld) -> Iterator[dict[str, Any]]:
    """The section of the teacher behind a server of its own, as ``roll serve`` would be."""
    serving = Serving(world.teacher, max_open_requests=100)
    options = {"base_url": f"{serving.server.url}/v1", "concurrency": 4}
    yield {"strategy_args": {"strategy_name": "remote", "strategy_config": options}}
    serving.close()


def test_a_teacher_behind_a_url_teaches_the_prompt_as_well(
    run: Run, world: TinyWorld, served_teacher: dict[str, Any]
) -> None:
    changes = {"distill_on_prompt": True, "max_steps": 1, "teacher_log_probs_dtype": "fp16", "teacher": served_teacher}
    with torch.enable_grad():  # the server's engine turns them off
        wanted = plain_distillation(world, 1, on_prompt=True)
    assert_same(run(changes, pipeline="distill"), wanted, rel=2e-3)


def teacher(world: TinyWorld, folder: Path | None = None, **keys: Any) -> dict[str, Any]:
    section = role("fsdp2_infer", [0], infer_batch_size=8, **keys)
    return section | {"model_args": section["model_args"] | {"model_name_or_path": str(folder or world.teacher)}}


def opd(**changes: Any) -> dict[str, Any]:
    return {"pipeline": "opd", "is_pure_opd": True, "max_steps": 1, **changes}


@pytest.mark.matrix
def test_a_share_of_given_responses(run: Run, world: TinyWorld) -> None:
    """Half of the prompts come with the response of their row, from its first token to the one that ends it."""
    one = {"num_return_sequences_in_group": 1, "rollout_batch_size": 16, "response_length": 40}
    changes = {**one, "opd_form": "topk", "opd_topk": 4, "lmbda": 0.5, "estimator": "reinforce"}
    data = {"file_name": [str(world.demonstrations)], "messages": "messages", "response": "response"}
    done = run(opd(**changes, teacher=teacher(world)) | {"actor_train.data_args": data})
    assert done.values("opd/on_policy_share") == [0.5]
    rows = [json.loads(line) for line in world.demonstrations.read_text().splitlines()]
    solutions = {row["response"] for row in rows}
    assert sum(sample["response"] in solutions for sample in done.samples(0)) == 8


def test_teachers_with_prompts_of_their_own(run: Run, world: TinyWorld) -> None:
    """The same prompt teaches nothing to the model itself; one with the answer in it does. The log-ratio compares two
    log-probs of one kind: with the engine's on one side it would not be 0."""
    own = teacher(world, world.model)
    same = run(opd(opd_form="advantage", teacher=own, opd_teacher_prompt="{prompt}")).steps[0]
    assert same["opd/teacher/kl"] == pytest.approx(0.0, abs=1e-6) and same["actor/grad_norm"] < 1e-4
    hint = "{prompt} The answer is {ground_truth}."
    told = run(opd(opd_form="full_vocabulary", teacher=own, opd_teacher_prompt=hint)).steps[0]
    assert abs(told["opd/teacher/kl"]) > 1e-4 and told["actor/grad_norm"] > 1e-4


SAMPLING = {"actor_infer.generating_args": GENERATING}


@pytest.mark.default_rows("agentic by distributions")
@pytest.mark.parametrize(
    ("pipeline", "changes"),
    [
        ("rlvr", {"pipeline": "opd", "is_pure_opd": True, "max_steps": 1, "opd_form": "topk", "opd_topk": 4}),
        ("agentic", {"is_pure_opd": True, "opd_form": "topk", "opd_topk": 4} | SAMPLING),
        ("agentic", {"use_opd": True, "opd_kl_coef": 0.1} | SAMPLING),
    ],
    ids=["rlvr", "agentic by distributions", "agentic in addition to rewards"],
)
def test_a_teacher_behind_a_url_teaches_what_a_role_does(
    run: Run, world: TinyWorld, served_teacher: dict[str, Any], pipeline: str, changes: dict[str, Any]
) -> None:
    """Agents: rows of several turns, what the environment said between them left out."""
    named = served_teacher | {"model_args": {"model_name_or_path": str(world.teacher)}}
    remote, role_ = (run({**changes, "teacher": one}, pipeline).steps[0] for one in (named, teacher(world)))
    assert role_["opd/teacher/kl"] > 0.001
    for key in ("opd/teacher/kl", "actor/grad_norm", "critic/score/mean"):
        assert remote[key] == pytest.approx(role_[key], rel=1e-3, abs=1e-6), key


OPD_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": ({}, {"use_sequence_packing": True, "sequence_packing_args": {"algorithm": "load_balance"}}),
    "megatron": ({"tensor_model_parallel_size": 2}, {}),
    "fsdp2": ({}, {"use_prefix_sharing": True}),
    "deepspeed": ({"zero_optimization": {"stage": 2}}, {"use_remove_padding": True}),
}


# Sampled tokens take the path of every policy loss, which has such tests; distributions take one of their own.
@pytest.mark.default_rows("topk-fsdp2")
@pytest.mark.parametrize(
    ("form", "strategy"), [*(("topk", strategy) for strategy in OPD_LAYOUTS), ("advantage", "fsdp")]
)
def test_what_teachers_say_does_not_depend_on_the_layout(run: Run, world: TinyWorld, form: str, strategy: str) -> None:
    """The student's ranks, micro-batches, padding and packing, and those of its teacher, change only roundings."""
    common = opd(opd_form=form, opd_topk=4)
    whole = run({**common, "teacher": teacher(world)}).steps[0]
    config, keys = OPD_LAYOUTS[strategy]
    ranks = 1 if strategy == "megatron" else 2
    section = teacher(world) | keys | {"device_mapping": [0, 1], "infer_batch_size": 3}
    section["strategy_args"] = {
        "strategy_name": f"{strategy}_infer",
        "strategy_config": config if strategy == "megatron" else {},
    }
    student = {
        "device_mapping": [0, 1],
        "training_args": training_args(4, 4 // ranks),
        "strategy_args": {"strategy_name": f"{strategy}_train", "strategy_config": config},
        **keys,
    }
    changes = {f"actor_train.{key}": value for key, value in student.items()}
    found = run({**common, **changes, "teacher": section}).steps[0]
    for metric in ("opd/teacher/kl", "actor/grad_norm", "critic/score/mean"):
        assert found[metric] == pytest.approx(whole[metric], rel=2e-4, abs=2e-6), metric


@pytest.mark.matrix
def test_forms_agree_on_the_divergence_from_a_teacher(run: Run, world: TinyWorld) -> None:
    """The sampled estimate and the whole distributions; the k tokens with the rest as one bucket are below."""
    forms = ("advantage", "full_vocabulary", "topk")
    changes = {"rollout_batch_size": 16, "actor_train.training_args": training_args(16, 4, 1e-2), "max_steps": 2}
    done = {form: run(opd(opd_form=form, opd_topk=32, teacher=teacher(world), **changes)) for form in forms}
    sampled, exact, top = (done[form].steps[0]["opd/teacher/kl"] for form in forms)
    assert sampled == pytest.approx(exact, rel=0.3)
    assert 0 < top <= exact + 1e-6
    for form in ("full_vocabulary", "topk"):
        assert done[form].steps[1]["opd/teacher/kl"] < done[form].steps[0]["opd/teacher/kl"]
        assert 0 < done[form].steps[0]["opd/teacher/teacher_top_k_mass"] <= 1 + 1e-6


def test_teachers_by_tag_in_addition_to_rewards(run: Run, world: TinyWorld, plain_run: FinishedRun) -> None:
    """Two teachers, the second for some rows only and with its own weight: each has metrics, and rewards still
    count."""
    both = {"all": teacher(world), "odd_ones": teacher(world, world.model, tag_included=["odd"], opd_kl_coef=0.5)}
    mixed = run({"use_opd": True, "opd_kl_coef": 0.1, "teacher": both, "max_steps": 1}).steps
    assert mixed[0]["opd/all/kl"] > 0.01 and mixed[0]["opd/odd_ones/kl"] == pytest.approx(0, abs=1e-6)
    assert mixed[0]["opd/kl"] == pytest.approx(0.1 * mixed[0]["opd/all/kl"], rel=1e-4)
    plain = plain_run.steps[0]
    assert plain["critic/score/mean"] == mixed[0]["critic/score/mean"]
    assert plain["actor/grad_norm"] != pytest.approx(mixed[0]["actor/grad_norm"], rel=1e-3)


def test_a_teacher_of_another_vocabulary_is_refused_before_anything_starts(world: TinyWorld, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in world.teacher.iterdir():
        renamed = file.read_bytes().replace(b'"content": "', b'"content": "x', 1)
        (other / file.name).write_bytes(renamed if file.suffix == ".json" else file.read_bytes())
    loaded = load_changed(distill_settings(world, tmp_path / "out"), {"teacher_pretrain": str(other)})
    with pytest.raises(ConfigError, match="has another vocabulary"):
        check_parts(loaded)
