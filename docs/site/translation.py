"""The tables of translation rules on their page: ``python docs/site/translation.py`` writes docs/translation.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from roll.translation.engine import DIALECTS
from roll.translation.rules import Section

FIRST, LAST = "<!-- tables: made from roll/config/words/*.table -->", "<!-- end of tables -->"
"""Lines of the page between which the tables stand."""
ROLES = {
    "actor_rollout_ref.actor": "actor_train",
    "actor_rollout_ref.ref": "reference",
    "actor_rollout_ref.rollout": "actor_infer",
    "trainer.policy": "actor_train",
    "trainer.ref": "reference",
    "trainer.critic": "critic",
    "critic": "critic",
}
"""Their sections of roles to ours."""
_THEIRS = re.compile(rf"^({'|'.join(map(re.escape, ROLES))})\.")
_OURS = re.compile(rf"^({'|'.join(ROLES.values())})\.")


def page(text: str) -> str:
    """The page with new tables between its two marks."""
    before, _, rest = text.partition(FIRST)
    return "\n".join([before + FIRST, "", *tables(), LAST]) + rest.partition(LAST)[2]


def tables() -> Iterator[str]:
    """Every dialect; of the two packages of SkyRL one table."""
    older, newer = DIALECTS["skyrl_train"], DIALECTS["skyrl"]
    verl = DIALECTS["verl"]
    yield from (f"## {verl.title}", "")
    for section in verl.sections:
        yield from (f"### {verl.title}: {section.title}", "", *rules_of(section), "")
    yield from ("## SkyRL", "", "Both packages, unless a row says otherwise.", "")
    for section, other in zip(older.sections, newer.sections, strict=True):
        yield from (f"### SkyRL: {section.title.lower()}", "", *rules_of(section, other), "")


def rules_of(section: Section, newer: Section | None = None) -> Iterator[str]:
    """The rules of a section: a table of those with a key of ours, and a list of the others, by their notes.

    Keys of several roles are one, with ``<role>`` in its place; a note of ``newer`` that differs goes with the first.
    """
    rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
    single: dict[tuple[str, tuple[str, ...], str], list[tuple[str, tuple[str, ...]]]] = {}
    for rule, other in zip(section.rules, (newer or section).rules, strict=True):
        note = rule.note
        if other.note != note:
            note = f"`skyrl_train`: {note}. `skyrl`: {other.note}" if note else f"in `skyrl` {other.note}"
        for name in rule.spellings:
            is_of_role = _THEIRS.match(name) is not None
            ours = tuple(_OURS.sub("<role>.", key) if is_of_role else key for key in rule.ours)
            general = (_THEIRS.sub("<role>.", name), tuple(dict.fromkeys(ours)), note)
            single.setdefault(general, []).append((name, rule.ours))
    for (general, ours, note), found in single.items():
        name, own = (general, ours) if len(found) > 1 else found[0]
        rows.setdefault((own, note), []).append(name)
    if any(ours for ours, _ in rows):
        yield from ("| theirs | ours | note |", "|---|---|---|")
        for (ours, note), names in rows.items():
            if ours:
                yield "| " + " | ".join(one.replace("|", "\\|") for one in (cell(names), cell(ours), note)) + " |"
        yield ""
    for (ours, note), names in rows.items():
        if not ours:
            yield f"- {cell(names, ', ')}: {note}"


def cell(names: Iterable[str], between: str = "<br>") -> str:
    return between.join(f"`{name}`" for name in names)


if __name__ == "__main__":
    file = Path(__file__).resolve().parents[1] / "translation.md"
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
