"""Work of the ranks of a pool in the tests of strategies, whichever a role names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll.config.roles import WorkerConfig
from roll.protocol.metrics import Metrics, to_floats
from roll.strategies.base import ModelHead, Output
from roll.strategies.factory import create_strategy
from roll.strategies.fsdp.fsdp1 import clean_name
from roll.strategies.training.optimizer import local_tensor
from tests.strategies.samples import TensorBatch, policy_loss, value_loss

POLICY = (Output.LOG_PROBS, Output.ENTROPY, Output.SUM_OF_SQUARES)


def trainer(role: WorkerConfig, value: bool = False, max_grad_norm: float | None = None) -> Any:
    """The training strategy of ``role``, which keeps the whole gradient of each step as it is before clipping."""
    head = ModelHead.VALUE if value else ModelHead.CAUSAL_LM
    strategy: Any = create_strategy(role, head, max_grad_norm=max_grad_norm)
    clip_and_step = strategy._clip_and_step

    def recording(learning_rate: float) -> float:
        strategy.gradients = whole_gradients(strategy)
        return clip_and_step(learning_rate)

    strategy._clip_and_step = recording
    strategy.initialize(num_training_steps=10)
    return strategy


def whole_gradients(strategy: Any) -> dict[str, torch.Tensor]:
    named = strategy.model.language_model.named_parameters()
    trained = {clean_name(name): parameter for name, parameter in named if parameter.requires_grad}
    return {name: whole(strategy, parameter, parameter.grad) for name, parameter in trained.items()}


def whole(strategy: Any, parameter: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor:
    """The whole of a tensor like ``parameter``, of which ``local`` is this rank's part (None: it has none)."""
    pieces = getattr(strategy, "_pieces", {}).get(parameter)
    if pieces is None:
        assert local is not None
        # Experts that are divided over ranks: of all of them.
        local = strategy._whole(local) if hasattr(strategy, "_whole") else local
        return local.full_tensor().clone() if hasattr(local, "full_tensor") else local.clone()
    group = strategy.mesh.get_group("fsdp")
    run = torch.zeros(pieces.shape.numel())
    if local is not None:
        start = sum(pieces.sizes[: dist.get_rank(group)])
        run[start : start + local.numel()] = local.flatten()
    dist.all_reduce(run, group=group)
    return run.view(pieces.shape)


def weights_of(strategy: Any, bucket_bytes: int = 2**30) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in strategy.named_full_weights(bucket_bytes) for name, tensor in bucket}


def train(
    role: WorkerConfig, batch: TensorBatch, steps: int = 1, max_grad_norm: float | None = None, value: bool = False
) -> dict[str, Any]:
    """``steps`` optimizer steps; the metrics, gradients and outputs before the last one, and the weights after it."""
    outputs = (Output.VALUES,) if value else POLICY
    strategy = trainer(role, value, max_grad_norm)
    for _ in range(steps):
        before = strategy.forward(batch, outputs)
        metrics = strategy.train_step(batch, value_loss if value else policy_loss, outputs)
    dtypes = {str(local_tensor(parameter).dtype) for parameter in strategy.model.parameters()}
    return {
        "metrics": to_floats(metrics),
        "gradients": strategy.gradients,
        "outputs": before,
        "weights": weights_of(strategy),
        "dtypes": dtypes,
        "rank_info": strategy.rank_info,
    }


def forward(role: WorkerConfig, batch: TensorBatch, temperature: float = 1.0) -> TensorBatch:
    strategy = create_strategy(role)
    strategy.initialize()
    first = strategy.forward(batch, POLICY, temperature)
    again = strategy.forward(batch, POLICY, temperature)
    assert all(torch.equal(first[name], again[name]) for name in first)
    return first


def buckets(role: WorkerConfig, bucket_bytes: int) -> list[dict[str, torch.Tensor]]:
    strategy = create_strategy(role)
    strategy.initialize()
    return [dict(bucket) for bucket in strategy.named_full_weights(bucket_bytes)]


def export(role: WorkerConfig, path: Path, value: bool = False) -> None:
    strategy = create_strategy(role, ModelHead.VALUE if value else ModelHead.CAUSAL_LM)
    strategy.initialize()
    strategy.save_hf(path)


def train_and_save(role: WorkerConfig, batch: TensorBatch, path: Path, steps: int) -> dict[str, Any]:
    """Train, save halfway, train on; the state at the end, and a random number drawn there."""
    torch.manual_seed(7)
    strategy = trainer(role, max_grad_norm=1.0)
    for step in range(2 * steps):
        if step == steps:
            strategy.save(path)
            # What happens between saving and going on must not matter.
        torch.rand(3)
        metrics = strategy.train_step(batch, policy_loss, POLICY)
    assert strategy.saved() and strategy.saved(wait=False)
    return _state(strategy, metrics)


def load_and_train(role: WorkerConfig, batch: TensorBatch, path: Path, steps: int) -> dict[str, Any]:
    strategy = trainer(role, max_grad_norm=1.0)
    strategy.load(path)
    for _ in range(steps):
        torch.rand(3)
        metrics = strategy.train_step(batch, policy_loss, POLICY)
    return _state(strategy, metrics)


def _state(strategy: Any, metrics: Metrics) -> dict[str, Any]:
    moments = {}
    for name, parameter in strategy.model.language_model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = strategy.optimizer.state.get(parameter, {})
        for key in ("exp_avg", "exp_avg_sq"):
            moments[f"{clean_name(name)}.{key}"] = whole(strategy, parameter, state.get(key))
        if "step" in state:
            moments[f"{clean_name(name)}.step"] = state["step"].clone()
    return {
        "metrics": to_floats(metrics),
        "weights": weights_of(strategy),
        "moments": moments,
        "step": strategy.progress.step,
        "random": torch.rand(4),
    }


def poison(role: WorkerConfig, batch: TensorBatch) -> dict[str, Any]:
    """A step whose gradient is infinite on one rank only, then a good one."""
    return poisoned(trainer(role, max_grad_norm=1.0), batch)


def poisoned(strategy: Any, batch: TensorBatch) -> dict[str, Any]:
    """The steps of :func:`poison` by a strategy that has been initialised."""
    before = weights_of(strategy)
    first = strategy.train_step(batch, _exploding_loss, POLICY)
    after = weights_of(strategy)
    second = strategy.train_step(batch, policy_loss, POLICY)
    return {
        "skipped": first["skipped_updates"].value(),
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "second": to_floats(second),
        "step": strategy.progress.step,
    }


def _exploding_loss(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    loss, metrics = policy_loss(outputs, batch)
    return loss * (float("inf") if dist.get_rank() == 0 else 1.0), metrics


def each(function: Callable[..., Any], roles: dict[str, WorkerConfig], *args: Any) -> dict[str, Any]:
    """``function(role, *args)`` for each of the roles, one after the other in the same processes."""
    return {name: function(role, *args) for name, role in roles.items()}


def refused(role: WorkerConfig) -> str:
    """The message of the ValueError that building the strategy raises."""
    try:
        create_strategy(role).initialize()
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")
