"""Division of rows into micro-batches: rules, mistakes before a run, and what the plan says."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from roll.config.plan.plan import MicroBatching, micro_batching, with_packed_lengths
from roll.config.plan.render import render_plan
from roll.config.roles import SequencePackingArguments, TrainingArguments, WorkerConfig
from tests.config.good import GOOD_SFT, changed, load, mistakes

DYNAMIC = {"actor_train.use_dynamic_batching_in_train": True}
TRAIN_BUDGET = "actor_train.max_tokens_per_microbatch_in_train"


def role(**keys: Any) -> WorkerConfig:
    training = TrainingArguments(per_device_train_batch_size=4)
    return WorkerConfig(training_args=training, infer_batch_size=8, **keys)


@pytest.mark.parametrize(
    ("keys", "train", "infer"),
    [
        ({}, MicroBatching(4), MicroBatching(8)),
        ({"use_remove_padding": True}, MicroBatching(4, True), MicroBatching(8, True)),
        ({"use_sequence_packing": True}, MicroBatching(4, True), MicroBatching(8, True)),
        (
            {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 99},
            MicroBatching(4, False, 99, 8),
            MicroBatching(8),
        ),
        (
            {
                "use_dynamic_batching_in_infer": True,
                "max_tokens_per_microbatch_in_infer": 99,
                "use_remove_padding": True,
            },
            MicroBatching(4, True),
            MicroBatching(8, True, 99),
        ),
        (
            {
                "use_sequence_packing": True,
                "sequence_packing_args": SequencePackingArguments(
                    "load_balance", max_packed_sequence_length_forward=70, min_num_micro_batches_train=3
                ),
            },
            MicroBatching(4, True, 50, balances=True, min_count=3),
            MicroBatching(8, True, 70, balances=True),
        ),
    ],
)
def test_rule_of_a_role(keys: dict[str, Any], train: MicroBatching, infer: MicroBatching) -> None:
    filled = with_packed_lengths(role(**keys), 50)
    assert (micro_batching(filled, trains=True), micro_batching(filled, trains=False)) == (train, infer)


def balanced(name: str, **arguments: Any) -> dict[str, Any]:
    packing = {"algorithm": "load_balance"} | arguments
    return {f"{name}.use_sequence_packing": True, f"{name}.sequence_packing_args": packing}


@pytest.mark.parametrize(
    ("changes", "key", "rule", "example"),
    [
        (DYNAMIC, TRAIN_BUDGET, "is needed with use_dynamic_batching_in_train", 1024),
        (DYNAMIC | {TRAIN_BUDGET: 200}, TRAIN_BUDGET, "less than the longest sequence (256 tokens)", 256),
        (
            DYNAMIC | {TRAIN_BUDGET: 256, "actor_train.sequence_length_round_in_train": 100},
            TRAIN_BUDGET,
            "256 tokens, 300 in steps of sequence_length_round_in_train",
            300,
        ),
        (
            balanced("actor_train", max_packed_sequence_length_forward=100),
            "actor_train.sequence_packing_args.max_packed_sequence_length_forward",
            "less than the longest sequence (256 tokens)",
            256,
        ),
        (
            balanced("actor_train", min_num_micro_batches_train=65),
            "actor_train.sequence_packing_args.min_num_micro_batches_train",
            "more than the 64 rows that a rank has in an optimizer step",
            64,
        ),
        (
            balanced("actor_train") | DYNAMIC | {TRAIN_BUDGET: 4096},
            "actor_train.use_dynamic_batching_in_train",
            "two ways to form micro-batches",
            False,
        ),
        (
            {"reference.use_dynamic_batching_in_infer": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
            "reference.max_tokens_per_microbatch_in_infer",
            "is needed",
            1024,
        ),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, Any], key: str, rule: str, example: Any) -> None:
    (problem,) = mistakes(tmp_path, changed(changes))
    assert problem.key == key
    assert rule in problem.rule
    assert problem.example == example


def test_sft_is_checked_against_its_own_length(tmp_path: Path) -> None:
    keys = {"sft_train.use_dynamic_batching_in_train": True, "sft_train.max_tokens_per_microbatch_in_train": 128}
    (problem,) = mistakes(tmp_path, changed(keys, GOOD_SFT))
    assert "(256 tokens)" in problem.rule


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({TRAIN_BUDGET: 4096}, TRAIN_BUDGET, "no effect without use_dynamic_batching_in_train"),
        (
            {"actor_train.sequence_packing_args.max_packed_sequence_length_train": 4096},
            "actor_train.sequence_packing_args",
            "no effect without use_sequence_packing",
        ),
        (
            balanced("actor_train", algorithm="none", min_num_micro_batches_train=2),
            "actor_train.sequence_packing_args",
            "no effect without algorithm: load_balance",
        ),
        (
            {"reference.use_dynamic_batching_in_train": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
            "reference.use_dynamic_batching_in_train",
            "no effect: this role does not train",
        ),
    ],
)
def test_keys_without_effect_are_noted(tmp_path: Path, changes: dict[str, Any], key: str, text: str) -> None:
    loaded = load(tmp_path, changed(changes))
    assert any(notice.key == key and text in str(notice) for notice in loaded.warnings)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            balanced("actor_train", max_packed_sequence_length_train=4096),
            [
                "2 ranks x 64 rows in balanced micro-batches of at most 4,096 tokens, without padding",
                "actor_train: balanced micro-batches of at most 256 tokens, without padding",
            ],
        ),
        (DYNAMIC | {TRAIN_BUDGET: 4096}, ["2 ranks x 64 rows in micro-batches of at most 4,096 tokens"]),
        (
            {"actor_train.use_remove_padding": True},
            [
                "2 ranks x 8 micro-batches of 8, without padding",
                "actor_train: micro-batches of 16 rows, without padding",
            ],
        ),
    ],
)
def test_the_plan_shows_budgets(tmp_path: Path, changes: dict[str, Any], lines: list[str]) -> None:
    output = StringIO()
    render_plan(load(tmp_path, changed(changes)), Console(width=200, file=output))
    text = output.getvalue()
    assert [line for line in lines if line not in text] == []
