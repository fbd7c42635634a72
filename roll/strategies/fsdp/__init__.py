"""PyTorch FSDP1 (``FullyShardedDataParallel``): the same sharding as FSDP2, by the older wrapper."""

from roll.strategies.fsdp.strategy import FsdpInferStrategy
from roll.strategies.fsdp.train import FsdpTrainStrategy

__all__ = ["FsdpInferStrategy", "FsdpTrainStrategy"]
