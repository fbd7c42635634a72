"""Small models of transformers' families, with the same weights every time."""

from __future__ import annotations

from typing import Any

import torch


def tiny(family: str, head: str = "CausalLM", seed: int = 0, **options: Any) -> Any:
    """``Qwen2ForCausalLM``, say, of two small layers; ``options`` of its configuration."""
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    return getattr(transformers, f"{family}For{head}")(getattr(transformers, f"{family}Config")(**sizes | options))
