"""The configuration classes for people and editors: ``roll explain KEY`` and the JSON schema of ``roll schema``.

Both read the same dataclasses, bounds and texts as the loader and the generated reference page
(:mod:`roll.config.reference`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from roll.config.errors import ConfigError, Problem
from roll.config.reference import PAGES, default_words, field_texts, meaning, type_words
from roll.config.schema import closest, rules_of, type_hints

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
"""Any value may be written as a reference to another key."""
PLACEHOLDER = re.compile(r"<[^>]+>|\[\]")


@dataclass(frozen=True)
class Explanation:
    """One key of one section.

    Attributes:
        section: heading of the section on the reference page.
        key: the key's own name.
    """

    section: str
    key: str
    type: str
    default: str
    text: str


def explain(word: str) -> list[Explanation]:
    """Every key that ``word`` names: a key's own name, or the end of its path (``training_args.learning_rate``).

    Raises:
        ConfigError: no section has such a key; the nearest one is named.
    """
    *sections, name = word.split(".")
    found = [row for row in _rows() if row.key == name or f"`{name}`" in row.text.partition("Also written")[2]]
    if sections:
        inner = sections[-1]
        found = [row for row in found if inner in _words(row.section)] or ([] if _is_section(inner) else found)
    if not found:
        nearest = closest(name, {row.key for row in _rows()})
        raise ConfigError([Problem("roll explain", word, "no section has such a key", nearest)])
    return found


def _rows() -> Iterator[Explanation]:
    for heading, cls, elsewhere in PAGES:
        known = {item.name for other in elsewhere for item in fields(other)}
        texts, hints = field_texts(cls), type_hints(cls)
        for item in fields(cls):
            if item.name not in known:
                hint = hints[item.name]
                text = meaning(item, texts[item.name]).replace("\\|", "|")
                yield Explanation(
                    heading.replace("`", ""), item.name, type_words(hint), default_words(item, hint), text
                )


def _words(heading: str) -> set[str]:
    return set(re.findall(r"\w+", PLACEHOLDER.sub("", heading)))


def _is_section(word: str) -> bool:
    return any(word in _words(heading) for heading, _, _ in PAGES)


def json_schema(cls: type, title: str) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a pipeline's file.

    Sections are closed; the top level is open, since a file may hold names of its own that ``${...}`` refers to.
    """
    definitions: dict[str, Any] = {}
    schema = _section_schema(cls, definitions)
    return {
        "$schema": SCHEMA_DIALECT,
        "title": title,
        **schema,
        "additionalProperties": True,
        "$defs": dict(sorted(definitions.items())),
    }


def _section_schema(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    texts, hints = field_texts(cls), type_hints(cls)
    properties: dict[str, Any] = {}
    for item in fields(cls):
        entry = _value_schema(item, hints[item.name], definitions) | {"description": texts[item.name]}
        default = item.default if item.default_factory is MISSING else None
        if isinstance(default, bool | int | float | str):
            entry["default"] = default
        for name in (item.name, *rules_of(item).aliases):
            properties[name] = entry
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value_schema(item: Field[Any], hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """``item``'s type with its bounds; a field with a parser of its own also takes that parser's spellings."""
    rules = rules_of(item)
    if rules.parse is not None or hint is Any:
        return {}
    options = list(_type_schemas(hint, definitions))
    if rules.choices is not None and not rules.dotted_path and not rules.endings:
        names = [*rules.choices, *(choice.upper() for choice in rules.choices if choice.upper() != choice)]
        options = [{"enum": names} if option.get("type") == "string" else option for option in options]
    bounds = {
        word: bound
        for word, bound in (
            ("minimum", rules.ge),
            ("exclusiveMinimum", rules.gt),
            ("maximum", rules.le),
            ("exclusiveMaximum", rules.lt),
        )
        if bound is not None
    }
    options = [option | bounds if option.get("type") in ("integer", "number") else option for option in options]
    return {"anyOf": [*options, INTERPOLATION]}


def _type_schemas(hint: Any, definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    origin, arguments = get_origin(hint), get_args(hint)
    simple: Mapping[Any, list[dict[str, Any]]] = {
        NoneType: [{"type": "null"}],
        bool: [{"type": "boolean"}],
        # The reader takes 1e8 for an int, and 1e-6 (text to YAML 1.1) for a number.
        int: [{"type": "integer"}, {"type": "string", "pattern": r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"}],
        float: [{"type": "number"}, {"type": "string", "pattern": r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"}],
        str: [{"type": "string"}, {"type": "number"}],
        Any: [{}],
    }
    if origin in (Union, UnionType):
        for option in arguments:
            yield from _type_schemas(option, definitions)
    elif origin is Literal:
        yield {"enum": list(arguments)}
    elif origin is list:
        yield {"type": "array", "items": _any_of(arguments[0], definitions)}
    elif origin is dict:
        yield {"type": "object", "additionalProperties": _any_of(arguments[1], definitions)}
        yield {"type": "null"}
    elif hint in simple:
        yield from simple[hint]
    elif isinstance(hint, type) and is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # a class that holds itself ends here
            definitions[hint.__name__] = _section_schema(hint, definitions)
        yield {"$ref": f"#/$defs/{hint.__name__}"}
        yield {"type": "null"}
    else:
        yield {}


def _any_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*_type_schemas(hint, definitions), INTERPOLATION]}
