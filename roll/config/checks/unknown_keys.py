"""The key that was meant by one that its section does not have.

A key that is offered has an effect in its place: a role reads it, by the same knowledge of roles, sections and
conditions that names unread keys (:mod:`roll.config.checks.keys`). It is the key itself in the section that it belongs
to, or the key of ours for a word of another project (:mod:`roll.config.words`), the one nearer to where it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from itertools import takewhile
from typing import Any

from roll.config.checks.keys import has_use, leaves, roles_of, unmet_condition
from roll.config.pipelines import PipelineDefinition, definitions
from roll.config.reading.errors import LIKENESS_ANYWHERE, Problems, closest
from roll.config.reading.schema import (
    Mismatch,
    Unknown,
    convert_field,
    flat_options,
    known_keys,
    mapped_section,
    nested_section,
    rules_of,
    schema_paths,
    type_hints,
)
from roll.config.roles import WorkerConfig
from roll.config.run import RunConfig
from roll.config.strategies.registry import BACKENDS
from roll.config.words import OPTIONS, Meaning, meanings_of, sections

# A place that is read; that another key must be set for; in a section that the file does not have.
READ, CONDITIONAL, ABSENT = range(3)
MOST_PLACES = 4


@dataclass(frozen=True)
class Place:
    """A key of a configuration."""

    path: str  # as a message shows it; `<name>` stands for the names of a mapping with several or none
    schema_path: str  # with `<name>` for every name of a mapping
    state: int = READ  # or CONDITIONAL or ABSENT
    condition: str = ""  # why it is not read
    field: Field[Any] | None = None  # None: an option of a strategy
    hint: Any = None  # the type of its values

    def takes(self, value: object) -> bool:
        """Return true for a value that the key may have."""
        if self.field is None or nested_section(self.hint) or mapped_section(self.hint):
            return True
        try:
            convert_field(value, self.hint, rules_of(self.field))
        except Mismatch:
            return False
        return True

    def __str__(self) -> str:
        if self.state == ABSENT:
            return f"{self.path}, in a section that is not written yet"
        return f"{self.path}, which has no effect {self.condition}" if self.condition else self.path


@dataclass(frozen=True)
class Offer:
    """A place, and the rule that names it."""

    place: Place
    rule: str

    def rank(self, path: str) -> tuple[int, int]:
        """The lower, the better: read before unread, then the nearest to ``path``."""
        theirs, ours = path.split(".")[:-1], self.place.path.split(".")[:-1]
        return self.place.state, -sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(theirs, ours, strict=False))
        )


def name_unknown(
    unknown: Sequence[Unknown], config: RunConfig, pipeline: PipelineDefinition, problems: Problems
) -> None:
    """Make the mistakes of unknown keys name the key that was meant, where that is not in their own section; ``config``
    is what the file says apart from them."""
    if unknown:
        guide = Guide(config, pipeline)
        for one in unknown:
            rule = guide.rule(one)
            if rule is not None:
                problems.errors[one.position] = replace(problems.errors[one.position], rule=rule)


class Guide:
    """Finds keys in a configuration, which is without its unknown ones."""

    def __init__(self, config: RunConfig, pipeline: PipelineDefinition) -> None:
        self.config, self.pipeline = config, pipeline
        self.facts = pipeline.effective(config)
        self.roles = dict(roles_of(config))
        cls: type = type(config)
        self.paths = schema_paths(cls)

    def rule(self, unknown: Unknown) -> str | None:
        """The mistake of an unknown key; None: its own section says enough."""
        key, near = unknown.key, closest(unknown.key, known_keys(unknown.section))
        if isinstance(unknown.value, Mapping) and "." not in unknown.path and key in sections():
            # A section of another project: where it has one key, what that is called here.
            paths = [path for path, inner in leaves(unknown.value, f"{key}.") if not isinstance(inner, Mapping)]
            offers = self.called(paths[0]) if len(paths) == 1 else []
            whole = f"a section of {sections()[key]}: roll translate turns such keys into those of this project"
            return min(offers, key=lambda offer: offer.rank(key)).rule if offers else f"unknown key; {whole}"
        nothing = "" if "" in {meaning.project for meaning in meanings_of(key)} else "it has no counterpart here: "
        notes = [nothing + meaning.note.replace("`", "") for meaning in meanings_of(key) if not meaning.ours]
        called = self.called(key)
        own = [Offer(place, f"unknown key here; it belongs at {place}") for place in self.places(key)]
        if notes and not called:  # a name such as `type`: of use where it stands near, else it says nothing
            own = [offer for offer in own if offer.rank(unknown.path)[1]]
        fitting = [offer for offer in own if offer.place.takes(unknown.value)]
        own = fitting if fitting or called else own
        kinds = [sorted(kind, key=lambda offer: offer.rank(unknown.path)) for kind in (own, called)]
        written = unknown.path.rpartition(".")[0]
        # Read before unread, then a key of the section that was written before one of another.
        offers = min(
            filter(None, kinds),
            key=lambda kind: (kind[0].place.state, kind[0].place.path.rpartition(".")[0] != written),
            default=[],
        )
        if offers and (offers[0].place.state != ABSENT or near is None or called):
            rank = offers[0].rank(unknown.path)
            return offers[0].rule + also([offer.place for offer in offers if offer.rank(unknown.path) == rank])
        if near is not None:
            return None
        if notes:
            return f"unknown key; {notes[0]}"
        meant = next((meaning.ours[0] for meaning in meanings_of(key)), "")
        if meant and OPTIONS not in meant and meant not in self.paths.get(meant.rpartition(".")[2], []):
            return f"unknown key; it means {meant}, which the pipeline {self.pipeline.name} does not have"
        name = closest(key, self.paths, LIKENESS_ANYWHERE)
        places = sorted(self.places(name), key=lambda place: place.state) if name else []
        return f"unknown key; the nearest known one is {places[0]}" if places else None

    def called(self, word: str) -> list[Offer]:
        """The keys that a word of another project means; of one that is also a key of ours, only as it is spoken."""
        meanings = [one for one in meanings_of(word) if not one.project or word not in self.paths]
        return [offer for meaning in meanings if (offer := self.offer(meaning)) is not None]

    def offer(self, meaning: Meaning) -> Offer | None:
        """The first of the keys of a meaning, and the others that must be set with it."""
        places = [place for ours in meaning.ours if (place := self.exactly(ours) or self.alike(ours)) is not None]
        if not places:
            return None
        first, *others = places
        needed = [place.path for place in others if place.state == READ][: MOST_PLACES - 1]
        together = f", together with {' and '.join(needed)}" if needed else ""
        is_plain = meaning.note and (needed or not first.condition)
        note = f" ({meaning.note.replace('`', '')})" if is_plain else ""
        return Offer(first, f"unknown key; here it is called {first.path if needed else first}{together}{note}")

    def exactly(self, ours: str) -> Place | None:
        """The place of a key in this configuration."""
        section, _, last = ours.rpartition(".")
        places = [place for place in self.places(last) if place.schema_path == ours]
        if places or last in self.paths or not section or section.endswith(OPTIONS):
            return min(places, key=lambda place: place.state, default=None)
        inside = self.exactly(section)  # an entry of a section of free keys, such as tracker_kwargs
        return inside and replace(inside, path=f"{inside.path}.{last}", schema_path=ours)

    def alike(self, ours: str) -> Place | None:
        """The place of a key in the role of this pipeline that does the work of the key's own role."""
        role, _, rest = ours.partition(".")
        task = {other.name: other.task for one in definitions() for other in one.roles}.get(role)
        if task is None or not rest or hasattr(self.config, role):
            return None
        others = (other.name for other in self.pipeline.roles if other.task is task)
        return next((place for other in others if (place := self.exactly(f"{other}.{rest}")) is not None), None)

    def places(self, key: str) -> list[Place]:
        """Where the configuration may have a key of this name and has use for it, the least deep first."""
        found = [self.place(path) for path in self.paths.get(key, [])]
        return [place for place in found if place is not None] + list(self.options(key))

    def place(self, path: str) -> Place | None:
        """The state of a key; None for one that the role has no use for."""
        *names, last = path.split(".")
        node: Any = self.config
        hint: Any = None
        shown, written, is_absent = [], [], False
        for position, name in enumerate(names):
            if name == "<name>":
                options = list(node)
                shown.append(options[0] if len(options) == 1 else name)
                written.append(options[0] if options else name)
                inner, section = node.get(written[-1]), mapped_section(hint)
            else:
                cls: type = type(node)
                hint = type_hints(cls)[name]
                shown.append(name)
                written.append(name)
                inner, section = getattr(node, name), nested_section(hint)
            is_absent = is_absent or inner is None
            node = inner if inner is not None else section() if section is not None else {}
            below = ".".join([*names[position + 1 :], last])
            at = ".".join(written)
            if isinstance(node, WorkerConfig) and not has_use(below, at, node, self.config, self.pipeline):
                return None
        section_class: type = type(node)
        option = flat_options(section_class).get(last)
        if option is not None:
            chosen, readers = getattr(node, option.choice.name).name, option.readers
            condition = f"with {option.choice.name}: {chosen} (read with {', '.join(readers)})"
            is_read = chosen in readers
            return Place(
                path, path, READ if is_read else CONDITIONAL, "" if is_read else condition, option.option, option.hint
            )
        item = next(item for item in fields(node) if item.name == last)
        condition = unmet_condition(item, node, self.config, self.facts) or ""
        state = ABSENT if is_absent else CONDITIONAL if condition else READ
        return Place(".".join([*shown, last]), path, state, condition, item, type_hints(section_class)[last])

    def options(self, key: str) -> Iterator[Place]:
        """Where the strategy of a role has an option of this name, or another strategy that the role may have."""
        options: dict[str, type] = {name: backend.options for name, backend in BACKENDS.items()}
        owners = [name for name, cls in options.items() if key in known_keys(cls)]
        for name, role in self.roles.items():
            strategy = role.strategy_args.strategy_name
            if not owners or not has_use("strategy_args", name, role, self.config, self.pipeline):
                continue
            path = f"{name}.{OPTIONS}.{key}"
            if strategy in owners:
                yield Place(path, path)
            elif able := [owner for owner in owners if owner in self.pipeline.task_of(name, role).able()]:
                yield Place(path, path, CONDITIONAL, f"with strategy_name: {strategy} (read with {', '.join(able)})")


def also(places: Sequence[Place]) -> str:
    """The places of the first one's key but itself, in brackets."""
    same = (place.path for place in places if place.state != ABSENT)
    name = places[0].path.rpartition(".")[2]
    names = list(dict.fromkeys(path for path in same if path.rpartition(".")[2] == name))[1:MOST_PLACES]
    return f" (or at {', '.join(names)})" if names else ""
