"""Arguments of tool calls that are written without quotes, typed by the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
    "string": (str,),
}
# Words that templates write for values, to the JSON type and its word.
_PYTHON_WORDS = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


def parameters_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Name to JSON schema of the arguments, of tools in OpenAI's form (with or without ``function``)."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {one["name"]: one.get("parameters") or {} for one in functions if isinstance(one.get("name"), str)}


def typed_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """The value of the argument ``name``.

    A string stays the text as it is written, quotes included. What may be of another type is read as JSON (``True``,
    ``False`` and ``None`` too); where that gives no value of the schema's types it stays the text, which the tool's
    own check refuses. An argument that the schema does not type is JSON or the text.
    """
    properties = schema.get("properties")
    allowed = _types(properties.get(name) if isinstance(properties, Mapping) else None, schema)
    if allowed == {"string"}:
        return text
    kind, word = _PYTHON_WORDS.get(text.strip(), ("", text))
    spelled = word if kind in allowed else text
    try:
        value = json.loads(spelled, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return text
    return value if not allowed or _is_of(value, allowed - {"string"}) else text


def _types(schema: object, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Names of the JSON types that a schema allows; empty: any."""
    # Bounded: references of a schema may form a circle.
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1)
    written = schema.get("type")
    if written is not None:
        return {written} if isinstance(written, str) else set(written)
    branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or []
    found = [_types(branch, root, depth + 1) for branch in branches]
    if found:
        return set().union(*found) if all(found) else set()
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    return {name for name in _JSON_TYPES if any(_is_of(value, {name}) for value in values)}


def _is_of(value: object, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, _JSON_TYPES.get(name, ())) for name in types)


def no_constant(text: str) -> Any:
    """Refuse ``NaN`` and ``Infinity`` as ``parse_constant`` of Python's JSON reader, which accepts them."""
    raise ValueError(f"{text} is no JSON")
