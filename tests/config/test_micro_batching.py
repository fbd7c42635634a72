"""Division of rows into micro-batches: rules, mistakes before a run, and what the plan says."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.plan.plan import MicroBatching, micro_batching, with_packed_lengths
from roll.config.roles import SequencePackingArguments, TrainingArguments, WorkerConfig


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
