"""``device_mapping``: a YAML list, or a string of list literals, ``list(range(...))``, ``list([...])`` and their sums.

The string is parsed with :mod:`ast` and only these forms are read; nothing is ever evaluated.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

MAX_DEVICES = 65_536
RULE = "must be a list of device ids such as [0, 1], or a string such as 'list(range(0, 8))' or '[0, 1] + [4, 5]'"


def parse_device_mapping(value: Any) -> list[int]:
    """Device ids in order.

    Raises:
        ValueError: another form, ids that are not whole numbers from 0 up, an empty list, or an id given twice.
    """
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
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(RULE) from None
    return _read(tree.body)


def _read(node: ast.expr) -> list[Any]:
    """The ids of a sum of terms. A sum nests to the left, so that a loop is enough."""
    terms = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms.append(node.right)
        node = node.left
    ids: list[Any] = []
    for term in (node, *reversed(terms)):
        ids += _read_term(term)
        _check_number(len(ids))
    return ids


def _read_term(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_integer(item) for item in items]
        case ast.Call(func=ast.Name(id="list"), args=[ast.List() | ast.Tuple() as inner], keywords=[]):
            return _read_term(inner)
        case ast.Call(func=ast.Name(id="list"), args=[ast.Call() as inner], keywords=[]):
            return _read_range(inner)
        case ast.Call(func=ast.Name(id="range")):
            return _read_range(node)
        case _:
            raise ValueError(RULE)


def _read_range(node: ast.Call) -> list[int]:
    match node:
        case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]) if 1 <= len(arguments) <= 3:
            bounds = [_integer(argument) for argument in arguments]
        case _:
            raise ValueError(RULE)
    if len(bounds) == 3 and bounds[2] == 0:
        raise ValueError("the step of range() must not be 0")
    ids = range(*bounds)
    _check_number(max(0, -(-(ids.stop - ids.start) // ids.step)))
    return list(ids)


def _check_number(number: int) -> None:
    if number > MAX_DEVICES:
        raise ValueError(f"names {number} devices; at most {MAX_DEVICES} are allowed")


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError(RULE)
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as operand):
            return -_integer(operand)
        case _:
            raise ValueError(RULE)
