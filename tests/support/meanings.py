"""Values of loaded configurations by their paths, as tables of tests write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from roll.config.loader import LoadedConfig
from roll.config.strategies.registry import typed_strategy_config


def plain(value: Any) -> Any:
    """As YAML would have it: a dataclass by its fields that differ from their defaults."""
    if is_dataclass(value):
        shown = {}
        for item in fields(value):
            own = getattr(value, item.name)
            made = item.default if item.default_factory is MISSING else item.default_factory()
            if made is MISSING or own != made:
                shown[item.name] = plain(own)
        return shown
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def at(node: Any, path: str) -> Any:
    """``config.loss.name``, ``roles[rewards.math].world_size``; a method is called."""
    for bracketed, name in re.findall(r"\[([^]]+)]|([^.\[\]]+)", path):
        if isinstance(node, Mapping):
            node = node[bracketed or name]
        elif isinstance(node, list | tuple):
            node = node[int(bracketed)]
        else:
            node = getattr(node, name)
        node = node() if callable(node) and not is_dataclass(node) else node
    return node


def meaning(loaded: LoadedConfig[Any]) -> dict[str, Any]:
    """What the paths of the table begin with."""
    roles = loaded.plan.roles
    options = {name: typed_strategy_config(role.section.strategy_args) for name, role in roles.items()}
    plan = {"plan": loaded.plan, "roles": roles, "names": list(roles)}
    return plan | {"config": loaded.config, "options": options, "loaded": loaded}
