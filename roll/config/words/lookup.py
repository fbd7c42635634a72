"""Looks a word of another project up: a key with its sections, or its last name alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from roll.config.words.rows import read_rows

PROJECTS = {
    "words": "",
    "verl": "verl",
    "skyrl": "SkyRL",
    "verl_sft": "verl",
    "verl_fsdp_sft": "verl",
    "skyrl_sft": "SkyRL",
}
"""The tables and whose keys they hold. What the first says of a word, the others do not."""


@dataclass(frozen=True)
class Meaning:
    """Meaning of a word here.

    Attributes:
        theirs: the word in full.
        project: whose; empty: of several.
        ours: the keys with that effect, the first before all; empty: none, and the note says why.
        note: of all values.
    """

    theirs: str
    project: str
    ours: tuple[str, ...]
    note: str


@cache
def vocabulary() -> dict[str, tuple[Meaning, ...]]:
    """Every word in small letters, with and without its sections, and its meanings."""
    found: dict[str, dict[Meaning, None]] = {}
    settled: set[str] = set()
    for table, project in PROJECTS.items():
        for meaning in _meanings(table, project):
            theirs = meaning.theirs.lower()
            for word in dict.fromkeys((theirs, theirs.rpartition(".")[2])):
                if word not in settled:
                    found.setdefault(word, {})[meaning] = None
        settled = settled or set(found)
    return {word: tuple(meanings) for word, meanings in found.items()}


def _meanings(table: str, project: str) -> Iterator[Meaning]:
    for row in read_rows(table):
        if not row.ours and row.how.startswith("only "):
            continue  # a value that has no translation, not a key that needs none
        for theirs in row.theirs:
            if re.fullmatch(r"[\w.]+", theirs):
                yield Meaning(theirs, project, row.ours, "" if row.note.startswith("[") else row.note)


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
