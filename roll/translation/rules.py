"""Rules of translation and the tables that hold them, the dialects that they make up, and a translation in progress.

The tables and the form of their rows are :mod:`roll.config.words`'. In the cell of the conversion:

- A conversion is a name (``whole``), a list of names that stay (``[cpu, nvme]``), a mapping of names
  (``{bfloat16: bf16}``), several in turn (``truth {true: fa2}``), or ``only [1, null]: reason``, which refuses every
  other value. ``whole?`` leaves null as it is, ``whole?0`` takes it for 0.
- ``= fact`` names the value for the arithmetic of :mod:`roll.translation.assembly`; with ``> fact`` that arithmetic
  alone sets our keys.

A default is written out where a whole run does not give the key. A note that begins with ``[fsdp]`` speaks of that
value only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import yaml

from roll.config.reading.errors import Problems, closest
from roll.config.reading.legacy_keys import FLAT_NAMES
from roll.config.reading.schema import Mismatch, convert
from roll.config.strategies.deepspeed import numbers
from roll.config.words import Row, read_rows
from roll.translation.reading import Source

Convert = Callable[[Any], Any]
FACT = re.compile(r"(.*?)(?:(?:^| )([>=]) (\S+))?")


def as_written(value: object) -> Any:
    return value


@dataclass(frozen=True)
class Rule:
    """Translation of one of their keys."""

    spellings: tuple[str, ...]  # the key under all its names
    ours: tuple[str, ...] = ()  # the keys that get the value. None: nothing here needs it, and the note says why.
    note: str = ""
    # Their value to ours; raises ValueError with the rule for a value that has no translation.
    value: Convert = as_written
    fact: str = ""  # name under which the value takes part in the arithmetic of `roll.translation.assembly`
    computed: bool = False  # the arithmetic sets `ours`; the value itself goes nowhere else
    about: Any = None  # the value that the note speaks of; None: any
    default: str = ""  # their default in YAML; empty: it is ours, or takes part in nothing

    @property
    def is_switch(self) -> bool:
        """True and false are values, and nothing like them is."""
        return self.takes(True) and self.takes(False) and not self.takes(1.5) and not self.takes("auto")

    def takes(self, value: object) -> bool:
        """Return true for a value that has a translation."""
        try:
            self.value(value)
        except (ValueError, TypeError):
            return False
        return True

    def note_for(self, value: object) -> str:
        return self.note if self.about is None or value == self.about else ""


@dataclass(frozen=True)
class Section:
    """Rules of one subject, as the documentation shows them."""

    title: str
    rules: tuple[Rule, ...]


def read_table(
    name: str, conversions: Mapping[str, Convert], texts: Mapping[str, str] | None = None
) -> tuple[Section, ...]:
    """Sections of the file ``name.table``.

    Args:
        conversions: of this table alone, by name; those of :data:`CONVERSIONS` are known everywhere.
        texts: for ``$NAME``, besides those that every table knows and those that the table defines.
    """
    known = {**CONVERSIONS, **conversions}
    rows = groupby(read_rows(name, texts or {}), key=lambda row: row.title)
    return tuple(Section(title, tuple(_rule(row, known) for row in group)) for title, group in rows)


def _rule(row: Row, conversions: Mapping[str, Convert]) -> Rule:
    conversion, sign, fact = FACT.fullmatch(row.how).groups(default="")  # type: ignore[union-attr]
    about = re.match(r"\[(\w+)\] ", row.note)
    return Rule(
        row.theirs,
        row.ours,
        row.note[about.end() :] if about else row.note,
        conversion_of(conversion, conversions),
        fact,
        sign == ">",
        about[1] if about else None,
        row.default,
    )


def conversion_of(cell: str, known: Mapping[str, Convert]) -> Convert:
    """The conversion that a cell names."""
    if cell.startswith("only "):
        values, _, reason = cell.removeprefix("only ").partition("]: ")
        return refused(reason, *yaml.safe_load(f"{values}]"))
    if cell.startswith("["):
        return one_of({name: name for name in yaml.safe_load(cell)})
    if cell.startswith("{"):
        return one_of(yaml.safe_load(cell))
    name, _, then = cell.partition(" ")
    name, question, null = name.partition("?")
    first = known[name] if name else as_written
    following = conversion_of(then, known) if then else as_written
    of_null = yaml.safe_load(null) if null else None
    return lambda value: following(of_null if question and value is None else first(value))


def whole(value: object) -> int:
    return int(_converted(value, int))


def count(value: object) -> int:
    """A number of things of which there is one at least."""
    found = whole(value)
    if found < 1:
        raise ValueError("must be 1 at least")
    return found


def number(value: object) -> float | int:
    return float(_converted(value, float))


def pair(value: object) -> list[float | int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("must be two numbers")
    return [number(entry) for entry in value]


def truth(value: object) -> bool:
    return bool(_converted(value, bool))


def switched(value: object) -> bool:
    """The 0 or 1 of an environment variable."""
    if str(value).strip().lower() not in ("0", "1", "true", "false"):
        raise ValueError("must be 0 or 1")
    return str(value).strip().lower() in ("1", "true")


def _converted(value: object, hint: object) -> Any:
    try:
        return convert(value, hint)
    except Mismatch as error:
        raise ValueError(error.rule) from None


def listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# Megatron's names of layers, and those of Hugging Face's models.
LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def hugging_face_layers(value: object) -> object:
    return [name for layer in value for name in LAYERS.get(str(layer), (layer,))] if isinstance(value, list) else value


def one_of(names: Mapping[Any, Any], refusals: Mapping[Any, str] | None = None) -> Convert:
    """A conversion by a table of their names; those in ``refusals`` say why they have no translation."""

    def look_up(value: object) -> Any:
        name = value if isinstance(value, Hashable) else str(value)
        if name in names:
            return names[name]
        if refusals and name in refusals:
            raise ValueError(f"has no translation: {refusals[name]}")
        known = [str(name) for name in names]
        nearest = closest(str(value), known)
        hint = f"; the nearest is {nearest}" if nearest else ""
        raise ValueError(f"has no translation; known: {', '.join(known)}{hint}")

    return look_up


def refused(reason: str, *neutral: object) -> Convert:
    """A conversion that takes ``neutral`` values only."""

    def check(value: object) -> Any:
        if value not in neutral:
            raise ValueError(reason)
        return value

    return check


# Our trackers by their names. Trackers without a client here write to a file.
LOGGERS = {
    "console": "stdout",
    "stdout": "stdout",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "trackio": "trackio",
    "file": "jsonl",
    "mlflow": "mlflow",
    "clearml": "jsonl",
    "vemlp_wandb": "wandb",
}


# Conversions that every table knows.
CONVERSIONS: dict[str, Convert] = {
    **{f.__name__: f for f in (whole, count, number, pair, truth, switched, listed, numbers, hugging_face_layers)},
    "text": str,
    "yes": lambda value: True,
    "flipped": lambda value: not truth(value),
    # An interval in which 0 and -1 both mean never.
    "never_below_zero": lambda value: 0 if value is False else max(0, whole(value)),
    "weights": lambda value: [number(entry) for entry in listed(value)],
    "loggers": lambda value: list(dict.fromkeys(one_of(LOGGERS)(name) for name in listed(value))),
}


# Names of roles in facts, and their sections.
ROLES = {"actor": "actor_train", "critic": "critic", "reference": "reference"}

# Flat names of options, each with its place in the section of the loss or the estimator.
NESTED = {"loss": "loss.name", "estimator": "estimator.name", "adv_estimator_args": "estimator"} | {
    name: f"{choice}.{place.option}"
    for choice, names in FLAT_NAMES.items()
    for name, place in names.items()
    if place.of is not object
}
SWITCHES = {name for names in FLAT_NAMES.values() for name, place in names.items() if place.switch == name}


@dataclass
class Draft:
    """A translation in progress: facts and keys found so far."""

    whole: bool  # a complete run, whose unwritten keys have their tool's defaults; else changes to a recipe
    # Numbers and names that several keys of ours depend on; those of the recipe or the defaults first.
    facts: dict[str, Any] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # facts that their keys state (in a whole run: defaults too)
    names: dict[str, str] = field(default_factory=dict)  # for each fact, their key that states it
    raw: dict[str, Any] = field(default_factory=dict)  # for each fact, the value as their key states it
    defaults: dict[str, Any] = field(default_factory=dict)  # for each fact, their tool's default, written or not
    explicit: set[str] = field(default_factory=set)  # facts that the text itself states, defaults apart
    roles: set[str] = field(default_factory=set)  # sections that the run has
    keys: dict[str, Any] = field(default_factory=dict)  # our dotted keys and their values
    reasons: dict[str, set[str]] = field(default_factory=dict)  # for each fact, the keys that it decided
    remarks: dict[str, list[str]] = field(default_factory=dict)  # for each fact, further remarks for its note
    problems: Problems = field(default_factory=Problems)

    def states(self, *names: str) -> bool:
        """Return true when one of the facts is theirs rather than the recipe's."""
        return any(name in self.written for name in names)

    def get(self, *names: str, default: object = None) -> Any:
        """The first of these facts that has a value; theirs go before the recipe's."""
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

    def put(self, key: str, value: object, *because: str) -> None:
        """Set one of our keys, unless its role is not part of the run."""
        section, dot, rest = key.partition(".")
        if section in NESTED and self.whole:  # changes to a recipe go beside whatever form it has
            key = f"{NESTED[section]}{dot}{rest}"
        if section in SWITCHES and self.whole:
            return
        if section in ROLES.values() and section not in self.roles:
            return
        self.keys[key] = value
        for fact in because:
            self.reasons.setdefault(fact, set()).add(key)

    def state(self, fact: str, value: object) -> None:
        """Set a fact as if one of their keys stated it."""
        self.facts[fact] = value
        self.written.add(fact)

    def remark(self, facts: Iterable[str], text: str) -> None:
        """Add ``text`` to the notes of those facts that are written."""
        for fact in facts:
            if fact in self.written and text not in (texts := self.remarks.setdefault(fact, [])):
                texts.append(text)

    def refuse(self, fact: str, rule: str, example: object = None) -> None:
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
    model_key: str  # a configuration that sets this key describes a whole run
    facts: Mapping[str, Any] = field(default_factory=dict)  # facts of every run of the project, whatever its keys say
    # Patterns of the modules that start their trainer, and the facts that each adds.
    programs: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    # The keys of a source with those of the settings file that it names, or that its program reads by itself; a
    # command's win.
    files: Callable[[Source], Mapping[str, Any]] | None = None
    # The first step: states the project's facts under the names that the common arithmetic reads.
    prepare: Callable[[Draft], None] | None = None
    # Steps from facts to keys; empty: what an RLVR run has (`roll.translation.assembly`).
    steps: tuple[Callable[[Draft], None], ...] = ()
    empty_is_false: bool = False  # their program reads an empty text as false where it expects a switch
    pipeline: str = "rlvr"  # pipeline of a whole run
    learner: str = "actor_train"  # section of the model that learns

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
        """The rule for a key, and the part of the key that its ``*`` matches; the longest rule that fits."""
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
