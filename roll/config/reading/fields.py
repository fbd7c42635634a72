"""Rules of a configuration field: bounds, allowed names, aliases, a parser for special spellings.

They are in the field's metadata, so that the reader of YAML files, the generated reference page and the error messages
agree."""

from __future__ import annotations

import ast
import re
from collections import Counter, UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from roll.config.installation import Group


class Row(Protocol):
    """A row of a table."""

    @property
    def names(self) -> tuple[str, ...]:
        """The spellings that a file may use for it."""


@dataclass(frozen=True)
class Named:
    """A row with one name and perhaps other spellings."""

    name: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


R = TypeVar("R", bound=Row)


class Table(UserDict[str, R]):
    """Rows by each of their names, in the order in which they were added; rows that are added after its making are a
    user's own. ``key``: of the YAML, for messages."""

    def __init__(self, key: str, *rows: R) -> None:
        super().__init__()
        self.key = key
        for row in rows:
            self.add(row)
        self._shipped = frozenset(self)

    def add(self, row: R) -> None:
        """Add a row. Raises ``ValueError``: a name that is taken."""
        for name in row.names:
            if name in self:
                raise ValueError(f"{self.key} {name!r} is registered already; choose another name")
        self.update(dict.fromkeys(row.names, row))

    @property
    def rows(self) -> tuple[R, ...]:
        """The rows, each once."""
        return tuple(dict.fromkeys(self.values()))

    def is_own(self, name: str) -> bool:
        """True for a name that a user has added."""
        return name in self and name not in self._shipped

    def where(self, holds: Callable[[R], bool]) -> tuple[str, ...]:
        """Names of the rows for which ``holds``."""
        return tuple(name for name, row in self.items() if holds(row))


@dataclass(frozen=True)
class Choice:
    """A row of a :class:`Table` that a file chooses, with its options: ``vespo``, or ``{name: vespo, k_pos: 2}``."""

    name: str
    # The dataclass of the row's options; for a function of the user's own a mapping of those that were written.
    options: Any = field(default_factory=dict)
    # Options that were written under flat names, of which a function of the user's own takes those that it has.
    shared: Mapping[str, Any] = field(default_factory=dict)

    def get(self, option: str, default: Any = None) -> Any:
        """The option of this name, if there is one."""
        options = self.options
        return options.get(option, default) if isinstance(options, Mapping) else getattr(options, option, default)


@dataclass(frozen=True)
class FlatName:
    """The place inside a :class:`Choice` of a key that files may write outside of it."""

    option: str | None  # the option, or `name`; None: the key holds a mapping of options
    # The dataclass that has it: rows with these options, or with others that are made from them, read the key.
    of: type = object
    # Another flat name, true or false, without which this one does not count; its own name for a switch itself.
    switch: str | None = None
    default: Any = None  # value of the option where the switch is on and this name is not there


RULES = "roll.rules"


@dataclass(frozen=True)
class FieldRules:
    """Rules for a value beyond its type."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: Collection[str] | None = None
    """Allowed names; rows that are added to a :class:`Table` later are allowed as well."""
    dotted_path: bool = False
    """With ``choices``: a dotted path ``package.module.name`` is allowed too (a user's own function or class)."""
    plugins: Group | None = None
    """With ``dotted_path``: names that installed packages offer stand for theirs."""
    endings: tuple[str, ...] = ()
    """With ``choices``: the name of a file with one of these endings is allowed too."""
    aliases: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    """Turns the written value into one of the field's type; raises ValueError with the rule that was broken."""
    example: Any = None
    """A value that would work, for error messages."""
    secret: bool = False
    """A credential: hidden wherever it is shown or written."""
    or_one: bool = False
    """For a mapping of names to sections: a single section may be written instead, which then gets the key's name."""
    table: Table[Any] | None = None
    """For a :class:`Choice`: its rows, each with the dataclass of its ``options``."""
    read_if: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Keys of the section (or at the top), each with the values under one of which this key is read; no values: where
    the other key is set. Empty: it is always read."""

    def bounds(self) -> str:
        """The numeric bounds in words, empty if there are none."""
        parts = (("at least", self.ge), ("greater than", self.gt), ("at most", self.le), ("less than", self.lt))
        return " and ".join(f"{word} {bound:g}" for word, bound in parts if bound is not None)

    def violates(self, value: float) -> bool:
        return (
            (self.ge is not None and value < self.ge)
            or (self.gt is not None and value <= self.gt)
            or (self.le is not None and value > self.le)
            or (self.lt is not None and value >= self.lt)
        )


NO_RULES = FieldRules()


def rules(**options: Any) -> dict[str, FieldRules]:
    """Metadata for :func:`dataclasses.field` that holds these :class:`FieldRules`."""
    return {RULES: FieldRules(**options)}


def setting(default: object, **options: Any) -> Any:
    """A dataclass field with a default and the :class:`FieldRules` in ``options``."""
    return field(default=default, metadata=rules(**options))


DOTTED_PATH = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+")


def dotted(path: str) -> str:
    """``own/rewards.py:score`` as a dotted path."""
    return re.sub("[/:]+", ".", re.sub(r"^(\./)+|\.py(?=:|$)", "", path))


def parse_names(value: object) -> Any:
    """A list from names with commas between them; anything else as it is."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def parse_dotted_path(value: object) -> str | None:
    """``package.module.function`` or null."""
    if value is None or (isinstance(value, str) and DOTTED_PATH.fullmatch(value)):
        return value
    example = dotted(value) if isinstance(value, str) and "/" in value else "my_package.weights.weigh"
    raise ValueError(f"must be the dotted path of your own function or class, such as {example}")


LOWEST_TEMPERATURE = 1e-4  # logits divided by less leave the range of float32


def parse_temperature(value: Any) -> Any:
    """0, or a temperature that logits can be divided by."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value  # the type is checked elsewhere
    if 0 < number < LOWEST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {LOWEST_TEMPERATURE:g}")
    return value


DTYPE_NAMES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
}


def parse_dtype(value: object) -> str:
    """``bf16``, ``fp16`` or ``fp32`` from any of the usual spellings (``bfloat16``, ``torch.float32`` ...)."""
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ValueError(f"must be one of {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]


MAX_DEVICES = 65_536
RULE = "must be a list of device ids such as [0, 1], or a string such as 'list(range(0, 8))' or '[0, 1] + [4, 5]'"


def parse_device_mapping(value: object) -> list[int]:
    """Device ids in order. Raises ``ValueError``: another form, ids that are not whole numbers from 0 up, an empty
    list, or an id given twice."""
    if isinstance(value, str):
        ids = _parse_expression(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        ids = [value]
    elif isinstance(value, list | tuple):
        ids = list(value)
    else:
        raise ValueError(RULE)
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ValueError(f"{RULE}; {item!r} is not a whole number")
        if item < 0:
            raise ValueError(f"device ids start at 0; {item} is negative")
    if not ids:
        raise ValueError("must name at least one device; leave the key out (or write ~) for a role without devices")
    _check_number(len(ids))
    doubles = [item for item, times in Counter(ids).items() if times > 1]
    if doubles:
        raise ValueError(f"names device {min(doubles)} more than once")
    return ids


def _parse_expression(text: str) -> list[Any]:
    """The ids of a sum of lists and ranges."""
    depth, terms = 0, [""]
    for mark in text:
        depth += (mark in "([") - (mark in ")]")
        if mark == "+" and depth == 0:
            terms.append("")
        else:
            terms[-1] += mark
    ids: list[Any] = []
    for term in terms:
        ids += _read_term(term.strip())
        _check_number(len(ids))
    return ids


def _read_term(text: str) -> Sequence[Any]:
    """The ids of a list or a range, perhaps inside ``list()``."""
    if inner := re.fullmatch(r"list\((.*)\)", text, re.DOTALL):
        text = inner[1].strip()
    bounds = re.fullmatch(r"range\((.*)\)", text, re.DOTALL)
    try:
        numbers = ast.literal_eval(f"[{bounds[1]}]" if bounds else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(RULE) from None
    if not isinstance(numbers, list | tuple) or any(type(number) is not int for number in numbers):
        raise ValueError(RULE)
    if bounds is None:
        return numbers
    if not 1 <= len(numbers) <= 3:
        raise ValueError(RULE)
    if numbers[2:] == [0]:
        raise ValueError("the step of range() must not be 0")
    ids = range(*numbers)
    _check_number(max(0, -(-(ids.stop - ids.start) // ids.step)))
    return ids


def _check_number(number: int) -> None:
    if number > MAX_DEVICES:
        raise ValueError(f"names {number} devices; at most {MAX_DEVICES} are allowed")
