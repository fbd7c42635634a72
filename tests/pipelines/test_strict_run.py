"""Runs with ``strict_on_policy``: engine and trainer give every token the same log-prob, to the last bit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll.pipelines.strict import CERTIFICATE, LogProbsDiffer
from tests.support.tiny_runs import FinishedRun, training_args

pytestmark = pytest.mark.long

STRICT = {"strict_on_policy": True}
TWO_RANKS = {"actor_train.device_mapping": [0, 1], "actor_train.training_args": training_args(4, 2)}
BF16 = {"actor_train.model_args.dtype": "bf16", "actor_infer.model_args.dtype": "bf16"}
LORA = {"actor_train.model_args.lora_target": "all-linear"}
PACKED = {"actor_train.use_sequence_packing": True, "actor_train.sequence_packing_args.algorithm": "load_balance"}
DRAFTS = {"actor_infer.strategy_args.strategy_config": {"speculative_config": {"max_batch_tokens": 64}}}
SHARED = {"actor_train.use_prefix_sharing": True}


def trained_by(strategy: str, **options: Any) -> dict[str, Any]:
    return {"actor_train.strategy_args": {"strategy_name": strategy, "strategy_config": options}}


RUNS: dict[str, dict[str, Any]] = {
    "two ranks, packed, bf16": TWO_RANKS | PACKED | BF16,
    "shared prompts, bf16": SHARED | BF16,
    "another temperature": {"actor_infer.generating_args.temperature": 0.7},
    "sequences over ranks": TWO_RANKS
    | {"actor_train.model_args.ulysses_size": 2, "actor_train.training_args": training_args(8, 2)},
    "gradient checkpointing": {"actor_train.model_args.disable_gradient_checkpointing": False},
    "fsdp, bf16": TWO_RANKS | BF16 | trained_by("fsdp_train"),
    "ZeRO-1, bf16": TWO_RANKS | BF16 | trained_by("deepspeed_train", zero_stage=1),
    "ZeRO-2": TWO_RANKS | trained_by("deepspeed_train", zero_stage=2),
    "ZeRO-3, bf16": TWO_RANKS | BF16 | trained_by("deepspeed_train", zero_stage=3),
    "Megatron, two replicas, bf16": TWO_RANKS | BF16 | trained_by("megatron_train", use_distributed_optimizer=True),
    "Megatron, stages, packed": TWO_RANKS
    | PACKED
    | trained_by("megatron_train", pipeline_model_parallel_size=2)
    | {"actor_train.training_args": training_args(8, 2)},
    "Megatron, sequences over ranks": TWO_RANKS
    | trained_by("megatron_train", context_parallel_size=2)
    | {"actor_train.training_args": training_args(8, 2)},
    "LoRA, two ranks, bf16": TWO_RANKS | LORA | BF16,
    "LoRA, ZeRO-3": TWO_RANKS | LORA | trained_by("deepspeed_train", zero_stage=3),
    "LoRA, fsdp": TWO_RANKS | LORA | trained_by("fsdp_train"),
}


def certificate(run: FinishedRun) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.output / CERTIFICATE).read_text())
    return found


def check_equal(run: FinishedRun, steps: int) -> None:
    """Every sampled token was compared, and every one had the same bits."""
    assert run.values("actor/train_infer_log_diff_abs_max") == [0.0] * steps
    assert run.values("actor/train_infer_kl_k3") == [0.0] * steps
    facts = certificate(run)
    sampled = sum(run.values("actor/strict_on_policy_tokens"))
    wanted = {"equal": True, "steps": steps, "tokens": sampled, "tokens_of_older_weights": 0}
    assert {name: facts[name] for name in wanted} == wanted
    assert sampled > 50 * steps
    assert not any(name.startswith("time/old_log_probs") for row in run.steps for name in row), "the pass is left out"


def test_a_run_in_float32(run):
    check_equal(run(STRICT), 2)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_the_first_token_that_differs_ends_the_run(run, tmp_path, ranks):
    faulty = {"actor_infer.worker_cls": "tests.pipelines.faulty_workers.OtherArithmetic"}
    with pytest.raises(LogProbsDiffer, match=r"in step 0 the log-prob of token \d+ of a sample is .* they part in no"):
        run(STRICT | faulty | (TWO_RANKS if ranks == 2 else {}), output=tmp_path)
    facts = certificate(FinishedRun(tmp_path))
    first = facts["first_difference"]
    assert (facts["equal"], facts["steps"], first["step"]) == (False, 0, 0)
    assert first["trainer"] != first["engine"] and first["trainer"] == pytest.approx(first["engine"], abs=1e-3)
    assert len(first["sequence"]) > first["position"]


@pytest.mark.long
@pytest.mark.default_rows("two ranks, packed, bf16", "Megatron, two replicas, bf16")
@pytest.mark.parametrize("name", RUNS)
def test_every_trainer_and_layout(run, name):
    check_equal(run(STRICT | RUNS[name]), 2)


@pytest.mark.matrix
def test_tokens_of_older_weights_are_counted_and_not_compared_also_where_a_run_goes_on(run, tmp_path):
    ahead = STRICT | {"async_generation_ratio": 1, "save_steps": 2}
    run(ahead, output=tmp_path)
    resumed = run(ahead | {"max_steps": 4, "resume_from_checkpoint": True}, output=tmp_path)
    facts = certificate(resumed)
    assert facts["equal"] and facts["steps"] == 4
    assert facts["tokens"] == sum(resumed.values("actor/strict_on_policy_tokens")) > 50
    assert facts["tokens_of_older_weights"] > 50


@pytest.mark.long
def test_conversations_with_a_prefix_cache(run):
    cached = {"actor_infer.strategy_args.strategy_config": {"prefix_cache_tokens": 65536}}
    check_equal(run(STRICT | cached | {"max_steps": 2}, "agentic"), 2)


def test_drafts_change_no_metric_but_their_own(run):
    """Samples, log-probs and what is learned have the same bits with and without speculation."""
    # At a low temperature a group repeats itself.
    settings = STRICT | {"max_steps": 4, "actor_infer.generating_args.temperature": 0.3}
    plain, drafted = (run(settings | one) for one in ({}, DRAFTS))
    check_equal(drafted, 4)
    assert sum(row.get("engine/accepted_per_draft", 0) for row in drafted.steps) > 1
    for mine, wanted in zip(drafted.steps, plain.steps, strict=True):
        own = {name for name in set(mine) - set(wanted) if name.startswith("engine/")}
        assert set(mine) - own == set(wanted)
        measured = ("time", "system", "perf", "memory", "scheduler")
        names = [name for name in wanted if not name.startswith(measured)]
        assert len(names) > 40 and {name: mine[name] for name in names} == {name: wanted[name] for name in names}
