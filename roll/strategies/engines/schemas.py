"""JSON schemas of responses (``response_format``), compiled within bounds before an engine sees them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache

import llguidance
import llguidance.hf
from transformers import PreTrainedTokenizerBase, TokenizersBackend

_MEMORY = 1 << 30  # bytes of address space; schemas of applications need a hundredth
_CPU_SECONDS = 2
_TRIAL = f"""
import resource, sys
import llguidance
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_SECONDS}, {_CPU_SECONDS}))
llguidance.LLMatcher(llguidance.LLTokenizer("byte"), sys.stdin.read(), log_level=0)
"""


def schema_grammar(schema: str) -> str:
    """A JSON schema as llguidance's grammar.

    It is compiled in a process of its own first: a short schema (an array of 10^9 items, a multiple of 123456789) may
    need more memory than there is, of which the compiler does not raise an error but ends its process, the engine.

    Raises:
        ValueError: no JSON schema, or one that needs too much time or memory.
    """
    grammar, problem = _tried(schema)
    if problem:
        raise ValueError(f"response_format: not a JSON schema that can be followed: {problem}"[:500])
    return grammar


@lru_cache(maxsize=64)
def _tried(schema: str) -> tuple[str, str]:
    """The grammar and what is wrong with it, the latter empty for none."""
    try:
        # With free white space an unsure model may write nothing else until its tokens are used up.
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
    except ValueError as error:  # a text that the compiler does not take for JSON, or nested too deeply
        return "", str(error)
    trial = subprocess.run([sys.executable, "-I", "-c", _TRIAL], input=grammar.encode(), capture_output=True)
    if trial.returncode:
        return "", f"it needs more than {_CPU_SECONDS} s or {_MEMORY >> 30} GiB to compile; give it smaller numbers"
    return grammar, llguidance.LLMatcher.validate_grammar(grammar)


class JsonGrammars:
    """Compiles schemas for a tokenizer: which tokens can come next, by llguidance. ``vocab_size``: tokens of the
    model's distribution, of which the tokenizer may know fewer. ``end_token_ids``: may follow a text that is
    complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, list(end_token_ids)
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def start(self, schema: str, begun: Sequence[int] = ()) -> llguidance.LLMatcher:
        """State of a response after the tokens ``begun``. Raises ValueError for a text that is no JSON schema."""
        matcher: llguidance.LLMatcher = self._compiled(schema).deep_copy()
        for token in begun:
            matcher.consume_token(token)
        return matcher

    def _compile(self, schema: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._vocabulary, schema_grammar(schema), log_level=0)
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
