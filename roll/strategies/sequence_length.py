"""How long a sequence an engine makes room for."""

from __future__ import annotations

from typing import Any


def longest_sequence(asked: int | None, config: Any, model_path: str | None) -> int:
    """Most tokens of prompt and response together.

    Args:
        asked: ``strategy_config.max_model_len``; None: as many as the model has positions.
        config: the model's Hugging Face config.
        model_path: for messages.

    Raises:
        ValueError: more than the model has positions, or no number at all.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        if longest is None:
            raise ValueError(
                "strategy_config.max_model_len: null, and the model names no longest sequence; give a number"
            )
        return int(longest)
    if longest is not None and asked > longest:
        raise ValueError(
            f"strategy_config.max_model_len: {asked} is more than the {longest} positions of {model_path}; "
            f"give at most {longest}"
        )
    return asked
