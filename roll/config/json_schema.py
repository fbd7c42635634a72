"""Keys for other programs: JSON schema of a pipeline's file for editors (``roll schema``), key paths for shells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from roll.config.pipelines import definitions
from roll.config.reading.fields import DOTTED_PATH
from roll.config.reading.legacy_keys import dead_keys, dead_words
from roll.config.reading.schema import flat_options, mapped_section, rules_of, schema_paths, type_hints
from roll.config.reference import field_texts
from roll.config.strategies.registry import BACKENDS

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}  # any value may be written as a reference to another key


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
        entry = _value_schema(item, hints[item.name], definitions) | {"description": texts.get(item.name, "")}
        default = item.default if item.default_factory is MISSING else None
        if isinstance(default, bool | int | float | str):
            entry["default"] = default
        for name in (item.name, *rules_of(item).aliases):
            properties[name] = entry
    for name, flat in flat_options(cls).items():
        properties[name] = _value_schema(flat.option, flat.hint, definitions)
    for name, decides in dead_keys(cls).items():
        properties[name] = {"deprecated": True, "description": dead_words(decides)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value_schema(item: Field[Any], hint: object, definitions: dict[str, Any]) -> dict[str, Any]:
    """The type of ``item`` with its bounds; anything for a field whose parser takes further spellings."""
    rules = rules_of(item)
    if rules.parse is not None or hint is Any:
        return {}
    if rules.table is not None:
        own = {"type": "object", "properties": {"name": {"type": "string", "pattern": DOTTED_PATH.pattern}}}
        sections = []
        for row in rules.table.rows:
            if row.options is not None:
                schema = _section_schema(row.options, definitions)
                sections.append(schema | {"properties": {"name": {"enum": list(row.names)}, **schema["properties"]}})
        return {"anyOf": [{"type": "string"}, *sections, own, INTERPOLATION]}
    if item.name == "strategy_name":
        return {"anyOf": [{"enum": [name for backend in BACKENDS.rows for name in backend.names]}, INTERPOLATION]}
    if isinstance(hint, type) and is_dataclass(hint):
        # In place of anyOf, whose mistakes would be those of the section, not of a key in it.
        section, others = _type_schemas(hint, definitions)
        return {"if": {"type": "object"}, "then": section, "else": {"anyOf": [others, INTERPOLATION]}}
    options = list(_type_schemas(hint, definitions))
    if rules.or_one:
        options += _type_schemas(mapped_section(hint), definitions)
    if rules.choices is not None and not rules.dotted_path and not rules.endings:
        names = [*rules.choices, *(choice.upper() for choice in rules.choices if choice.upper() != choice)]
        options = [{"enum": names} if option.get("type") == "string" else option for option in options]
    limits = {"minimum": rules.ge, "exclusiveMinimum": rules.gt, "maximum": rules.le, "exclusiveMaximum": rules.lt}
    bounds = {word: bound for word, bound in limits.items() if bound is not None}
    options = [option | bounds if option.get("type") in ("integer", "number") else option for option in options]
    return {"anyOf": [*options, INTERPOLATION]}


def _type_schemas(hint: object, definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
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
    elif origin in (list, dict):
        inner = {"anyOf": [*_type_schemas(arguments[-1], definitions), INTERPOLATION]}
        if origin is list:
            yield {"type": "array", "items": inner}
        else:
            yield from ({"type": "object", "additionalProperties": inner}, {"type": "null"})
    elif hint in simple:
        yield from simple[hint]
    elif isinstance(hint, type) and is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # a class that holds itself ends here
            definitions[hint.__name__] = _section_schema(hint, definitions)
        yield from ({"$ref": f"#/$defs/{hint.__name__}"}, {"type": "null"})
    else:
        yield {}


# Function of the words that may come next.
BASH = """_roll_keys() {{
  compgen -W "{keys}" -- "$1"
}}"""
BASH_END = """
# A value follows a key at once.
_roll_without_space() {
  _shtab_roll
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  return 0
}
complete -o bashdefault -F _roll_without_space roll
"""
ZSH = """_roll_keys() {{
  compadd -S '' -- {keys}
}}"""


def key_paths() -> list[str]:
    """Full paths of the keys of all pipelines, but those below a name that the file chooses."""
    classes: list[type] = [one.config_class for one in definitions()]
    found = {path for cls in classes for paths in schema_paths(cls).values() for path in paths}
    # Of the options of a loss those inside its section; the flat names would be offered twice.
    for cls in classes:
        for name, flat in flat_options(cls).items():
            found = found - {name} | {f"{flat.choice.name}.name", f"{flat.choice.name}.{flat.option.name}"}
    return sorted(path for path in found if "<name>" not in path)


def key_completion() -> dict[str, object]:
    """The keys as shtab takes them for an argument."""
    keys = " ".join(f"{path}=" for path in key_paths())
    preamble = {"bash": BASH.format(keys=keys), "zsh": ZSH.format(keys=keys)}
    return {"preamble": preamble, "bash": "_roll_keys", "zsh": "_roll_keys", "tcsh": ""}
