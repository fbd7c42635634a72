"""Finding the program in a response: fenced blocks as Markdown has them, and as models write them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

PYTHON = ("python", "python3", "py", "")
_DEEPEST_QUOTATION = 20
_ANY_PYTHON = re.compile(r"py(thon)?[\d.]*")
_LANGUAGE = re.compile(r"[{.\s]*([\w+#.-]*)")
_LIST_ITEM = re.compile(r"[-*+]|\d{1,9}[.)]")
_WORD = r"^[ \t]{0,100}(async def|def|class|import|from|for|while|if|with|try|print|raise|assert|return|@\w)\b"
_ASSIGNMENT = r"^[ \t]{0,100}[\w\[\], .]{1,200}[-+*/]?=[^=]"
_PROGRAM = re.compile(f"{_WORD}|{_ASSIGNMENT}", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fence:
    before: str
    mark: str
    info: str


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    """As written behind the fence, in lower case; '' for none."""
    text: str


def last_code_block(text: str, languages: Sequence[str] = PYTHON) -> str | None:
    """The contents of the last fenced block in one of ``languages``, '' standing for none named.

    A block that names its language is preferred: what follows without one is mostly an output or an example. A block
    that is cut off counts; an empty one does not; without any block of these languages, None.
    """
    found = [block for block in code_blocks(text) if block.text.strip()]
    named = [block for block in found if block.language and is_wanted(block.language, languages)]
    if named:
        return named[-1].text
    plain = [block for block in found if not block.language] if "" in languages else []
    programs = [block for block in plain if _PROGRAM.search(block.text)] if "python" in languages else []
    return (programs or plain)[-1].text if plain else None


def has_code_block(text: str) -> bool:
    return bool(code_blocks(text))


def is_wanted(language: str, languages: Sequence[str]) -> bool:
    return language in languages or ("python" in languages and _ANY_PYTHON.fullmatch(language) is not None)


def code_blocks(text: str) -> list[Block]:
    """All fenced blocks, the last of which may be cut off."""
    blocks: list[Block] = []
    opened: Fence | None = None
    lines: list[str] = []
    # Not splitlines(), which also splits at characters that may stand in a program's texts.
    for line in text.replace("\r\n", "\n").split("\n"):
        if opened is None:
            opened, lines = opening_fence(line), []
            continue
        rest = closing_fence(line, opened.mark)
        if rest is None:
            lines.append(line)
            continue
        blocks.append(finished(opened, [*lines, rest] if rest.strip(" \t>") else lines))
        opened = None
    if opened is not None:
        blocks.append(finished(opened, lines))
    return blocks


def opening_fence(line: str) -> Fence | None:
    """A fence behind nothing but a list's or a quotation's mark, or behind a sentence if it names a language."""
    begin = min((line.find(mark) for mark in ("```", "~~~") if mark in line), default=-1)
    if begin < 0:
        return None
    before, rest = line[:begin], line[begin:]
    info = rest.lstrip(rest[0])
    if "`" in info:
        return None
    marker = before.strip(" \t>")
    if marker and not _LIST_ITEM.fullmatch(marker) and not info.strip().isalnum():
        return None
    return Fence(before, rest[: len(rest) - len(info)], info)


def closing_fence(line: str, fence: str) -> str | None:
    """What stands before the closing fence on its line; None if it does not close the block."""
    stripped = line.rstrip()
    before = stripped.rstrip(fence[0])
    return before if len(stripped) - len(before) >= len(fence) else None


def finished(opened: Fence, lines: list[str]) -> Block:
    quoted = min(opened.before.count(">"), _DEEPEST_QUOTATION)
    if quoted:
        lines = [re.sub(rf"^(?:\s*> ?){{1,{quoted}}}", "", line) for line in lines]
    return Block(language_of(opened.info), textwrap.dedent("\n".join(lines)).strip("\n"))


def language_of(info: str) -> str:
    """Of ``python``, ``Python title="x"``, ``python:main.py``, ``{.python .numberLines}`` or ``main.py``: python."""
    found = _LANGUAGE.match(info.partition(":")[0].strip().lower())
    name = found[1] if found else ""
    return "python" if name.endswith(".py") else name
