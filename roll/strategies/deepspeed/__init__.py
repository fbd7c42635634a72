"""DeepSpeed ZeRO: optimizer states, gradients and parameters sharded stage by stage, some of them in host memory."""

from roll.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
