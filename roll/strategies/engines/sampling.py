"""Sampling by the settings of requests: random streams, filters, penalties, the draw of a token by one number, and JSON
schemas of responses (``response_format``), which are compiled within bounds before an engine sees them.

What a sample draws depends on its seed and position, not on its neighbours. A stream is a 64-bit key; its t-th number
is the t-th output of SplitMix64 started at that key (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators"), which needs no state but t.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache

import llguidance
import llguidance.hf
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, TokenizersBackend

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def stream_key(seed: int, sample_index: int) -> int:
    """The key of sample ``sample_index`` of a request seeded with ``seed``; 0 <= key < 2**64."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (sample_index + 1) * _GOLDEN) & _MASK)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number ``positions[b]`` of stream ``keys[b]``: float64 (B,), in [0, 1), multiples of 2**-53. ``keys`` are uint64
    (B,), ``positions`` int64 (B,), from 0."""
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: int) -> int:
    """The finaliser of SplitMix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_BLOCK = 64  # a row is searched in two stages: over sums of blocks, then inside one block
_SHORT_ROW = 512  # up to here one sum over the row is as fast
_CANDIDATES = 1024  # top-p without top-k: sorted this many first, the whole vocabulary only where they do not do


def penalise_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide the positive and multiply the negative logits of seen tokens by the penalty (Keskar et al. 2019, CTRL).
    ``logits`` are float32 (B, V), ``seen`` bool (B, V), ``penalty`` float32 (B,)."""
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def filter_threshold(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> torch.Tensor:
    """The lowest logit that may be sampled, float32 (B,).

    Args:
        logits: float32 (B, V), temperature applied.
        top_k: int64 (B,), 0 is off; tokens that tie with the k-th stay (as do ties at the border of top-p).
        top_p: float32 (B,); the fewest most likely tokens whose probabilities reach top_p stay, at least one.
        min_p: float32 (B,); tokens of at least min_p times the highest probability stay.
    """
    threshold = logits.new_full(logits.shape[:1], -torch.inf)
    if min_p is not None:
        threshold = logits.amax(-1) + min_p.log()
    if top_k is None:
        if top_p is None:
            return threshold
        kept = logits.masked_fill(logits < threshold[:, None], -torch.inf)
        normaliser = kept.logsumexp(-1, keepdim=True)
        for count in (min(_CANDIDATES, logits.shape[1]), logits.shape[1]):
            best = kept.topk(count, dim=-1).values
            probs = (best - normaliser).exp()
            if count == logits.shape[1] or bool((probs.sum(-1) > top_p).all()):
                break
        return torch.maximum(threshold, _border(best, probs, top_p))
    vocab_size = logits.shape[1]
    k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    best = logits.topk(int(k.max()), dim=-1).values
    threshold = torch.maximum(threshold, best.gather(1, (k - 1)[:, None])[:, 0])
    if top_p is None:
        return threshold
    probs = best.masked_fill(best < threshold[:, None], -torch.inf).softmax(-1)
    return torch.maximum(threshold, _border(best, probs, top_p))


def _border(best: torch.Tensor, probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The value in ``best`` (B, k, descending) at which the sum of ``probs`` reaches ``top_p``."""
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    count = (before < top_p[:, None]).sum(-1).clamp(min=1)
    # With top_p = 1 a cumulative sum that rounding has brought to 1 early must not drop the last tokens.
    border = best.gather(1, (count - 1)[:, None])[:, 0]
    return torch.where(top_p < 1, border, best.new_full((), -torch.inf))


def invert_cumulative(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds ``draws`` times the row's sum; never one of probability 0.

    Long rows are summed in blocks and the sums are added in float64, so that a vocabulary of 150,000 is searched
    without the error of a long float32 sum, and only one block is looked at token by token. ``probs`` are float32
    (B, V), not necessarily normalised; ``draws`` float64 (B,), in [0, 1); the tokens int64 (B,).
    """
    batch, vocab_size = probs.shape
    if vocab_size <= _SHORT_ROW:
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
    if vocab_size % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, _BLOCK - vocab_size % _BLOCK))
    blocks = probs.view(batch, -1, _BLOCK)
    sums = blocks.sum(-1)
    cumulative = sums.cumsum(-1, dtype=torch.float64)
    target = draws[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks.shape[1] - 1)
    block_sum = sums.gather(1, block).double()
    # How far into the block, as a share of it; below 1 whatever was rounded.
    share = (1 - (cumulative.gather(1, block) - target) / block_sum).clamp_(0, 1 - 2.0**-53)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    offset = torch.searchsorted(inside, share * inside[:, -1:], right=True)
    return (block * _BLOCK + offset)[:, 0]


class RowSettings:
    """The settings of a batch's rows on the device; None or False where no row uses one. ``top_k`` is int64
    (B,), 0 is off; the others are float32 (B,)."""

    def __init__(
        self,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        penalty: np.ndarray,
        device: torch.device,
    ) -> None:
        def column(values: np.ndarray, neutral: float) -> torch.Tensor | None:
            return None if (values == neutral).all() else torch.from_numpy(values.copy()).to(device)

        greedy = temperature == 0
        self.all_greedy, self.greedy = bool(greedy.all()), column(greedy, False)
        self.temperature = column(np.where(greedy, np.float32(1), temperature), 1)
        self.top_k, self.top_p, self.min_p = column(top_k, 0), column(top_p, 1), column(min_p, 0)
        self.penalty = column(penalty, 1)

    def filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, V): logits over the temperature, -inf for what the filters leave out."""
        scaled = logits if self.temperature is None else logits / self.temperature[:, None]
        if self.top_k is None and self.top_p is None and self.min_p is None:
            return scaled
        threshold = filter_threshold(scaled, self.top_k, self.top_p, self.min_p)
        return scaled.masked_fill(scaled < threshold[:, None], -torch.inf)

    def drawn(self, logits: torch.Tensor, probs: torch.Tensor, keys: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """int64 (B,): a token a row, by number ``positions[b]`` of stream ``keys[b]``; the best of ``logits`` where the
        row is greedy."""
        draws = torch.from_numpy(uniforms(keys, positions)).to(probs.device)
        # The search may end past a row that is not finite. Any valid token will do: its log-prob is not finite either.
        tokens = invert_cumulative(probs, draws).clamp_(0, probs.shape[1] - 1)
        return tokens if self.greedy is None else torch.where(self.greedy, logits.argmax(-1), tokens)


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
    Raises ValueError: no JSON schema, or one that needs too much time or memory.
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
