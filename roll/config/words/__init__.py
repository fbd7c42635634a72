"""Words of other projects, and the keys of ours that have the same effect: rows of their tables, and the meanings of a
word, which is a key with its sections, or its last name.

A line of a ``.table`` file is a row::

    their keys | our keys | conversion > fact | their default | note

- Several keys in a cell are separated by spaces; ``a.{b,c}`` is ``a.b a.c``. ``*`` at the end of one of their keys is
  any key below it, and in ours the rest of that key. ``none: note`` instead of our keys: nothing here needs it.
- Conversion, fact and default are for :mod:`roll.translation.rules`.
- ``# title`` begins a section, ``$NAME = text`` defines a text, ``@NAME = theirs ours role; ...`` roles: a row with
  ``@NAME`` is one for each of them, whose third part completes the fact. An indented line continues the one before it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OPTIONS = "strategy_args.strategy_config"
# `$NAME` in every table: the ends of many of our keys.
TEXTS = {"STRATEGY": "strategy_args.strategy_name", "OPTIONS": OPTIONS}
TABLES = Path(__file__).parent
DEFINED = re.compile(r"\$([A-Z_]+)")


@dataclass(frozen=True)
class Row:
    """A row for one role."""

    title: str  # of its section
    theirs: tuple[str, ...]  # the key under all its names
    ours: tuple[str, ...]  # the keys that get its value; empty: nothing here needs it
    how: str  # the cell of conversion and fact
    default: str  # theirs, in YAML
    note: str


def read_rows(name: str, texts: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The rows of the file ``name.table``. ``texts``: for ``$NAME``, besides :data:`TEXTS` and those that the table
    defines; None: names that are left are empty. Raises ``KeyError``: a ``$NAME`` or an ``@NAME`` that nothing defines.
    """
    written = (defaultdict(str) if texts is None else dict(texts)) | TEXTS
    roles: dict[str, list[list[str]]] = {}
    title = ""
    for line in re.sub(r"\n[ \t]+", " ", (TABLES / f"{name}.table").read_text(encoding="utf-8")).splitlines():
        definition = re.match(r"([$@])([A-Z_]+) = ", line)
        text = DEFINED.sub(lambda found: written[found[1]], line[definition.end() :] if definition else line)
        if definition and definition[1] == "$":
            written[definition[2]] = text
        elif definition:
            roles[definition[2]] = [role.split() for role in text.split(";")]
        elif text.startswith("# "):
            title = text[2:]
        elif text:
            group = re.search(r"@([A-Z]+)", text)
            for parts in roles[group[1]] if group else [[]]:
                yield _row(title, text, group[0] if group else "", parts)


def _row(title: str, text: str, mark: str, parts: Sequence[str]) -> Row:
    """The row for one role where ``mark`` stands for it: its prefix there, here, and in facts."""
    cells = [cell.strip() for cell in re.split(r"(?:^|\s)\|(?=\s|$)", text)]
    cells += [""] * (5 - len(cells))
    if mark:
        cells[:3] = [cell.replace(mark, part) for cell, part in zip(cells[:3], parts, strict=True)]
    theirs, ours, how, default, note = cells
    if ours.startswith("none: "):
        ours, note = "", ours.removeprefix("none: ")
    return Row(title, tuple(expanded(theirs)), tuple(expanded(ours)), how, default, note)


def expanded(cell: str) -> Iterator[str]:
    """The keys of a cell: ``a.{b,c}`` is ``a.b`` and ``a.c``."""
    for word in cell.split():
        head, brace, rest = word.partition("{")
        names, _, tail = rest.partition("}")
        ends = tuple(expanded(tail)) or ("",)
        yield from (f"{head}{name}{end}" for name in names.split(",") for end in ends) if brace else (word,)


# The tables and whose keys they hold. What the first says of a word, the others do not.
PROJECTS = {
    "words": "",
    "verl": "verl",
    "skyrl": "SkyRL",
    "verl_sft": "verl",
    "verl_fsdp_sft": "verl",
    "skyrl_sft": "SkyRL",
}


@dataclass(frozen=True)
class Meaning:
    """Meaning of a word here."""

    theirs: str  # the word in full
    project: str  # whose; empty: of several
    ours: tuple[str, ...]  # the keys with that effect, the first before all; empty: none, and the note says why
    note: str  # of all values


@cache
def vocabulary() -> dict[str, tuple[Meaning, ...]]:
    """Every word in small letters, with and without its sections, and its meanings."""
    found: dict[str, dict[Meaning, None]] = {}
    settled: set[str] = set()
    for table, project in PROJECTS.items():
        # A row "only ..." without a key of ours is a value that has no translation, not a key that needs none.
        rows = [row for row in read_rows(table) if row.ours or not row.how.startswith("only ")]
        plain = [(row, theirs) for row in rows for theirs in row.theirs if re.fullmatch(r"[\w.]+", theirs)]
        for row, theirs in plain:
            meaning = Meaning(theirs, project, row.ours, "" if row.note.startswith("[") else row.note)
            for word in dict.fromkeys((theirs.lower(), theirs.lower().rpartition(".")[2])):
                if word not in settled:
                    found.setdefault(word, {})[meaning] = None
        settled = settled or set(found)
    return {word: tuple(meanings) for word, meanings in found.items()}


def meanings_of(word: str) -> tuple[Meaning, ...]:
    """The meanings of a word, those with a key of ours first; none for a word that no table has."""
    return tuple(sorted(vocabulary().get(word.lower(), ()), key=lambda meaning: not meaning.ours))


@cache
def sections() -> dict[str, str]:
    """Sections at the top of other projects' files, each with the projects that have it."""
    found: dict[str, dict[str, None]] = {}
    for meanings in vocabulary().values():
        for meaning in meanings:
            section, dot, _ = meaning.theirs.partition(".")
            if dot:
                found.setdefault(section, {})[meaning.project] = None
    return {section: " and ".join(projects) for section, projects in found.items()}
