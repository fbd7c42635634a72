"""Reads plain data (what a YAML file holds) as a typed dataclass, finding every mistake on the way.

dacite builds the objects, strictly; it stops at its first error, so this reader goes first: it collects all mistakes,
brings values to the field's type where that is safe (``1e-6`` and ``1e8`` without a dot are numbers, an int field takes
``1e8``) and drops nothing silently. The rules of a field are in its metadata (:mod:`roll.config.reading.fields`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import dacite

from roll.config.reading.conversion import Mismatch as Mismatch
from roll.config.reading.conversion import convert as convert
from roll.config.reading.conversion import convert_field as convert_field
from roll.config.reading.errors import Problems, closest
from roll.config.reading.fields import NO_RULES, RULES, Choice, FieldRules, FlatName
from roll.config.reading.legacy_keys import FLAT_NAMES, dead_keys, dead_words
from roll.config.words import OPTIONS, meanings_of

T = TypeVar("T")
MOST_KEYS_LISTED = 12


@cache
def type_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def rules_of(item: Field[Any]) -> FieldRules:
    rules = item.metadata.get(RULES, NO_RULES)
    assert isinstance(rules, FieldRules)
    return rules


@cache
def aliases_of(cls: type) -> dict[str, str]:
    """Other spellings of a section's keys, each with its field."""
    return {alias: item.name for item in fields(cls) for alias in rules_of(item).aliases}


@cache
def known_keys(cls: type) -> tuple[str, ...]:
    """Every name that a section takes."""
    _, passed_through = getattr(cls, "passes_through", ("", ()))
    return tuple(
        dict.fromkeys((*(item.name for item in fields(cls)), *aliases_of(cls), *flat_options(cls), *passed_through))
    )


@dataclass(frozen=True)
class FlatOption:
    """An option of a :class:`Choice` that a section takes under a flat name."""

    choice: Field[Any]  # the section's field
    rows: tuple[Any, ...]  # the rows of its table that have the option
    option: Field[Any]
    hint: Any

    @property
    def readers(self) -> tuple[str, ...]:
        return tuple(name for row in self.rows for name in row.names)


@cache
def flat_options(cls: type) -> dict[str, FlatOption]:
    """Flat names of the options of a section's choices, those inside roles' sections aside."""
    choices = [item for item in fields(cls) if rules_of(item).table is not None]
    return {
        name: replace(flat_option(item, flat), hint=bool) if flat.switch == name else flat_option(item, flat)
        for item in choices
        for name, flat in FLAT_NAMES[item.name].items()
        if flat.of is not object and "." not in name
    }


def flat_option(choice: Field[Any], flat: FlatName) -> FlatOption:
    table = rules_of(choice).table
    assert table is not None
    rows = tuple(row for row in table.rows if row.options is not None and issubclass(row.options, flat.of))
    option = next(option for option in fields(rows[0].options) if option.name == flat.option)
    return FlatOption(choice, rows, option, type_hints(rows[0].options)[option.name])


def nested_section(hint: object) -> type | None:
    """The dataclass of a field's type (also of ``X | None``), if it is a section."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((option for option in options if isinstance(option, type) and is_dataclass(option)), None)


def mapped_section(hint: object) -> type | None:
    """The dataclass of the values of a ``dict[str, X]`` field, if they are sections."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for option in options:
        if get_origin(option) is dict:
            return nested_section(get_args(option)[1])
    return None


@cache
def sections_of(cls: type) -> tuple[tuple[type, str], ...]:
    """Every section of a configuration class with the path before its keys, the shortest first. ``<name>`` stands for
    the names of a mapping."""
    found: list[tuple[type, str]] = [(cls, "")]
    for section, prefix in found:  # which grows meanwhile
        for item in fields(section):
            hint = type_hints(section)[item.name]
            inner, mapped = nested_section(hint), mapped_section(hint)
            if inner is not None and inner is not Choice:
                found.append((inner, f"{prefix}{item.name}."))
            elif mapped is not None:
                found.append((mapped, f"{prefix}{item.name}.<name>."))
    return tuple(found)


@cache
def schema_paths(cls: type) -> dict[str, list[str]]:
    """Every key of a configuration class, by each of its names, with the full paths where it may be, the shortest
    first."""
    found: dict[str, list[str]] = {}
    for section, prefix in sections_of(cls):
        for name in flat_options(section):
            found.setdefault(name, []).append(f"{prefix}{name}")
        for item in fields(section):
            for name in (item.name, *rules_of(item).aliases):
                found.setdefault(name, []).append(f"{prefix}{item.name}")
    return found


@cache
def declared_secrets(cls: type) -> dict[str, bool]:
    """Every key of a configuration class, by whatever spelling, and whether it is declared secret."""
    found: dict[str, bool] = {}
    for item in (item for section in {section for section, _ in sections_of(cls)} for item in fields(section)):
        for name in (item.name, *rules_of(item).aliases):
            found[name] = found.get(name, False) or rules_of(item).secret
    return found


@dataclass(frozen=True)
class Unknown:
    """A key that its section does not have."""

    section: type
    path: str
    key: str
    value: Any
    position: int  # index of its mistake among the errors


class SchemaReader:
    """Checks and normalises one tree of plain data against a dataclass; mistakes go to ``problems``."""

    def __init__(
        self,
        problems: Problems,
        referenced: Collection[str] = (),
        is_own: Callable[[str], bool] = lambda key: True,
        rank: Callable[[str], int] = lambda key: 0,
    ) -> None:
        """
        Args:
            referenced: keys that a ``${...}`` reads, which makes a dead key of use.
            is_own: as of :class:`roll.config.checks.base.Checks`.
            rank: of two spellings of one thing, the one of higher rank counts; of the same rank both may not be there.
        """
        self.problems = problems
        self.referenced = referenced
        self.is_own = is_own
        self.rank = rank
        self.unknown: list[Unknown] = []
        # Choices and options of them by their own paths, each with the name it was written under.
        self.spelled: dict[str, str] = {}

    def read(self, cls: type, data: object, path: str) -> dict[str, Any]:
        """The section's values under their field names, each of its field's type; wrong ones and dead keys are left
        out, the latter with a note."""
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            self.problems.add(path or "(top level)", data, "must be a section of keys, not a single value")
            return {}
        hints, items, aliases = type_hints(cls), {item.name: item for item in fields(cls)}, aliases_of(cls)
        values: dict[str, Any] = {}
        data = self._newest_spellings(data, aliases, path)
        for item in fields(cls):
            if rules_of(item).table is not None:
                values[item.name], data = self.read_choice(item, data)
        for key, value in data.items():
            name = aliases.get(str(key), str(key))
            full = f"{path}.{key}" if path else str(key)
            if name in dead_keys(cls):
                is_set = value not in (None, False, "", [], {}) and full not in self.referenced
                if is_set and dead_keys(cls)[name] is not None:
                    self.problems.note(full, dead_words(dead_keys(cls)[name]))
                continue
            if name not in items:
                self.unknown.append(Unknown(cls, full, str(key), value, len(self.problems.errors)))
                self.problems.add(full, value, unknown_rule(cls, str(key)))
                continue
            if name != key and name in data and data[name] != value:
                self.problems.add(full, value, f"is another spelling of {name}, which is set too: keep one of them")
                continue
            self._read_field(values, items[name], hints[name], value, full)
        return values

    def as_written(self, key: str) -> str:
        """The name in the file of a key as the checks know it."""
        parts = key.split(".")
        heads = (".".join(parts[:end]) for end in (2, 1))
        head = next((head for head in heads if head in self.spelled), None)
        return key if head is None else self.spelled[head] + key.removeprefix(head)

    def _newest_spellings(self, data: Mapping[str, Any], aliases: Mapping[str, str], path: str) -> Mapping[str, Any]:
        """The section without spellings of a key that another one, written later, replaces."""
        groups: dict[str, list[str]] = {}
        for key in data:
            groups.setdefault(aliases.get(str(key), str(key)), []).append(key)
        replaced = set()
        for keys in groups.values():
            ranks = {key: self.rank(f"{path}.{key}" if path else str(key)) for key in keys}
            replaced |= {key for key in keys if ranks[key] < max(ranks.values())}
        return {key: value for key, value in data.items() if key not in replaced}

    def _read_field(self, values: dict[str, Any], item: Field[Any], hint: object, value: object, path: str) -> None:
        rules = rules_of(item)
        inner, mapped = nested_section(hint), mapped_section(hint)
        if inner is not None:
            value = value if rules.parse is None else rules.parse(value)
            if value is not None or NoneType not in get_args(hint):
                values[item.name] = self.read(inner, value, path)
            return
        if mapped is not None:
            if rules.or_one and isinstance(value, Mapping) and set(value) & set(known_keys(mapped)):
                values[item.name] = {item.name: self.read(mapped, value, path)}
            elif value is None or isinstance(value, Mapping):
                named = {} if value is None else value
                values[item.name] = {str(key): self.read(mapped, one, f"{path}.{key}") for key, one in named.items()}
            else:
                self.problems.add(path, value, "must map names to sections")
                values[item.name] = {}
            return
        # The dataclass of the entries of a `list[X]` field, if they are sections.
        listed = nested_section(get_args(hint)[0]) if get_origin(hint) is list else None
        if listed is not None and isinstance(value, list):
            values[item.name] = [self.read(listed, entry, f"{path}[{index}]") for index, entry in enumerate(value)]
            return
        try:
            values[item.name] = convert_field(value, hint, rules)
        except Mismatch as error:
            self.problems.add(path, value, error.rule, error.example)

    def read_choice(self, item: Field[Any], data: Mapping[str, Any]) -> tuple[Choice, Mapping[str, Any]]:
        """The row and the options that the keys of a choice select, nested or flat, and the keys that are left."""
        rules, left = rules_of(item), dict(data)
        table: Any = rules.table
        default = item.default
        assert isinstance(default, Choice)
        key, *others = [key for key in (item.name, *rules.aliases) if key in data] or [item.name]
        self.spelled[item.name] = key
        written = left.pop(key, default.name)
        for other in others:
            if left.pop(other) != written:
                rule = f"is another spelling of {key}, which is set too: keep one of them"
                self.problems.add(other, data[other], rule)
        section = dict(written) if isinstance(written, Mapping) else {"name": written}
        flat: dict[str, Any] = {}
        for path in FLAT_NAMES[item.name]:
            role, _, last = path.rpartition(".")
            holder = left.get(role) if role else left
            if isinstance(holder, Mapping) and last in holder:
                flat[path] = holder[last]
                rest = {name: value for name, value in holder.items() if name != last}
                left = left | {role: rest} if role else rest
        # A role's key without a value leaves the decision to the one at the top.
        flat = {path: value for path, value in flat.items() if "." not in path or value is not None}
        named = {path: value for path, value in flat.items() if FLAT_NAMES[item.name][path].option == "name"}
        named = {path: value for path, value in named.items() if self.rank(path) >= self.rank(key)}
        name_key, name = next(iter(named.items()), (key, section.get("name", default.name)))
        section.pop("name", None)
        try:
            name = convert_field(name, str, rules)
        except Mismatch as error:
            self.problems.add(item.name if name_key == key else name_key, name, error.rule, error.example)
            return default, left
        chosen = Written(item, name, key, table[name].options if name in table else None, section)
        for path, value in flat.items():
            self._place(chosen, path, value, flat)
        if chosen.cls is None:  # of a function that is not imported yet: checked against its dataclass later
            return Choice(name, chosen.options, chosen.shared), left
        before = len(self.unknown)
        options = self.read(chosen.cls, chosen.options, item.name)
        # Of an unknown option the known ones are the answer, not a key of its name somewhere else.
        del self.unknown[before:]
        return Choice(name, build(chosen.cls, options)), left

    def _place(self, chosen: Written, path: str, value: Any, flat: Mapping[str, Any]) -> None:
        """Put the value of a flat name where it belongs, or note why it has no effect."""
        place, options = FLAT_NAMES[chosen.choice.name][path], chosen.options
        if place.option is None:
            if value is not None and not isinstance(value, Mapping):
                self.problems.add(path, value, "must be a section of keys, not a single value", "{}")
                return
            for option, one in (value or {}).items():
                options[option], self.spelled[f"{chosen.choice.name}.{option}"] = one, f"{path}.{option}"
        if place.option in (None, "name"):
            return
        known, rank = flat_option(chosen.choice, place), self.rank(f"{chosen.key}.{place.option}")
        new = self._switched(chosen, path, value, flat) if place.switch == path else {str(place.option): value}
        if chosen.cls is not None and not issubclass(chosen.cls, place.of):
            reason = f"with {chosen.choice.name}: {chosen.name} (read with {', '.join(known.readers)})"
        else:
            reason = f"without {place.switch}: true" if place.switch and not flat.get(place.switch) else ""
        if reason:
            for one in new.values():
                self._read_field({}, known.option, known.hint, one, path)
            if self.is_own(path) and not says_no(known.option, value):
                self.problems.note(path, f"has no effect {reason}")
        elif chosen.cls is None:
            # A function of the package that is chosen by its path may share the options of the row it is named after.
            if len(known.rows) > 1 or chosen.name.endswith(known.rows[0].name):
                chosen.shared.update(new)
        elif rank == self.rank(path) and "." not in path and any(options.get(key, new[key]) != new[key] for key in new):
            rule = f"is another spelling of the option {place.option}, which is set too: keep one of them"
            self.problems.add(path, value, rule)
        elif rank <= self.rank(path) or place.option not in options:
            options.update(new)
            self.spelled |= dict.fromkeys((f"{chosen.choice.name}.{name}" for name in new), path)

    def _switched(self, chosen: Written, path: str, value: object, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of what a switch brings along and is not written."""
        if not isinstance(value, bool | None):
            self.problems.add(path, value, "must be true or false", "true")
        members = ((name, one) for name, one in FLAT_NAMES[chosen.choice.name].items() if one.switch == path != name)
        new = {str(one.option): one.default for name, one in members if flat.get(name) is None}
        return {name: default for name, default in new.items() if value and name not in chosen.options}


@dataclass(frozen=True)
class Written:
    """A choice while its flat names are read."""

    choice: Field[Any]
    name: str
    key: str  # the key as it was written
    cls: type | None  # the dataclass of its options; None: of a function of the user's own
    options: dict[str, Any]
    shared: dict[str, Any] = field(default_factory=dict)


def says_no(item: Field[Any], value: object) -> bool:
    """Return true for null, and for false where that is not a change of the default: neither asks for an effect."""
    return value is None or (value is False and item.default is not True)


def unknown_rule(cls: type, key: str) -> str:
    """The mistake of a key that a section does not have, as far as the section alone tells what was meant: that of a
    strategy's options has words of other projects."""
    known = known_keys(cls)
    ours = (ours.partition(f"{OPTIONS}.")[2] for meaning in meanings_of(key) for ours in meaning.ours)
    called = next((name for name in ours if name in known), None)
    nearest = closest(key, known)
    if called is not None:
        return f"unknown key; here it is called {called}"
    if nearest is not None:
        return f"unknown key; the nearest known one is {nearest}"
    if not known:
        return "unknown key; there are no options here"
    if len(known) <= MOST_KEYS_LISTED:
        return f"unknown key; known here: {', '.join(known)}"
    return "unknown key, and no known one is near; docs/configuration-reference.md lists them all"


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass of values that :class:`SchemaReader` has read."""
    return dacite.from_dict(cls, values, dacite.Config(strict=True))
