"""A role's small copy, through Megatron's layers on the role's own ranks, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies import jobs


def started(role: Any, value: bool = False) -> tuple[list[str], bool]:
    """Messages of the self-test, and whether the random state is left as it was seeded."""
    strategy, messages = jobs.started_with_messages(role, "roll.strategies.megatron.self_test", value=value)
    state = torch.get_rng_state()
    torch.manual_seed(strategy.seed + strategy.rank_info.dp_rank)
    return messages, torch.equal(torch.get_rng_state(), state)


@pytest.mark.default_rows("1-*-options1", "2-*-options5")
@pytest.mark.parametrize(
    ("world", "sizes", "model", "options"),
    [
        (1, {}, "llama", {"use_sequence_packing": True}),
        (1, {}, "qwen3", {"use_prefix_sharing": True}),
        (2, {"tp": 2}, "qwen3", {"use_remove_padding": True}),
        (2, {"pp": 2}, "qwen2", {}),
        (2, {"cp": 2}, "llama", {}),
        (2, {"ep": 2}, "qwen3_moe", {}),
    ],
)
def test_what_is_right_passes(run, world, sizes, model, options):
    for messages, same in run(started, world, "megatron_infer", model, config=sizes, batch=None, **options):
        assert len(messages) == 1 and "passed in" in messages[0]
        assert same, "a run's random numbers do not depend on it"


def test_a_critic(run):
    ((messages, _),) = run(started, 1, "megatron_infer", "qwen2", True, batch=None)
    assert "passed in" in messages[0]


def test_a_setting_that_changes_what_is_computed_is_found(run):
    """Megatron takes it, and would train another model than transformers has."""
    config = {"additional_configs": {"rotary_interleaved": True, "attention_softmax_in_fp32": True}}
    for text in run(jobs.refused, 2, "megatron_infer", "llama", config=config | {"tp": 2}, batch=None):
        assert (
            "a small copy of this llama model, computed by Megatron in padded rows, gives log_probs that are off by"
            in text
        )
        assert "leave rotary_interleaved out of strategy_config.additional_configs" in text
