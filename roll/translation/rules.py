"""Rules of translation, the dialects that they make up, and a translation in the making."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import yaml

from roll.config.reading.errors import Problems, closest

OPTIONS = "strategy_args.strategy_config"
ROLES = {"actor": "actor_train", "critic": "critic", "reference": "reference"}
"""Names of roles in facts, and their sections."""

Convert = Callable[[Any], Any]


def as_written(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Rule:
    """Translation of one of their keys."""

    spellings: tuple[str, ...]
    """The key under all its names."""
    ours: tuple[str, ...] = ()
    """The keys that get the value. None: nothing here needs it, and the note says why."""
    note: str = ""
    value: Convert = as_written
    """Their value to ours; raises ValueError with the rule for a value that has no translation."""
    fact: str = ""
    """Name under which the value takes part in the arithmetic of :mod:`roll.translation.assembly`."""
    computed: bool = False
    """The arithmetic sets ``ours``; the value itself goes nowhere else."""
    about: Any = None
    """The value that the note speaks of; None: any."""
    default: str = ""
    """Their default in YAML; empty: it is ours, or takes part in nothing."""

    @property
    def is_switch(self) -> bool:
        """True and false are values, and nothing like them is."""
        return self.takes(True) and self.takes(False) and not self.takes(1.5) and not self.takes("auto")

    def takes(self, value: Any) -> bool:
        """Return true for a value that has a translation."""
        try:
            self.value(value)
        except (ValueError, TypeError):
            return False
        return True

    def note_for(self, value: Any) -> str:
        return self.note if self.about is None or value == self.about else ""


@dataclass(frozen=True)
class Section:
    """Rules of one subject, as the documentation shows them."""

    title: str
    rules: tuple[Rule, ...]


@dataclass
class Draft:
    """Facts and keys found so far."""

    whole: bool
    """A run of its own, whose unwritten keys have their tool's defaults; else changes to a recipe."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers and names that several keys of ours depend on; those of the recipe or the defaults first."""
    written: set[str] = field(default_factory=set)
    """Facts that their keys state (in a whole run: defaults too)."""
    names: dict[str, str] = field(default_factory=dict)
    """For each fact, their key that states it."""
    raw: dict[str, Any] = field(default_factory=dict)
    """For each fact, the value as their key states it."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """For each fact, their tool's default, written or not."""
    given: set[str] = field(default_factory=set)
    """Facts that the text itself states."""
    roles: set[str] = field(default_factory=set)
    """Sections that the run has."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Our dotted keys and their values."""
    reasons: dict[str, set[str]] = field(default_factory=dict)
    """For each fact, the keys that it decided."""
    remarks: dict[str, list[str]] = field(default_factory=dict)
    """For each fact, what else is to say of it."""
    problems: Problems = field(default_factory=Problems)

    def states(self, *names: str) -> bool:
        """Return true when one of the facts is theirs rather than the recipe's."""
        return any(name in self.written for name in names)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these facts that there is; theirs go before the recipe's."""
        known = [name for name in names if self.facts.get(name) is not None]
        return next(
            (self.facts[name] for name in known if name in self.written), self.facts[known[0]] if known else default
        )

    def value_of(self, fact: str) -> Any:
        """Value of a fact: as written, else their default where a whole loss is described, else the recipe's."""
        if fact in self.written:
            return self.facts[fact]
        if (self.whole or self.states("loss")) and fact in self.defaults:
            return self.defaults[fact]
        return self.facts.get(fact, self.defaults.get(fact))

    def first_of(self, *facts: str) -> Any:
        """The first of these facts for which a value holds."""
        return next((value for fact in facts if (value := self.value_of(fact)) is not None), None)

    def put(self, key: str, value: Any, *because: str) -> None:
        """Set one of our keys, unless its role is not part of the run."""
        section = key.partition(".")[0]
        if section in ROLES.values() and section not in self.roles:
            return
        self.keys[key] = value
        for fact in because:
            self.reasons.setdefault(fact, set()).add(key)

    def state(self, fact: str, value: Any) -> None:
        """Set a fact as if a key of theirs said it."""
        self.facts[fact] = value
        self.written.add(fact)

    def remark(self, facts: Iterable[str], text: str) -> None:
        """Say something of those of the facts that are written."""
        for fact in facts:
            if fact in self.written:
                said = self.remarks.setdefault(fact, [])
                if text not in said:
                    said.append(text)

    def without_effect(self, because: str, *facts: str) -> None:
        """Say of those of the facts that the text itself states that nothing comes of them."""
        self.remark([fact for fact in facts if fact in self.given], f"left out: {because}")

    def refuse(self, fact: str, rule: str, example: Any = None) -> None:
        """Note that what states a fact has no translation."""
        self.problems.add(self.names.get(fact, fact), self.raw.get(fact, self.facts.get(fact)), rule, example)

    def sections(self) -> list[tuple[str, str]]:
        """Fact name and section of each role of the run."""
        return [(role, section) for role, section in ROLES.items() if section in self.roles]


@dataclass(frozen=True)
class Dialect:
    """The keys of one project."""

    name: str
    title: str
    sections: tuple[Section, ...]
    model_key: str
    """A configuration that sets this key describes a whole run."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of every run of the project, whatever its keys say."""
    programs: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Patterns of the modules that start their trainer, and the facts that each adds."""

    files: Callable[[Mapping[str, Any], str], Mapping[str, Any]] | None = None
    """The keys of a command above those of the file of settings that it names, in a folder."""
    prepare: Callable[[Draft], None] | None = None
    """Arithmetic that comes before all other: facts of theirs in the terms of the common ones."""
    algorithm: Callable[[Draft], None] | None = None
    """Keys of the algorithm, for a project with a vocabulary of its own."""
    steps: tuple[Callable[[Draft], None], ...] = ()
    """Steps from facts to keys; empty: what an RLVR run has (:mod:`roll.translation.assembly`)."""
    empty_is_false: bool = False
    """Their program takes an empty text for a switch, as false."""
    pipeline: str = "rlvr"
    """Pipeline of a whole run."""

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """Every spelling with its rule."""
        return {spelling: rule for section in self.sections for rule in section.rules for spelling in rule.spellings}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Their documented defaults that differ from ours or take part in the arithmetic; used for whole runs."""
        rules = (rule for section in self.sections for rule in section.rules if rule.default)
        return {rule.spellings[0]: yaml.safe_load(rule.default) for rule in rules}

    def find(self, key: str) -> tuple[Rule, str] | None:
        """The rule for a key, and what stands in the place of its ``*``; the longest that fits."""
        known = self.rules
        if key in known:
            return known[key], ""
        names = key.split(".")
        for count in range(len(names) - 1, 0, -1):
            if rule := known.get(".".join([*names[:count], "*"])):
                return rule, ".".join(names[count:])
        return None

    def nearest(self, key: str) -> str | None:
        """The known key that an unknown one was probably meant to be: the same last name first."""
        known = self.rules
        section, _, last = key.rpartition(".")
        siblings = [name for name in known if name.rpartition(".")[0] == section]
        by_name = closest(last, [name.rpartition(".")[2] for name in siblings]) if siblings else None
        return f"{section}.{by_name}".lstrip(".") if by_name else closest(key, known)
