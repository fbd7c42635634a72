"""Arguments of a generation engine that a file passes through (``strategy_config.engine_args``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.config.errors import Problems


def check_engine_args(path: str, options: Any, decided: Mapping[str, str], problems: Problems) -> None:
    """Report arguments that have a key of their own, and those that the strategy fills in.

    Args:
        path: of the role's ``strategy_config``.
        options: the dataclass of these options, with ``engine_args``.
        decided: arguments that the strategy fills in, and what decides about them.
    """
    own = {item.name for item in fields(options)}
    for key, value in options.engine_args.items():
        if key in own:
            problems.add(f"{path}.engine_args.{key}", value, f"has a key of its own: write {path}.{key}")
        elif key in decided:
            problems.add(f"{path}.engine_args.{key}", value, f"is not yours to set: {decided[key]} decides")
