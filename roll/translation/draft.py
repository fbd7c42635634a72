"""A translation in the making: the facts that their keys state, and our keys as they are found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from roll.config.reading.errors import Problems

ROLES = {"actor": "actor_train", "critic": "critic", "reference": "reference"}
"""Names of roles in facts, and their sections."""


@dataclass
class Draft:
    """What is known so far."""

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
        """True when one of the facts is theirs rather than the recipe's."""
        return any(name in self.written for name in names)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these facts that there is; theirs go before the recipe's."""
        known = [name for name in names if self.facts.get(name) is not None]
        return next(
            (self.facts[name] for name in known if name in self.written), self.facts[known[0]] if known else default
        )

    def value_of(self, fact: str) -> Any:
        """What holds for a fact: as written, else their default where a whole loss is described, else the recipe's."""
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
