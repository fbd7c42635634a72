"""PyTorch FSDP2: parameters, gradients and optimizer states sharded over the ranks of a role."""

from roll.strategies.fsdp2.strategy import Fsdp2InferStrategy
from roll.strategies.fsdp2.train import Fsdp2TrainStrategy

__all__ = ["Fsdp2InferStrategy", "Fsdp2TrainStrategy"]
