"""The tokenizer that belongs to a role's model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model_path: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """From a model's folder or hub name."""
    from transformers import AutoTokenizer

    assert model_path is not None, "a role with a model has a model path"
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    return tokenizer


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's padding token, or its end token where it has none (padding is always masked)."""
    pad = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if pad is None else pad)
