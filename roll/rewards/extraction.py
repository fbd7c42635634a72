"""Finding the answer in a response: after the thought, in a box, behind ``####``, or in tags."""

from __future__ import annotations

import re

from roll.datasets.converters.math import last_boxed

__all__ = [
    "THOUGHT_END",
    "THOUGHT_START",
    "after_thought",
    "last_boxed",
    "last_marked",
    "tagged_answer",
]

THOUGHT_START, THOUGHT_END = "<think>", "</think>"
_MARKED = re.compile(r"####[ \t]*([^\n]+)")


def after_thought(response: str, prompt: str = "") -> str | None:
    """The part of a response that is meant for the reader, or None if the thought never ended.

    A thought is opened in the response, or by the end of the prompt (templates that write ``<think>`` themselves).
    """
    _, closed, answer = response.rpartition(THOUGHT_END)
    if closed:
        return None if THOUGHT_START in answer else answer
    opened = THOUGHT_START in response or prompt.rstrip().endswith(THOUGHT_START)
    return None if opened else response


def last_marked(text: str) -> str | None:
    """What stands behind the last ``####`` on its line."""
    found = _MARKED.findall(text)
    return found[-1].strip() if found else None


def tagged_answer(text: str) -> str | None:
    """The contents of the last ``<answer>...</answer>``."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else None
