"""Names that installed packages offer. A package declares them as entry points:

    [project.entry-points."roll.rewards"]
    right_sum = "my_package.rewards:right_sum"

and a configuration writes ``worker_cls: right_sum`` as if the name were built in. A name stands for the dotted path of
what it leads to, so whatever takes such a path takes the name; of ``roll.strategies`` it leads to the description of a
backend, which has its names. Built-in names win.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Literal

Group = Literal["rewards", "environments", "agents", "losses", "estimators", "pipelines", "trackers", "strategies"]


@cache
def offered(group: Group) -> Mapping[str, str]:
    """Dotted paths by name, of all installed packages.

    Raises:
        ValueError: two packages offer the same name.
    """
    found: dict[str, str] = {}
    for entry in entry_points(group=f"roll.{group}"):
        path = entry.value.replace(":", ".")
        if found.setdefault(entry.name, path) != path:
            raise ValueError(f"{entry.name!r} is offered twice in roll.{group}: {found[entry.name]} and {path}")
    return found


def dotted_path(group: Group, name: str) -> str:
    """The path of an offered name; any other name as it is."""
    return offered(group).get(name, name)
