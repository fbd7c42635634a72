"""A backend in one class and one descriptor: the whole model on every rank, gradients summed over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from roll.config.roles import WorkerConfig
from roll.config.strategies import registry
from roll.config.strategies.base import Backend, StrategyConfig
from roll.protocol.metrics import to_floats
from roll.strategies.base import create_strategy
from roll.strategies.training.adamw import adamw
from roll.strategies.training.data_parallel import DataParallelStrategy
from roll.strategies.training.optimizer import TrainingProgress, decay_groups
from tests.strategies.jobs import POLICY, weights_of
from tests.strategies.samples import TensorBatch, policy_loss

REPLICATED = Backend(
    "replicated", StrategyConfig, computes=f"{__name__}.ReplicatedStrategy", trains=True, checkpoints="replicated"
)


class ReplicatedStrategy(DataParallelStrategy):
    """Float32 throughout."""

    compute_dtype = torch.float32

    def initialize(self, num_training_steps: int = 0) -> None:
        self._refuse_steps(num_training_steps)
        self._load_model(torch.float32)
        self.model.train(num_training_steps > 0)
        if num_training_steps:
            self.progress = TrainingProgress(self.role.training_args, num_training_steps, torch.float32)
            args = self.role.training_args
            self.optimizer = adamw(decay_groups(self.model, args.weight_decay), args)

    def _clip_and_step(self, learning_rate: float) -> float:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        norm = torch.nn.utils.get_total_norm(gradients)
        self.optimizer.zero_grad()
        return float(norm)


def register() -> None:
    if REPLICATED.names[0] not in registry.BACKENDS:
        registry.BACKENDS.add(REPLICATED)


def train(role: WorkerConfig, batch: TensorBatch, steps: int) -> dict[str, Any]:
    """``steps`` optimizer steps of the strategy that the registry names, with this backend in it."""
    register()
    strategy = create_strategy(role)
    strategy.initialize(num_training_steps=10)
    metrics = [to_floats(strategy.train_step(batch, policy_loss, POLICY)) for _ in range(steps)]
    return {"metrics": metrics, "outputs": strategy.forward(batch, POLICY), "weights": weights_of(strategy)}


def forward_only(role: WorkerConfig) -> str:
    register()
    try:
        create_strategy(role).initialize(num_training_steps=1)
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")
