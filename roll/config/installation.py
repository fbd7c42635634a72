"""Installed packages: the command that adds an optional one to this installation, and names that packages offer.

A package declares its names as entry points:

    [project.entry-points."roll.rewards"]
    right_sum = "my_package.rewards:right_sum"

and a configuration writes ``worker_cls: right_sum`` as if the name were built in. A name stands for the dotted path of
what it leads to, so whatever takes such a path takes the name; of ``roll.strategies`` it leads to the description of a
backend, which has its names. Built-in names win.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

NAME = "roll-rl"


@cache
def install_command(extra: str) -> str:
    """``pip install`` of an extra, from where this installation came, as pip records it in ``direct_url.json`` (PEP
    610): a clone, a wheel, or the package index."""
    records = (found.read_text("direct_url.json") for found in distributions(name=NAME))
    record = next((json.loads(text) for text in records if text), None)
    clone = Path(__file__).resolve().parents[2]
    if record is None and (clone / "setup.py").is_file():
        record = {"dir_info": {"editable": True}, "url": clone.as_uri()}
    place = unquote(urlsplit((record or {}).get("url", "")).path)
    is_editable = (record or {}).get("dir_info", {}).get("editable", False)
    source = "." if place and Path(place) == Path.cwd() else place or NAME
    return f"pip install {'-e ' if is_editable else ''}{shlex.quote(f'{source}[{extra}]')}"


Group = Literal["rewards", "environments", "agents", "losses", "estimators", "pipelines", "trackers", "strategies"]


@cache
def offered(group: Group) -> Mapping[str, str]:
    """Dotted paths by name, of all installed packages. Raises ``ValueError``: two packages offer the same name."""
    found: dict[str, str] = {}
    for entry in entry_points(group=f"roll.{group}"):
        path = entry.value.replace(":", ".")
        if found.setdefault(entry.name, path) != path:
            raise ValueError(f"{entry.name!r} is offered twice in roll.{group}: {found[entry.name]} and {path}")
    return found


def dotted_path(group: Group, name: str) -> str:
    """The path of an offered name; any other name as it is."""
    return offered(group).get(name, name)
