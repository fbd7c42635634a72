"""The reader of responses: what is thought, and what is said, in the marks that model families write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

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
THOUGHT_BEGIN = re.compile("|".join(re.escape(begin) for begin, _ in _PAIRS))
"""The mark that begins a thought."""
_END = re.compile("|".join(re.escape(end) for _, end in _PAIRS))
HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<to>[^<]*)<\|channel\|>(?P<channel>\w+)(?P<rest>[^<]*)(?:<\|constrain\|>\w+)?"
    r"<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|$)",
    re.DOTALL,
)
"""A message of gpt-oss: its channel, recipient and text."""
_KEPT = frozenset(
    [mark for pair in _PAIRS for mark in pair]
    + [f"<|{name}|>" for name in ("channel", "message", "start", "end", "call", "return", "constrain")]
)


def opened_thought(prompt: str) -> str:
    """The mark with which the end of a prompt opens a thought; empty: it opens none."""
    return next((begin for begin, _ in _PAIRS if prompt.rstrip().endswith(begin)), "")


def split_thought(response: str, opened: str = "", at_last: bool = False) -> tuple[str, str | None]:
    """The thought of a response and the answer after it, which is None where the thought never ended.

    Args:
        response: with the marks of thoughts, special tokens or not.
        opened: the mark with which the prompt opened the thought (:func:`opened_thought`).
        at_last: the answer begins after the last end mark, not the first: a response that thinks several times.
    """
    if "<|channel|>" in response:
        messages = list(HARMONY.finditer(response))
        said = [match["body"] for match in messages if match["channel"] == "final"]
        thoughts = [match["body"] for match in messages if match["channel"] == "analysis"]
        return "\n".join(thoughts).strip(), "".join(said) if said else None
    begun = THOUGHT_BEGIN.match(response.lstrip())
    mark = opened or (begun.group() if begun else "")
    ends = list((re.compile(re.escape(_ENDS[mark])) if mark else _END).finditer(response))
    if not ends:
        unended = bool(mark) or (at_last and THOUGHT_BEGIN.search(response) is not None)
        return (_thought(response), None) if unended else ("", response)
    end = ends[-1 if at_last else 0]
    answer = response[end.end() :]
    reopened = at_last and THOUGHT_BEGIN.search(answer) is not None
    return _thought(response[: end.start()]), None if reopened else answer


def _thought(text: str) -> str:
    begun = THOUGHT_BEGIN.match(text.lstrip())
    return (text.lstrip()[begun.end() :] if begun else text).strip()


def decode_responses(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[Sequence[int]]) -> list[str]:
    """Texts without special tokens, but for those that mark what is thought and what is said."""
    # Marks are often special by the flag of their token alone, without a name among the tokenizer's.
    flagged = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    specials: list[Any] = [*tokenizer.all_special_tokens, *flagged]
    rows = [list(row) for row in token_ids]
    if not _KEPT & set(map(str, specials)) & {"<|channel|>", *_ENDS, *_ENDS.values()}:
        return list(tokenizer.batch_decode(rows, skip_special_tokens=True))
    ids: Any = tokenizer.convert_tokens_to_ids([one for one in map(str, specials) if one not in _KEPT])
    dropped = set(ids)
    kept = [[token for token in row if token not in dropped] for row in rows]
    return list(tokenizer.batch_decode(kept, skip_special_tokens=False))
