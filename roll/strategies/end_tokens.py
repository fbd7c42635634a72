"""Which tokens end a sample."""

from __future__ import annotations

from typing import Any

from roll.config.roles import ModelArguments


def model_end_token_ids(args: ModelArguments, model_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """:func:`end_token_ids` of the model in a folder or on the hub.

    Args:
        model_config: the model's Hugging Face config.
    """
    from transformers import GenerationConfig

    assert args.model_name_or_path
    try:
        generation_config = GenerationConfig.from_pretrained(args.model_name_or_path)
    except OSError:  # a folder without one
        generation_config = None
    return end_token_ids(generation_config, model_config, tokenizer)


def end_token_ids(generation_config: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a sequence by the generation config (or else the model's config) or the tokenizer.

    The two differ where a chat model was made from a base model; each knows one way to end.
    """
    ids: list[int] = []
    for source in (generation_config, config.get_text_config()):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None and not ids:
            ids += eos if isinstance(eos, list | tuple) else [eos]
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(int(token) for token in ids))
