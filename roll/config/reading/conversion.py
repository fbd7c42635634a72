"""Values as a field's type where that is safe (``1e-6`` without a dot is a number), with its rules checked."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from roll.config.installation import Group, dotted_path, offered
from roll.config.reading.errors import closest_value
from roll.config.reading.fields import DOTTED_PATH, FieldRules, dotted
from roll.config.words import meanings_of

LARGEST = 2**53  # whole numbers up to this one are floats, too; no key has a use for a larger one


class Mismatch(Exception):
    """A value that cannot be read as the wanted type; carries the rule and a value that would work."""

    def __init__(self, rule: str, example: object = None) -> None:
        super().__init__(rule)
        self.rule = rule
        self.example = example


def convert_field(value: object, hint: object, rules: FieldRules) -> Any:
    """The value as the field's type, its rules checked. Raises ``Mismatch``: the rule that was broken."""
    if rules.parse is not None and value is not None:
        try:
            value = rules.parse(value)
        except ValueError as error:
            raise Mismatch(str(error), rules.example) from None
    if value == "None" and rules.choices is not None and NoneType in get_args(hint):
        value = None
    if rules.plugins is not None:
        value = _with_paths(value, rules.plugins, rules.choices or ())
    try:
        result = convert(value, hint)
    except Mismatch as error:
        raise Mismatch(error.rule, rules.example if rules.example is not None else error.example) from None
    for entry in result if isinstance(result, list) else [result]:
        _check_rules(entry, rules)
    return result


def _with_paths(value: object, group: Group, built_in: Collection[str]) -> Any:
    """A name, or a list of names, with the paths of those that installed packages offer."""
    if isinstance(value, list):
        return [_with_paths(entry, group, built_in) for entry in value]
    return dotted_path(group, value) if isinstance(value, str) and value not in built_in else value


def _check_rules(value: object, rules: FieldRules) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and rules.violates(value):
        raise Mismatch(f"must be {rules.bounds()}", rules.example if rules.example is not None else _inside(rules))
    if rules.choices is not None and isinstance(value, str) and value not in rules.choices:
        if rules.dotted_path and DOTTED_PATH.fullmatch(value):
            return
        if rules.endings and value.endswith(rules.endings):
            return
        also = f", {', '.join(offered(rules.plugins))} (installed)" if rules.plugins and offered(rules.plugins) else ""
        also += ", or the dotted path of your own function or class" if rules.dotted_path else ""
        also += f", or a file ({', '.join(rules.endings)})" if rules.endings else ""
        is_word = any(meaning.ours for meaning in meanings_of(value))
        also += f"; roll explain {value} names the keys for it" if is_word else ""
        own = dotted(value) if rules.dotted_path and "/" in value else None
        near = None if is_word else own or closest_value(value, rules.choices)
        example = near or rules.example or next(iter(rules.choices))
        raise Mismatch(f"must be one of {', '.join(rules.choices)}{also}", example)


def _inside(rules: FieldRules) -> float | int:
    """A value within the bounds, for error messages."""
    if rules.ge is not None:
        low = rules.ge
    elif rules.gt is not None:
        low = rules.gt + 1 if rules.le is None and rules.lt is None else (rules.gt + (rules.le or rules.lt or 0)) / 2
    else:
        low = rules.le or 0
    return int(low) if float(low).is_integer() else low


def convert(value: object, hint: object) -> Any:
    """The value as ``hint`` (None, bool, int, float, str, Literal, list, dict, unions of those, Any)."""
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        return _convert_union(value, get_args(hint))
    if origin is Literal:
        for option in get_args(hint):
            if value == option and type(value) is type(option):
                return option
        names = [str(option) for option in get_args(hint)]
        raise Mismatch(f"must be one of {', '.join(names)}", closest_value(str(value), names) or names[0])
    if origin is list:
        if not isinstance(value, list | tuple):
            raise Mismatch("must be a list", f"[{value}]" if isinstance(value, str | int | float) else "[]")
        return [_convert_entry(entry, get_args(hint)[0], "[{}]") for entry in value]
    if origin is dict:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise Mismatch("must be a section of keys, not a single value", "{}")
        return {
            str(key): _convert_entry(entry, get_args(hint)[1], f"{{{{{key}: {{}}}}}}") for key, entry in value.items()
        }
    return _convert_scalar(value, hint)


def _convert_entry(value: object, hint: object, form: str) -> Any:
    """An entry of a list or mapping; the example of a mistake is the whole of it, as ``form`` says."""
    try:
        return convert(value, hint)
    except Mismatch as error:
        raise Mismatch(error.rule, None if error.example is None else form.format(error.example)) from None


def _convert_union(value: object, options: tuple[Any, ...]) -> Any:
    plain = [option for option in options if option is not NoneType]
    # "None" is how files of Python projects write null; a text field keeps it.
    if NoneType in options and (value is None or (value == "None" and str not in plain)):
        return None
    if bool in plain and isinstance(value, str) and value.strip().lower() in _BOOLS:
        return _BOOLS[value.strip().lower()]
    # The type of the value first: 1 remains an int under `float | int`.
    exact = [option for option in plain if option is type(value)]
    failures = []
    for option in exact + [option for option in plain if option not in exact]:
        try:
            return convert(value, option)
        except Mismatch as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise Mismatch(", or ".join(dict.fromkeys(failure.rule for failure in failures)), failures[0].example)


_BOOLS = {"true": True, "false": False}


def _convert_scalar(value: object, hint: object) -> bool | int | float | str:
    """A bool, an int, a float or a text."""
    if hint is bool:
        value = _BOOLS.get(value.strip().lower()) if isinstance(value, str) else value
        if isinstance(value, bool):
            return value
        raise Mismatch("must be true or false", "true")
    if hint is str:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str):
            return value
        example = f"'{value}'" if value is not None else "'text'"
        raise Mismatch("must be text (quote it if that is what is meant)", example)
    is_whole = hint is int
    kind = "whole number" if is_whole else "number"
    if isinstance(value, str):
        try:
            value = int(value) if re.fullmatch(r"\s*[+-]?\d+\s*", value) else float(value)
        except ValueError:
            raise Mismatch(f"must be a {kind}", 1) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Mismatch(f"must be a {kind}", 1)
    if isinstance(value, int) and abs(value) > LARGEST:
        raise Mismatch(f"must be a {kind} of at most {LARGEST}", 1)
    if not math.isfinite(value):
        raise Mismatch(f"must be a finite {kind}", 1)
    if not is_whole:
        return float(value)
    if not float(value).is_integer():
        raise Mismatch("must be a whole number", max(1, round(value)))
    if abs(value) > LARGEST:
        raise Mismatch(f"must be a number of at most {LARGEST}", 1)
    return int(value)
