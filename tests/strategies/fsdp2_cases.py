"""What the ranks of a pool are asked to do in the tests of FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from roll.config.roles import WorkerConfig
from roll.models.build import build_model
from roll.models.tensor_files import TensorFiles
from roll.protocol.metrics import Metrics, to_floats
from roll.strategies.base import ModelHead, Output
from roll.strategies.factory import create_strategy
from roll.strategies.fsdp2 import Fsdp2TrainStrategy
from roll.strategies.fsdp2.gradients import local_tensor
from tests.strategies.samples import TensorBatch, policy_loss, value_loss

POLICY = (Output.LOG_PROBS, Output.ENTROPY)


class RecordingStrategy(Fsdp2TrainStrategy):
    """Keeps the whole gradient of each optimizer step, gathered before it is clipped."""

    gradients: dict[str, torch.Tensor]

    def _update(self) -> Metrics:
        named = self.model.language_model.named_parameters()
        self.gradients = {name: _full(parameter.grad) for name, parameter in named if parameter.grad is not None}
        return super()._update()


def _full(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.clone()


def weights_of(strategy: Any, bucket_bytes: int = 2**30) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in strategy.named_full_weights(bucket_bytes) for name, tensor in bucket}


def train(
    role: WorkerConfig, batch: TensorBatch, steps: int = 1, max_grad_norm: float | None = None, value: bool = False
) -> dict[str, Any]:
    """``steps`` optimizer steps; the metrics, gradients and outputs before the last one, and the weights after it."""
    head = ModelHead.VALUE if value else ModelHead.CAUSAL_LM
    outputs = (Output.VALUES,) if value else POLICY
    strategy = RecordingStrategy(role, head, max_grad_norm=max_grad_norm)
    strategy.initialize(num_training_steps=10)
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
    """Train, save half-way, train on; the state at the end, and a random number drawn there."""
    torch.manual_seed(7)
    strategy = RecordingStrategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    for step in range(2 * steps):
        if step == steps:
            strategy.save(path)
            # What happens between saving and going on must not matter.
        torch.rand(3)
        metrics = strategy.train_step(batch, policy_loss, POLICY)
    return _state(strategy, metrics)


def load_and_train(role: WorkerConfig, batch: TensorBatch, path: Path, steps: int) -> dict[str, Any]:
    strategy = RecordingStrategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    strategy.load(path)
    for _ in range(steps):
        torch.rand(3)
        metrics = strategy.train_step(batch, policy_loss, POLICY)
    return _state(strategy, metrics)


def _state(strategy: RecordingStrategy, metrics: Metrics) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in strategy.model.language_model.named_parameters()}
    moments = {
        f"{names[id(parameter)]}.{key}": _full(value)
        for parameter, state in strategy.optimizer.state.items()
        for key, value in state.items()
    }
    return {
        "metrics": to_floats(metrics),
        "weights": weights_of(strategy),
        "moments": moments,
        "step": strategy.step,
        "random": torch.rand(4),
    }


def refused(role: WorkerConfig) -> str:
    """The message of the ValueError that building the strategy raises."""
    try:
        create_strategy(role).initialize()
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


def compare_loading(role: WorkerConfig) -> dict[str, Any]:
    """Load shard by shard and whole; the names of local tensors that differ, and how much was read."""
    sizes = []

    class Counting(TensorFiles):
        def read_rows(self, name: str, rows: slice) -> torch.Tensor:
            tensor = super().read_rows(name, rows)
            sizes.append(len(tensor))
            return tensor

    class Whole(Fsdp2TrainStrategy):
        def _build_language_model(self, storage_dtype: torch.dtype) -> Any:
            self._unread = None
            return build_model(self.role.model_args, self.head.value, storage_dtype)

    with mock.patch("roll.models.unread.TensorFiles", Counting):
        ours = Fsdp2TrainStrategy(role)
        ours.initialize(num_training_steps=1)
    whole = Whole(role)
    whole.initialize(num_training_steps=1)
    tensors = dict(ours.model.named_parameters()) | dict(ours.model.named_buffers())
    wanted = dict(whole.model.named_parameters()) | dict(whole.model.named_buffers())
    assert tensors.keys() == wanted.keys()
    same = {name: torch.equal(local_tensor(tensors[name]), local_tensor(wanted[name])) for name in wanted}
    return {
        "different": [name for name, equal in same.items() if not equal],
        "meta": [name for name, tensor in tensors.items() if tensor.is_meta],
        "rows_read": sum(sizes),
        "rows": sum(len(parameter) for parameter in ours.model.parameters()),
        "tensors": len(sizes),
    }
