"""What a rule of translation says, and the conversions of values that rules use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from roll.config.reading.errors import closest
from roll.config.reading.schema import Mismatch, convert
from roll.translation.draft import Draft

ACTOR, ENGINE, REFERENCE, CRITIC = "actor_train", "actor_infer", "reference", "critic"
STRATEGY, OPTIONS = "strategy_args.strategy_name", "strategy_args.strategy_config"
"""Our sections and two keys that many rules end in."""
REWARD_MODEL = "a reward model is a role and a reward of that name here; docs/rewards.md says how both are written"

MULTIMODAL = "images, video and audio are not supported yet"
EXPERTS = "mixtures of experts are not supported yet"
TURNS = "several turns, tools and agents are not supported yet"
"""What whole families of configurations are refused for."""

Convert = Callable[[Any], Any]

REST = ".*"
"""At the end of one of their keys: any key below it; ``{rest}`` in ours is what stands there."""


def as_written(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Rule:
    """What one of their keys becomes."""

    theirs: str
    """The key; several spellings of the same are set apart by spaces."""
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

    def note_for(self, value: Any) -> str:
        return self.note if self.about is None or value == self.about else ""

    @property
    def spellings(self) -> tuple[str, ...]:
        return tuple(self.theirs.split())


PROJECT = Rule(
    "trainer.project_name",
    ("tracker_kwargs.project",),
    "for wandb and swanlab; no effect for the others",
    fact="project",
    computed=True,
)
"""Both projects have it."""


def epochs(theirs: str) -> Rule:
    """Passes over the data, under the name that a project has for them."""
    note = "rows / `train_batch_size` x epochs; needs `--train-rows`"
    return Rule(theirs, ("max_steps",), note, whole, "epochs", computed=True)


@dataclass(frozen=True)
class Section:
    """Rules of one subject, as the documentation shows them."""

    title: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Dialect:
    """The keys of one project."""

    name: str
    title: str
    sections: tuple[Section, ...]
    defaults: tuple[tuple[str, Any], ...]
    """Their documented defaults that differ from ours or take part in the arithmetic; used for whole runs."""
    model_key: str
    """A configuration that sets this key describes a whole run."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What holds in every run of the project, whatever its keys say."""
    programs: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Patterns of the modules that start their trainer, and the facts that each adds."""

    prepare: Callable[[Draft], None] | None = None
    """Arithmetic that comes before all other: facts of theirs in the terms of the common ones."""
    algorithm: Callable[[Draft], None] | None = None
    """Keys of the algorithm, for a project with a vocabulary of its own."""
    steps: tuple[Callable[[Draft], None], ...] = ()
    """All that its facts decide; empty: what an RLVR run has (:mod:`roll.translation.assembly`)."""
    pipeline: str = "rlvr"
    """What a whole run of it is."""

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """Every spelling with its rule."""
        return {spelling: rule for section in self.sections for rule in section.rules for spelling in rule.spellings}

    def find(self, key: str) -> tuple[Rule, str] | None:
        """The rule for a key, and what stands in the place of its ``*``."""
        known = self.rules
        if key in known:
            return known[key], ""
        for spelling, rule in known.items():
            stem = spelling.removesuffix(REST)
            if spelling.endswith(REST) and key.startswith(f"{stem}."):
                return rule, key.removeprefix(f"{stem}.")
        return None

    def nearest(self, key: str) -> str | None:
        """The known key that an unknown one was probably meant to be: the same last name first."""
        known = self.rules
        section, _, last = key.rpartition(".")
        siblings = [name for name in known if name.rpartition(".")[0] == section]
        by_name = closest(last, [name.rpartition(".")[2] for name in siblings]) if siblings else None
        return f"{section}.{by_name}".lstrip(".") if by_name else closest(key, known)


def whole(value: Any) -> int:
    return int(_converted(value, int))


def number(value: Any) -> float | int:
    return float(_converted(value, float))


def truth(value: Any) -> bool:
    return bool(_converted(value, bool))


def flipped(value: Any) -> bool:
    return not truth(value)


def switched(value: Any) -> bool:
    """The 0 or 1 of an environment variable."""
    if str(value).strip().lower() not in ("0", "1", "true", "false"):
        raise ValueError("must be 0 or 1")
    return str(value).strip().lower() in ("1", "true")


def _converted(value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except Mismatch as error:
        raise ValueError(error.rule) from None


def never_below_zero(value: Any) -> int:
    """An interval in which 0 and -1 both mean never."""
    return 0 if value is False else max(0, whole(value))


def optional(conversion: Convert) -> Convert:
    """A conversion that leaves null as it is."""
    return lambda value: None if value is None else conversion(value)


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def one_of(names: Mapping[Any, Any]) -> Convert:
    """A conversion by a table of their names."""

    def look_up(value: Any) -> Any:
        if value in names:
            return names[value]
        known = [str(name) for name in names]
        nearest = closest(str(value), known)
        hint = f"; the nearest is {nearest}" if nearest else ""
        raise ValueError(f"has no translation; known: {', '.join(known)}{hint}")

    return look_up


def refused(reason: str, *neutral: Any) -> Convert:
    """A conversion that takes ``neutral`` values only."""

    def check(value: Any) -> Any:
        if value not in neutral:
            raise ValueError(reason)
        return value

    return check


LOGGERS = {
    "console": "stdout",
    "stdout": "stdout",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "file": "jsonl",
}


def loggers(value: Any) -> list[Any]:
    return [one_of(LOGGERS)(name) for name in listed(value)]
