"""``fsdp2_train``: the sharded model that learns."""

from __future__ import annotations

from roll.strategies.distributed_checkpoint import Checkpointed
from roll.strategies.fsdp2.strategy import Fsdp2InferStrategy
from roll.strategies.sharded import ShardedTrainStrategy


class Fsdp2TrainStrategy(ShardedTrainStrategy, Fsdp2InferStrategy):
    """Learns with shards made by ``fully_shard``."""

    def _begin_micro_batch(self, last: bool) -> None:
        """Sum gradients over shards at every micro-batch or at the last one only; over replicas at the last one."""
        if self.root is None or self.world_size == 1:
            return
        if not self.config.reduce_scatter_during_grad_accumulation:
            self.root.set_requires_gradient_sync(last)
        elif self.mesh.ndim == 2:
            self.root.set_requires_all_reduce(last)

    def _checkpointed(self) -> Checkpointed:
        return Checkpointed(self.model.language_model, self.optimizer)
