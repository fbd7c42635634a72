"""Work of the ranks of a pool in the tests of Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from roll.config.roles import WorkerConfig
from roll.protocol.metrics import Metrics, to_floats
from roll.strategies.base import ModelHead, Output, WeightSelection
from roll.strategies.megatron import MegatronStrategy
from roll.strategies.megatron.correspondence import Correspondence
from roll.strategies.megatron.optimizer import MOMENTS
from roll.strategies.megatron.weights import FullWeights, OwnParameter
from tests.strategies import lora_cases
from tests.strategies.samples import TensorBatch, policy_loss, value_loss

POLICY = (Output.LOG_PROBS, Output.ENTROPY, Output.SUM_OF_SQUARES)


@contextmanager
def fresh_groups() -> Iterator[None]:
    """Megatron keeps its process groups in global variables; a pool's process forms many."""
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


class RecordingStrategy(MegatronStrategy):
    """Keeps the whole gradient of each optimizer step on rank 0, gathered before it is clipped."""

    gradients: dict[str, torch.Tensor]

    def _clip_and_step(self, learning_rate: float) -> float:
        self.optimizer.prepare_grads()
        self.gradients = self.whole(self._gradient, lambda own: own.parameter.requires_grad)
        return super()._clip_and_step(learning_rate)

    def whole(self, value: Any, keep: Any = lambda own: True) -> dict[str, torch.Tensor]:
        """``value(own)`` of each parameter, as whole float32 tensors under Hugging Face names, on rank 0."""
        tensors = [OwnParameter(own.correspondence, _like(own, value(own))) for own in self.parameters if keep(own)]
        buckets = FullWeights(tensors, self._info, self._shapes, torch.float32, self._stored).buckets(2**30)
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}

    def _gradient(self, own: OwnParameter) -> Any:
        whole = torch.zeros(own.parameter.shape)
        held = self.masters._held(own.parameter)
        if held is not None:
            main, interval, _ = held
            whole.view(-1)[interval] = main.grad.flatten()
        if self.config.use_distributed_optimizer:
            dist.all_reduce(whole, group=own.replicas)
        return whole

    def state(self) -> dict[str, torch.Tensor]:
        """Float32 master weights and moments."""
        kinds = ("weight", *MOMENTS)
        return {
            f"{kind}/{name}": tensor
            for kind in kinds
            for name, tensor in self.whole(lambda own, kind=kind: self.masters.get(own.parameter, kind)).items()
        }


def _like(own: OwnParameter, value: Any) -> Any:
    value.allreduce = getattr(own.parameter, "allreduce", True)
    return value


def weights_of(strategy: Any, bucket_bytes: int = 2**30) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in strategy.named_full_weights(bucket_bytes) for name, tensor in bucket}


def train(
    role: WorkerConfig, batch: TensorBatch, steps: int = 1, max_grad_norm: float | None = None, value: bool = False
) -> dict[str, Any]:
    """``steps`` optimizer steps; the outputs before the first one, metrics, gradients and outputs before the last one,
    and the weights after it."""
    with fresh_groups():
        outputs = (Output.VALUES,) if value else POLICY
        strategy = RecordingStrategy(
            role, ModelHead.VALUE if value else ModelHead.CAUSAL_LM, max_grad_norm=max_grad_norm
        )
        strategy.initialize(num_training_steps=10)
        history = []
        for _ in range(steps):
            history.append(strategy.forward(batch, outputs))
            metrics = strategy.train_step(batch, value_loss if value else policy_loss, outputs)
        return {
            "metrics": to_floats(metrics),
            "gradients": strategy.gradients,
            "first_outputs": history[0],
            "outputs": history[-1],
            "weights": weights_of(strategy),
            "rank_info": strategy.rank_info,
            "denominator": strategy.all_reduce_sum(torch.tensor([1.0])),
        }


def forward(role: WorkerConfig, batch: TensorBatch, temperature: float = 1.0) -> TensorBatch:
    with fresh_groups():
        strategy = MegatronStrategy(role)
        strategy.initialize()
        return strategy.forward(batch, POLICY, temperature)


def buckets(role: WorkerConfig, rows: TensorBatch, bucket_bytes: int) -> list[dict[str, torch.Tensor]]:
    with fresh_groups():
        strategy = MegatronStrategy(role)
        strategy.initialize()
        return [dict(bucket) for bucket in strategy.named_full_weights(bucket_bytes)]


def gathered_at_once(role: WorkerConfig, rows: TensorBatch, bucket_bytes: int) -> tuple[int, int]:
    """Most bytes of gathered tensors that were held when the next ones were gathered; most bytes of one gather."""
    gathered: list[ReferenceType[torch.Tensor]] = []
    held, sizes = [0], [0]
    collect = FullWeights._collect

    def watched(self: FullWeights, stage: int, entry: Correspondence) -> list[torch.Tensor]:
        held.append(sum(tensor.nbytes for one in gathered if (tensor := one()) is not None))
        tensors = collect(self, stage, entry)
        gathered.extend(ref(tensor) for tensor in tensors)
        sizes.append(sum(tensor.nbytes for tensor in tensors))
        return tensors

    with fresh_groups(), patch.object(FullWeights, "_collect", watched):
        strategy = MegatronStrategy(role)
        strategy.initialize()
        found = strategy.named_full_weights(bucket_bytes)
        while next(found, None) is not None:
            pass
    return max(held), max(sizes)


def export(role: WorkerConfig, rows: TensorBatch, path: Path, value: bool = False) -> None:
    with fresh_groups():
        strategy = MegatronStrategy(role, ModelHead.VALUE if value else ModelHead.CAUSAL_LM)
        strategy.initialize()
        strategy.save_hf(path)


def train_and_save(role: WorkerConfig, batch: TensorBatch, path: Path, steps: int) -> dict[str, Any]:
    """Train, save halfway, train on; the state at the end, and a random number drawn there."""
    with fresh_groups():
        strategy = RecordingStrategy(role, max_grad_norm=1.0)
        strategy.initialize(num_training_steps=10)
        for step in range(2 * steps):
            if step == steps:
                strategy.save(path)
            # What happens between saving and going on must not matter.
            torch.rand(3)
            metrics = strategy.train_step(batch, policy_loss, POLICY)
        return _end(strategy, metrics)


def load_and_train(role: WorkerConfig, batch: TensorBatch, path: Path, steps: int) -> dict[str, Any]:
    with fresh_groups():
        strategy = RecordingStrategy(role, max_grad_norm=1.0)
        strategy.initialize(num_training_steps=10)
        strategy.load(path)
        for _ in range(steps):
            torch.rand(3)
            metrics = strategy.train_step(batch, policy_loss, POLICY)
        return _end(strategy, metrics)


def _end(strategy: RecordingStrategy, metrics: Metrics) -> dict[str, Any]:
    return {
        "metrics": to_floats(metrics),
        "state": strategy.state(),
        "weights": weights_of(strategy),
        "step": strategy.progress.step,
        "random": torch.rand(4),
    }


def save_state(role: WorkerConfig, batch: TensorBatch, path: Path) -> dict[str, torch.Tensor]:
    """Contents of a checkpoint after one step."""
    with fresh_groups():
        strategy = RecordingStrategy(role)
        strategy.initialize(num_training_steps=10)
        strategy.train_step(batch, policy_loss, POLICY)
        strategy.save(path)
        return strategy.state()


def load_state(role: WorkerConfig, batch: TensorBatch, path: Path) -> dict[str, torch.Tensor]:
    with fresh_groups():
        strategy = RecordingStrategy(role)
        strategy.initialize(num_training_steps=10)
        strategy.load(path)
        return strategy.state()


def refused(role: WorkerConfig, rows: TensorBatch) -> str:
    """The message of the ValueError that building the strategy raises."""
    with fresh_groups():
        try:
            MegatronStrategy(role).initialize()
        except ValueError as error:
            return str(error)
        raise AssertionError("not refused")


def _recording(role: WorkerConfig, value: bool = False) -> RecordingStrategy:
    strategy = RecordingStrategy(role, ModelHead.VALUE if value else ModelHead.CAUSAL_LM)
    strategy.initialize(num_training_steps=10)
    return strategy


def train_lora(role: WorkerConfig, batch: TensorBatch, steps: int) -> dict[str, Any]:
    """:func:`lora_cases.train` under Megatron, with the norm of the last gradient."""
    with fresh_groups():
        strategy = _recording(role)
        result = lora_cases.train_started(strategy, batch, steps)
        names = strategy._live_names
        shapes = {name: parameter.shape for name, parameter in strategy._skeleton.named_parameters()}
        gradients = {names.get(name, name): value for name, value in result["gradients"].items()}
        result["gradients"] = {name: value.view(shapes[name]) for name, value in gradients.items()}
        states = [state for one in strategy.optimizer.chained_optimizers for state in one.optimizer.state.values()]
        moments = sum(state["exp_avg"].numel() for state in states if "exp_avg" in state)
        norm = to_floats(strategy.train_step(batch, policy_loss, POLICY))["grad_norm"]
        return result | {"rank_info": strategy.rank_info, "moments": moments, "next_norm": norm}


def train_and_save_lora(role: WorkerConfig, batch: TensorBatch, folder: Path) -> dict[str, torch.Tensor]:
    with fresh_groups():
        return lora_cases.train_and_save(_recording, role, batch, folder)


def load_and_train_lora(role: WorkerConfig, batch: TensorBatch, folder: Path) -> dict[str, torch.Tensor]:
    with fresh_groups():
        return lora_cases.load_and_train(_recording, role, batch, folder)


def initial_lora(role: WorkerConfig, batch: TensorBatch, value: bool = False) -> dict[str, torch.Tensor]:
    """The float32 master weights of what is trained before any step, whole, on rank 0."""
    with fresh_groups():
        strategy = _recording(role, value)
        trained = strategy.whole(
            lambda own: strategy.masters.get(own.parameter, "weight"), lambda own: own.parameter.requires_grad
        )
        return {name: tensor.clone() for name, tensor in trained.items()}


def merged_lora(role: WorkerConfig, batch: TensorBatch) -> list[dict[str, torch.Tensor]]:
    """All weights as they are sent: merged, W, A and B apart, and the trained ones of these."""
    selections = (WeightSelection(), WeightSelection(False, True), WeightSelection(True, True))
    with fresh_groups():
        strategy = _recording(role)
        return [
            {name: tensor.clone() for bucket in strategy.named_full_weights(4000, one) for name, tensor in bucket}
            for one in selections
        ]


def record_and_replay(role: WorkerConfig, batch: TensorBatch) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """The routes of a forward pass, metrics of a step that replays them, and the rows' response masks."""
    with fresh_groups():
        strategy = RecordingStrategy(role)
        strategy.initialize(num_training_steps=10)
        routes = strategy.forward(batch, (Output.LOG_PROBS, Output.ROUTES))[Output.ROUTES]
        metrics = strategy.train_step(batch | {"routed_experts": routes}, policy_loss, POLICY)
        return routes, to_floats(metrics), batch["response_mask"]
