"""The entropy that is logged without a bonus: the same update to the last bit, and a number that is right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.algorithms.losses import actor_loss_options
from roll.config.roles import WorkerConfig
from roll.methods.losses import PolicyLoss
from roll.protocol.metrics import to_floats
from roll.strategies.base import ModelHead, Output
from roll.strategies.factory import create_strategy
from tests.strategies.samples import TensorBatch, make_batch, make_role, plain_model, plain_outputs

RunRanks = Callable[..., list[Any]]
STRATEGIES: dict[str, tuple[int, dict[str, Any], str]] = {
    "fsdp2_train": (2, {}, "torch"),
    "fsdp_train": (2, {}, "torch"),
    "deepspeed_train": (2, {"zero_stage": 3}, "deepspeed"),
    "megatron_train": (2, {"tensor_model_parallel_size": 2}, "megatron"),
}
"""Ranks, ``strategy_config`` and the package that it needs. The ranks of Megatron have the same rows."""


def update(role: WorkerConfig, batch: TensorBatch, outputs: tuple[Output, ...], steps: int = 2) -> dict[str, Any]:
    """``steps`` updates by the actor's loss without a bonus; the metrics of each, and the weights afterwards."""
    strategy: Any = create_strategy(role, ModelHead.CAUSAL_LM, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    rows = {**batch, "loss_mask": batch["response_mask"]}
    actor = PolicyLoss(options=actor_loss_options({}))
    loss = partial(actor, totals={"rows": strategy.all_reduce_sum(actor.counts(rows)["rows"])})
    metrics = [to_floats(strategy.train_step(rows, loss, outputs, 0.7)) for _ in range(steps)]
    weights = {name: tensor.clone() for bucket in strategy.named_full_weights(2**30) for name, tensor in bucket}
    return {"metrics": metrics, "weights": weights}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_update_is_the_same_bit_for_bit(run_ranks: RunRanks, untied_model: Path, strategy: str) -> None:
    ranks, config, package = STRATEGIES[strategy]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    batch = make_batch()
    role = make_role(untied_model, strategy, config=config)
    plain = run_ranks(ranks, update, role, batch, (Output.LOG_PROBS,))
    logged = run_ranks(ranks, update, role, batch, (Output.LOG_PROBS, Output.ENTROPY))
    for one, other in zip(plain, logged, strict=True):
        entropies = [row.pop("actor/entropy") for row in other["metrics"]]
        assert one["metrics"] == other["metrics"]
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
        assert len(entropies) == 2
    expected = plain_outputs(plain_model(untied_model), batch, 0.7)["entropy"].sum() / batch["response_mask"].sum()
    assert entropies[0] == pytest.approx(float(expected), rel=1e-5)
    assert other["metrics"][0]["grad_norm"] > 0
