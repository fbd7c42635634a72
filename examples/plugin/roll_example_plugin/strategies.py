"""``strategy_name: brief``: the description of an engine, which imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.reading.fields import setting
from roll.config.strategies.base import Backend
from roll.config.strategies.hf_infer import HF_INFER, HfInferStrategyConfig


@dataclass(frozen=True)
class BriefConfig(HfInferStrategyConfig):
    """Options of ``hf_infer``, and one more."""

    most_tokens: int = setting(8, ge=1)
    """Most tokens of a response, whatever is asked for."""


BRIEF = Backend(
    "brief",
    BriefConfig,
    generates="roll_example_plugin.engine.BriefEngine",
    updates=HF_INFER.updates,
    holds_sent_dtype=HF_INFER.holds_sent_dtype,
)
