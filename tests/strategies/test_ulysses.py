"""Ranks that share each sequence compute what a plain model computes, and count nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.strategies.factory import create_strategy
from tests.strategies import sharded_cases as cases
from tests.strategies.comparison import (
    RELATIVE,
    STEPS,
    assert_same_gradients,
    assert_same_weights,
    plain_results,
    plain_steps,
)
from tests.strategies.samples import DYNAMIC, PACKING, TensorBatch, make_batch, make_role, split_rows

RunRanks = Callable[..., list[Any]]
CHECKPOINTED = {"disable_gradient_checkpointing": False}


@pytest.fixture(scope="module")
def expected(tied_model: Path) -> dict[str, Any]:
    return plain_results(tied_model)


def role_of(model: Path, size: int, **options: Any) -> Any:
    model_args = {"ulysses_size": size} | options.pop("model_args", {})
    return make_role(model, model_args=model_args, **options)


def rows_by_rank(world_size: int, size: int) -> list[TensorBatch]:
    """As dispatch hands them out: the ranks that share sequences get the same rows."""
    shares = split_rows(make_batch(), {1: (12,), 2: (7, 5)}[world_size // size])
    return [shares[rank // size] for rank in range(world_size)]


@pytest.mark.default_rows("padded", "packed", "2x2", "fsdp1-packed")
@pytest.mark.parametrize(
    ("world_size", "size", "options"),
    [
        pytest.param(2, 2, {}, id="padded"),
        pytest.param(2, 2, {"model_args": CHECKPOINTED, "micro_batch": 1}, id="gradient-checkpointing"),
        pytest.param(2, 2, PACKING, id="packed"),
        pytest.param(2, 2, DYNAMIC | {"use_prefix_sharing": True}, id="shared-prompts"),
        pytest.param(4, 2, {"micro_batch": 5}, id="2x2"),
        pytest.param(4, 2, {"config": {"fsdp_size": 2}}, id="2x2-hsdp"),
        pytest.param(4, 2, PACKING | {"model_args": CHECKPOINTED}, id="2x2-packed-gradient-checkpointing"),
        pytest.param(2, 2, PACKING | {"strategy": "fsdp_train"}, id="fsdp1-packed"),
        pytest.param(4, 2, {"strategy": "fsdp_train", "model_args": CHECKPOINTED}, id="fsdp1-2x2"),
        pytest.param(4, 4, {}, id="fewer-key-value-heads-than-ranks"),
        pytest.param(4, 4, PACKING | {"use_prefix_sharing": True}, id="4-packed-shared-prompts"),
    ],
)
def test_gradient_and_outputs_equal_the_plain_model(
    run_ranks: RunRanks,
    tied_model: Path,
    expected: dict[str, Any],
    world_size: int,
    size: int,
    options: dict[str, Any],
) -> None:
    role = role_of(tied_model, size, **options)
    results = run_ranks(world_size, cases.train, role, rows_by_rank(world_size, size))
    for rank, result in enumerate(results):
        assert_same_gradients(result["gradients"], expected["gradients"])
        assert result["metrics"]["grad_norm"] == pytest.approx(expected["norm"], rel=RELATIVE)
        info = result["rank_info"]
        assert (info.dp_rank, info.dp_size, info.cp_rank, info.cp_size) == (
            rank // size,
            world_size // size,
            rank % size,
            size,
        )
        assert info.is_data_source == (rank % size == 0)
    for name, wanted in expected["outputs"].items():
        for member in range(size):
            actual = torch.cat([result["outputs"][name] for result in results[member::size]])
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)
            assert torch.equal(actual == 0, wanted == 0)


@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (4, PACKING)], ids=["padded", "2x2-packed"])
def test_optimizer_steps_equal_plain_adamw(
    run_ranks: RunRanks, tied_model: Path, world_size: int, options: dict[str, Any]
) -> None:
    role = role_of(tied_model, 2, training=STEPS, **options)
    result = run_ranks(world_size, cases.train, role, rows_by_rank(world_size, 2), 3, 0.05)[0]
    assert_same_weights(result["weights"], plain_steps(tied_model, 0.05))


def test_values_equal_those_of_one_rank(run_ranks: RunRanks, tied_model: Path) -> None:
    training = {"adam_epsilon": 1e-3}
    alone = run_ranks(1, cases.train, make_role(tied_model, training=training), [make_batch()], 3, None, True)[0]
    for options in ({}, PACKING):
        role = role_of(tied_model, 2, training=training, **options)
        for result in run_ranks(2, cases.train, role, rows_by_rank(2, 2), 3, None, True):
            torch.testing.assert_close(result["outputs"]["values"], alone["outputs"]["values"], rtol=0, atol=1e-5)
            assert result["outputs"]["values"].any()


def test_bf16_is_as_close_as_on_one_rank(run_ranks: RunRanks, tied_model: Path, expected: dict[str, Any]) -> None:
    results = run_ranks(2, cases.train, role_of(tied_model, 2, dtype="bf16"), rows_by_rank(2, 2))
    difference = results[0]["outputs"]["log_probs"] - expected["outputs"]["log_probs"]
    assert 1e-4 < float(difference.abs().max()) < 0.1
    assert results[0]["metrics"]["grad_norm"] == pytest.approx(expected["norm"], rel=0.03)


def reduced(role: Any, value: torch.Tensor) -> torch.Tensor:
    strategy = create_strategy(role)
    strategy.initialize(num_training_steps=1)
    assert strategy.trains
    return strategy.all_reduce_sum(value)


def test_denominators_count_rows_once(run_ranks: RunRanks, tied_model: Path) -> None:
    shares = [torch.tensor([3.0, 1.0]), torch.tensor([3.0, 1.0]), torch.tensor([5.0, 2.0]), torch.tensor([5.0, 2.0])]
    for total in run_ranks(4, reduced, role_of(tied_model, 2), shares):
        assert total.tolist() == [8.0, 3.0]


def test_sizes_that_do_not_fit_are_refused(run_ranks: RunRanks, tied_model: Path) -> None:
    (message,) = run_ranks(1, cases.refused, role_of(tied_model, 2))
    assert "ulysses_size: 2 does not divide the role's 1 ranks" in message
    messages = run_ranks(3, cases.refused, role_of(tied_model, 3))
    assert all(
        "ulysses_size: 3 does not divide the model's 4 attention heads; use one of 1, 2, 4" in m for m in messages
    )
