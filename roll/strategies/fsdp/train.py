"""``fsdp_train``: the sharded model that learns."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from roll.config.strategies.fsdp import FSDP1_OFFLOAD
from roll.strategies.distributed_checkpoint import Checkpointed
from roll.strategies.fsdp.strategy import FsdpInferStrategy
from roll.strategies.optimizer import decay_groups
from roll.strategies.sharded import ShardedTrainStrategy


class FsdpTrainStrategy(ShardedTrainStrategy, FsdpInferStrategy):
    """Learns with shards made by ``FullyShardedDataParallel``."""

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. With ``num_training_steps`` 0 the model can be computed and saved, but not trained.

        Raises:
            ValueError: training with parameters in host memory, which FSDP1 cannot do.
        """
        if num_training_steps and self.config.offload_policy:
            raise ValueError(f"{self.role.name}.strategy_args.strategy_config.offload_policy: {FSDP1_OFFLOAD}")
        super().initialize(num_training_steps)

    def _decay_groups(self) -> list[dict[str, Any]]:
        # Every parameter is a run of elements here: which of them is a matrix shows in its whole shape.
        return decay_groups(self.model, self.role.training_args.weight_decay, self._num_dims)

    def _num_dims(self, parameter: torch.Tensor) -> int:
        return len(self._pieces[parameter].shape) if parameter in self._pieces else parameter.ndim

    def _begin_micro_batch(self, last: bool) -> None:
        self._reduces = last or self.config.reduce_scatter_during_grad_accumulation

    def _differentiate(self, loss: torch.Tensor) -> None:
        """FSDP1 takes the mean over ranks; the loss is this rank's share of a sum."""
        if self.root is None:
            super()._differentiate(loss)
            return
        with nullcontext() if self._reduces else self.root.no_sync():
            super()._differentiate(loss * self.world_size)

    def _checkpointed(self) -> Checkpointed:
        self._reshard()
        if self.root is None:
            return Checkpointed(self.model.language_model, self.optimizer)
        # FSDP1 takes back whole units only, frozen parameters among them.
        return Checkpointed(self.root, self.optimizer, prefix="language_model.", with_frozen=True)
