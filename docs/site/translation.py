"""The tables of translation rules on their page: ``python docs/site/translation.py`` writes docs/translation.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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
ALIKE = {
    "critic.model.fsdp_config": "critic.fsdp_config",
    "critic.fsdp": "critic.fsdp_config",
    **{f"{role}.mindspeed": f"{role}.megatron" for role in ROLES},
}
"""Their sections with the keys of another one, which the page names once."""
_ALIKE = re.compile(rf"^({'|'.join(map(re.escape, ALIKE))})\.")
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
    """The rules of a section that have a key of ours, a line each.

    Keys of several roles are one, with ``<role>`` in its place, and so are keys of one section that keep their names in
    one of ours; a note of ``newer`` that differs goes with the first.
    """
    rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
    single: dict[tuple[str, tuple[str, ...], str], list[tuple[str, tuple[str, ...]]]] = {}
    for rule, other in zip(section.rules, (newer or section).rules, strict=True):
        note = rule.note
        if other.note != note:
            note = f"`skyrl_train`: {note}. `skyrl`: {other.note}" if note else f"in `skyrl` {other.note}"
        for name in dict.fromkeys(_ALIKE.sub(lambda found: ALIKE[found[1]] + ".", name) for name in rule.spellings):
            is_of_role = _THEIRS.match(name) is not None
            ours = tuple(_OURS.sub("<role>.", key) if is_of_role else key for key in rule.ours)
            general = (_THEIRS.sub("<role>.", name), tuple(dict.fromkeys(ours)), note)
            single.setdefault(general, []).append((name, rule.ours))
    for (general, ours, note), found in single.items():
        name, own = (general, ours) if len(found) > 1 else found[0]
        rows.setdefault((own, note), []).append(name)
    for names, ours, note in together((names, ours, note) for (ours, note), names in rows.items() if ours):
        yield f"- {listed(names)} → {listed(ours)}{f' ({note})' if note else ''}"


Names = Sequence[str]


def together(rows: Iterable[tuple[Names, Names, str]]) -> Iterator[tuple[Names, Names, str]]:
    """The rows, with those of keys that go from one section to one other under their own names as one."""
    found: dict[object, tuple[list[str], Names, Names, str]] = {}
    for names, ours, note in rows:
        (theirs, _, key), (section, _, own) = names[0].rpartition("."), ours[0].rpartition(".")
        keeps_name = len(names) == len(ours) == 1 and key == own
        place = (theirs, section, note) if keeps_name else (names[0],)
        found.setdefault(place, ([], names, ours, note))[0].append(key)
    for keys, names, ours, note in found.values():
        if len(keys) > 1:
            inside = f"{{{','.join(keys)}}}"
            yield [_section(names[0]) + inside], [_section(ours[0]) + inside], note
        else:
            yield names, ours, note


def _section(name: str) -> str:
    return "".join(name.rpartition(".")[:2])


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    file = Path(__file__).resolve().parents[1] / "translation.md"
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
