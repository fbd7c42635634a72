"""Options of ``hf_infer``: the embedded generation engine, and the plain model of a role that computes log-probs."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.reading.fields import setting
from roll.config.strategies.base import Backend, EngineConfig


@dataclass(frozen=True)
class HfInferStrategyConfig(EngineConfig):
    """``hf_infer``: the embedded generation engine on transformers models; these are the engine's options.

    A reference under ``hf_infer`` is the plain model on each device, and needs none of them.
    """

    prefix_cache_tokens: int = setting(0, ge=0, example=65536)
    """Most tokens of finished samples whose keys and values are kept for prompts that begin with them, such as the next
    turn of a conversation. Emptied at every weight update; 0: none."""


HF_INFER = Backend(
    "hf_infer",
    HfInferStrategyConfig,
    computes="roll.strategies.hf_infer.strategy.HfForwardStrategy",
    generates="roll.strategies.hf_infer.HfInferStrategy",
    updates=("trained", "delta", "full"),
    holds_sent_dtype=True,
)
