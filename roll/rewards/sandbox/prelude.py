"""Names that programs use without importing them, because ROLL, verl and LiveCodeBench put these imports in front.

They are added to the built-in functions of the response's process, so that a program's own names go before them and
tests never see them: a response that defines no ``gcd`` is not judged by that of ``math``.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

MODULES = """
    string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json
"""
"""Imported, after all their public names have been, in this order; those of ``typing`` come last."""
_installed: list[str] = []
RECURSION_LIMIT = 50_000  # LiveCodeBench's; recursion through C functions fits into the stack this often


def public(module: ModuleType) -> dict[str, Any]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return {name: getattr(module, name) for name in names}


@functools.cache
def usual_names() -> dict[str, Any]:
    """Names and values that the imports bind, ``sys``'s own names aside: its streams are not open yet."""
    modules = {name: importlib.import_module(name) for name in MODULES.split()}
    found: dict[str, Any] = {}
    for name, module in modules.items():
        found |= {} if name == "sys" else public(module)
    return found | public(importlib.import_module("typing")) | modules


_STREAMS = ("stdin", "stdout", "stderr")


def install() -> None:
    """Add them to the built-in functions of this process and of those forked from it, which then pay nothing."""
    for name, value in {**public(sys), **usual_names()}.items():
        if name not in vars(builtins) and name not in _STREAMS:
            setattr(builtins, name, value)
            _installed.append(name)


def open_for_program() -> None:
    """Prepare the process that is about to run a program: its streams are open now."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    for name in _STREAMS:
        setattr(builtins, name, getattr(sys, name))


def remove() -> None:
    """Leave the tests' process with Python's own built-in functions."""
    for name in _installed:
        delattr(builtins, name)
    _installed.clear()
