"""Finding the answer in a response: after the thought, in a box, behind ``####``, or the last number."""

from __future__ import annotations

import re

from roll.rewards.numerals import NUMERAL

THOUGHT_START, THOUGHT_END = "<think>", "</think>"
_MARKED = re.compile(r"####[ \t]*([^\n]+)")
_LAST_NUMBER = re.compile(rf"(?<![0-9A-Za-z_.,])({NUMERAL})(?![0-9]|[.,][0-9]|[eE][-+]?[0-9])")
MAX_BOXES = 16
"""Boxes tried from the end: a text of unclosed boxes, as degenerate models write, must not take quadratic time."""


def after_thought(response: str, prompt: str = "") -> str | None:
    """The part of a response that is meant for the reader, or None if the thought never ended.

    A thought is opened in the response, or by the end of the prompt (templates that write ``<think>`` themselves).
    """
    _, closed, answer = response.rpartition(THOUGHT_END)
    if closed:
        return None if THOUGHT_START in answer else answer
    opened = THOUGHT_START in response or prompt.rstrip().endswith(THOUGHT_START)
    return None if opened else response


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete ``\boxed{...}`` or ``\fbox{...}``, braces balanced; also ``\boxed 5``."""
    position = len(text)
    for _ in range(MAX_BOXES):
        position = max(text.rfind("\\boxed", 0, position), text.rfind("\\fbox", 0, position))
        if position < 0:
            return None
        content = _box_at(text, text.index("box", position) + (5 if text[position + 1] == "b" else 3))
        if content is not None:
            return content
    return None


def _box_at(text: str, start: int) -> str | None:
    """The braced group (or the bare word) that begins at ``start``."""
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text) or text[start] != "{":
        word = re.match(r"[^\s$.,]+", text[start:])
        return word.group() if word else None
    depth = 0
    for position in range(start, len(text)):
        character = text[position]
        if character in "{}" and text[position - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start + 1 : position].strip()
    return None


def last_marked(text: str) -> str | None:
    """What stands behind the last ``####`` on its line."""
    found = _MARKED.findall(text)
    return found[-1].strip() if found else None


def tagged_answer(text: str) -> str | None:
    """The contents of the last ``<answer>...</answer>``."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else None


def last_number(text: str) -> str | None:
    found = _LAST_NUMBER.findall(text)
    return found[-1].strip() if found else None
