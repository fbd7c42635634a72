"""The tables of translation rules on their page: ``python docs/site/translation.py`` writes docs/translation.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from roll.translation.engine import DIALECTS
from roll.translation.rules import Dialect, Rule, Section

FIRST, LAST = "<!-- tables: made from roll/config/words/*.table -->", "<!-- end of tables -->"
"""Lines of the page between which the tables stand."""


def page(text: str) -> str:
    """The page with new tables between its two marks."""
    before, _, rest = text.partition(FIRST)
    return "\n".join([before + FIRST, "", *tables(), LAST]) + rest.partition(LAST)[2]


def tables() -> Iterator[str]:
    """Every dialect; of the two packages of SkyRL one table."""
    older, newer = DIALECTS["skyrl_train"], DIALECTS["skyrl"]
    yield from dialect_lines(DIALECTS["verl"], "verl: ")
    yield from ("## SkyRL", "", "Both packages, unless a row says otherwise.", "")
    for section, other in zip(older.sections, newer.sections, strict=True):
        yield from (f"### SkyRL: {section.title.lower()}", "", *table(section, other), "")
    yield from defaults(older, "Defaults of SkyRL")


def dialect_lines(dialect: Dialect, prefix: str) -> Iterator[str]:
    yield from (f"## {dialect.title}", "")
    for section in dialect.sections:
        yield from (f"### {prefix}{section.title}", "", *table(section), "")
    yield from defaults(dialect, f"Defaults of {dialect.title}")


def table(section: Section, newer: Section | None = None) -> Iterator[str]:
    """The rules of a section; a note of ``newer`` that differs goes with the first."""
    yield from ("| theirs | ours | note |", "|---|---|---|")
    for rule, other in zip(section.rules, (newer or section).rules, strict=True):
        note = rule.note
        if other.note != note:
            note = f"`skyrl_train`: {note}. `skyrl`: {other.note}"
        cells = ("<br>".join(f"`{name}`" for name in rule.spellings), ours_of(rule), note)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def ours_of(rule: Rule) -> str:
    return "<br>".join(f"`{key}`" for key in rule.ours) or "none"


def defaults(dialect: Dialect, title: str) -> Iterator[str]:
    yield from (f"### {title}", "", "Written out in a whole run, where their key is not given.", "")
    yield from ("| theirs | default |", "|---|---|")
    yield from (f"| `{key}` | `{value}` |" for key, value in dialect.defaults.items())
    yield ""


if __name__ == "__main__":
    file = Path(__file__).resolve().parents[1] / "translation.md"
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
