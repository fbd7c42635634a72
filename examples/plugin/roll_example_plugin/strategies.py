"""``strategy_name: noisy``: the description of an engine, which imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.reading.fields import setting
from roll.config.strategies.base import Backend
from roll.config.strategies.engines import HF_INFER, HfInferStrategyConfig


@dataclass(frozen=True)
class NoisyConfig(HfInferStrategyConfig):
    """Options of ``hf_infer``, and one more."""

    noise: float = setting(0.1, ge=0)
    """Standard deviation of what is added to every logit."""


NOISY = Backend(
    "noisy",
    NoisyConfig,
    generates="roll_example_plugin.engine.NoisyEngine",
    updates=HF_INFER.updates,
    holds_sent_dtype=HF_INFER.holds_sent_dtype,
)
