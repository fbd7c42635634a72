"""``hf_infer``: the embedded generation engine on transformers models."""

from roll.strategies.hf_infer.strategy import HfInferStrategy

__all__ = ["HfInferStrategy"]
