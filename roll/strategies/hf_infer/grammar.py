"""JSON schemas that responses follow: which tokens can come next, by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import llguidance
import llguidance.hf
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from roll.strategies.engines.schemas import schema_grammar


class JsonGrammars:
    """Compiles schemas for a tokenizer.

    Args:
        vocab_size: tokens of the model's distribution, of which the tokenizer may know fewer.
        end_token_ids: may follow a text that is complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def start(self, schema: str) -> llguidance.LLMatcher:
        """State of a response before its first token. Raises ValueError for a text that is no JSON schema."""
        return self._compiled(schema).deep_copy()

    def _compile(self, schema: str) -> llguidance.LLMatcher:
        vocabulary = self._vocabulary
        matcher = llguidance.LLMatcher(vocabulary, schema_grammar(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(f"response_format: {matcher.get_error()}"[:500])
        return matcher

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        if not isinstance(self._tokenizer, TokenizersBackend):
            kind = type(self._tokenizer).__name__
            raise ValueError(f"response_format: needs a fast tokenizer, this model's is a {kind}; vllm takes it")
        if not self._end_token_ids:
            raise ValueError("response_format: the model has no end token (eos_token_id), so no text would end")
        return llguidance.hf.from_tokenizer(self._tokenizer, self._vocab_size, self._end_token_ids)
