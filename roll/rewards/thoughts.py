"""The reader of responses: what is thought, and what is said, in the marks that model families write.

Rewards, votes, judges and agents all read with :func:`split_thought`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from roll.agents.call_formats import call_spans, harmony_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
)
"""Begin and end of a thought: Qwen and DeepSeek, Magistral, Seed-OSS, Kimi-VL."""
_ENDS = dict(_PAIRS)
_MARK = re.compile("|".join(re.escape(mark) for pair in _PAIRS for mark in pair))
_QUOTES = frozenset("\"'`")
_ANALYSIS = "<|channel|>analysis<|message|>"
_RENDERED = re.compile(
    "|".join(rf"{re.escape(begin)}.*?(?:{re.escape(end)}\s*|$)" for begin, end in _PAIRS)
    + rf"|{re.escape(_ANALYSIS)}.*?<\|end\|>(?:<\|start\|>assistant)?",
    re.DOTALL,
)
_KEPT = frozenset(
    [mark for pair in _PAIRS for mark in pair]
    + [f"<|{name}|>" for name in ("channel", "message", "start", "end", "call", "return", "constrain")]
)


def opened_thought(prompt: str) -> str:
    """The mark with which the end of a prompt opens a thought; empty: it opens none."""
    return next((mark for mark in (*_ENDS, _ANALYSIS) if prompt.rstrip().endswith(mark)), "")


def with_channel(response: str, opened: str) -> str:
    """A response of gpt-oss from the beginning of its first message, which the prompt may have opened."""
    return opened + response if opened == _ANALYSIS else response


def split_thought(response: str, opened: str = "") -> tuple[str | None, str | None]:
    """The thought of a response, None where it has none, and the answer, None where the thought never ended.

    A thought ends at the *first* end mark: so do all reasoning parsers of vLLM (0.32), and what is scored here is
    thereby what a client of a server gets as ``content``. Up to the last one, an answer that mentions the mark would
    vanish, with its calls. What comes before the first end mark is thought wherever it began, since templates
    open thoughts in the prompt. A later begin mark begins another thought, as for vLLM's parsers of GLM and Mistral;
    those of Qwen and DeepSeek take it for text, and a box or a call that is only thought would count. A response that
    ends within a thought, since the length cut it, has no answer and no calls. Marks in arguments of calls are text,
    and so are those in quotes.

    The messages of gpt-oss are thought in the channel ``analysis``, and said in the others unless they are calls.

    Args:
        response: with the marks of thoughts, special tokens or not. Calls stay in the answer (not those of gpt-oss).
        opened: the mark with which the prompt opened the thought (:func:`opened_thought`).
    """
    messages = list(harmony_messages(with_channel(response, opened)))
    if messages:
        own = [one for one in messages if one.recipient is None]
        thoughts = [one.body for one in own if one.channel == "analysis"]
        said = [one.body for one in own if one.channel != "analysis"]
    else:
        thoughts, said = _pieces(response, _ENDS.get(opened, ""))
    bare = []
    for thought in map(str.strip, thoughts):
        begun = _MARK.match(thought)
        bare.append(thought[begun.end() :].lstrip() if begun and begun.group() in _ENDS else thought)
    return "\n".join(bare) if bare else None, "".join(said) if said else None


def said_by(response: str, opened: str = "") -> str:
    """A response without its thoughts: the answer, and all calls."""
    text = with_channel(response, opened)
    messages = list(harmony_messages(text))
    if messages:
        return "".join(text[one.begin : one.end] for one in messages if one.recipient or one.channel != "analysis")
    return split_thought(response, opened)[1] or ""


def _pieces(response: str, wanted: str) -> tuple[list[str], list[str]]:
    """Pieces that are thought, and those that are said; ``wanted``: the end of a thought that is open at first."""
    thoughts: list[str] = []
    said: list[str] = []
    begin = answer = 0

    @cache
    def calls(start: int) -> list[tuple[int, int]]:
        return [(start + first, start + end) for first, end in call_spans(response[start:])]

    for match in _MARK.finditer(response):
        mark, at = match.group(), match.start()
        before, after = response[max(0, at - 1) : at], response[match.end() : match.end() + 1]
        # A thought may end with a quotation: only between two quotes is its end mark a mention.
        is_quoted = before in _QUOTES and (mark in _ENDS or after in _QUOTES)
        if wanted:
            if mark == wanted:
                thoughts.append(response[begin:at])
                begin, wanted = match.end(), ""
                answer = answer or begin
        elif is_quoted or (thoughts and mark not in _ENDS) or any(a < at < b for a, b in calls(answer)):
            continue
        elif mark in _ENDS:
            wanted = _ENDS[mark]
            if thoughts:
                said.append(response[begin:at])
                begin = match.end()
        else:
            thoughts.append(response[:at])
            begin = answer = match.end()
    return ([*thoughts, response[begin:]], []) if wanted else (thoughts, [*said, response[begin:]])


def without_thoughts(text: str) -> str:
    """A rendered conversation without the thoughts in it."""
    return _RENDERED.sub("", text)


def response_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[list[int]]], list[str]]:
    """The function that decodes responses: without special tokens, but for those that mark what is thought and what is
    said."""
    # Marks are often special by the flag of their token alone, without a name among the tokenizer's.
    flagged = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    specials: list[Any] = [*tokenizer.all_special_tokens, *flagged]
    if not _KEPT & set(map(str, specials)) & {"<|channel|>", *_ENDS, *_ENDS.values()}:
        return partial(tokenizer.batch_decode, skip_special_tokens=True)
    ids: Any = tokenizer.convert_tokens_to_ids([one for one in map(str, specials) if one not in _KEPT])
    dropped = set(ids)

    def decode(rows: list[list[int]]) -> list[str]:
        kept = [[token for token in row if token not in dropped] for row in rows]
        return tokenizer.batch_decode(kept, skip_special_tokens=False)

    return decode
