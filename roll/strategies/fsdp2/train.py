"""``fsdp2_train``: the sharded model that learns."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from roll.config.roles import WorkerConfig
from roll.models.build import enable_gradient_checkpointing
from roll.protocol.metrics import Mean, Metrics, Sum
from roll.strategies.base import ModelHead, StateKind
from roll.strategies.data_parallel import DataParallelTrainStrategy
from roll.strategies.fsdp2 import checkpoint
from roll.strategies.fsdp2.gradients import clip_, global_norm, local_gradients
from roll.strategies.fsdp2.strategy import Fsdp2InferStrategy
from roll.strategies.optimizer import build_adamw, state_tensors
from roll.strategies.schedule import LearningRateSchedule

logger = logging.getLogger(__name__)


class Fsdp2TrainStrategy(DataParallelTrainStrategy, Fsdp2InferStrategy):
    """Float32 master weights and AdamW moments, sharded; forward and backward in the compute dtype."""

    def __init__(
        self,
        role: WorkerConfig,
        head: ModelHead = ModelHead.CAUSAL_LM,
        seed: int = 42,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(role, head, seed, max_grad_norm)
        self._refuse_fp16("model_args.dtype and strategy_config.param_dtype")

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. With ``num_training_steps`` 0 the model can be computed and saved, but not trained."""
        self._build(storage_dtype=torch.float32)
        self.step = 0
        if num_training_steps:
            enable_gradient_checkpointing(self.model.language_model, self.role.model_args)
            self.schedule = LearningRateSchedule.from_arguments(self.role.training_args, num_training_steps)
            self.optimizer = build_adamw(self.model, self.role.training_args)
            self.trainable = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            self.model.train()
        else:
            self.model.eval()

    def _differentiate(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _update(self) -> Metrics:
        """Clip, step and clear. A gradient that is not finite is dropped: the step counts, the weights stay."""
        gradients = local_gradients(self.trainable)
        norm = float(global_norm(gradients, self._shard_group(), self.device))
        learning_rate = self.schedule(self.step)
        metrics: Metrics = {"grad_norm": Mean(norm), "lr": Mean(learning_rate)}
        if math.isfinite(norm):
            if self.max_grad_norm is not None:
                clip_(gradients, norm, self.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        else:
            logger.warning("optimizer step %d: gradient norm is %s; the update is skipped", self.step, norm)
            metrics["skipped_updates"] = Sum(1.0 / self.world_size)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return metrics

    def _begin_micro_batch(self, last: bool) -> None:
        """Sum gradients over shards at every micro-batch or at the last one only; over replicas at the last one."""
        if self.root is None or self.world_size == 1:
            return
        if not self.config.reduce_scatter_during_grad_accumulation:
            self.root.set_requires_gradient_sync(last)
        elif self.mesh.ndim == 2:
            self.root.set_requires_all_reduce(last)

    def _shard_group(self) -> ProcessGroup | None:
        return self.mesh.get_group("fsdp") if self.mesh["fsdp"].size() > 1 else None

    def save(self, path: Path) -> None:
        checkpoint.save(
            path,
            self.model.language_model,
            None if self.config.save_only_model else self.optimizer,
            step=self.step,
        )

    def load(self, path: Path) -> None:
        self.step = checkpoint.load(path, self.model.language_model, self.optimizer)

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        if kind is StateKind.OPTIMIZER_STATES and hasattr(self, "optimizer"):
            return self._on_device(state_tensors(self.optimizer))
        return super()._device_tensors(kind)
