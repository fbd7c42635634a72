"""Reinforcement-learning post-training of language models, driven by YAML.

The Python interface (:mod:`roll.api`, :mod:`roll.clients`) is imported when one of its names is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_API = dict.fromkeys(("Check", "Run", "check", "load_config", "run"), "roll.api")
_API |= dict.fromkeys(("EngineClient", "TrainClient"), "roll.clients.models") | {"Workers": "roll.clients.workers"}
_API |= {"ConfigError": "roll.config.reading.errors", "SamplingParams": "roll.strategies.engines.requests"}
_API |= dict.fromkeys(("STOP", "Callback"), "roll.tracking.callbacks")
"""Module of each name of the Python interface; ``__init__.pyi`` has their types."""


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_API[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])


class _NoSuchModule(MetaPathFinder):
    """The last finder: an import of a module that is not here names the page for Python code written for ROLL."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """
        Raises:
            ModuleNotFoundError: a module below ``roll`` that no finder before this one knows.
        """
        if fullname.startswith(f"{__name__}."):
            text = (
                f"No module named {fullname!r}. Files written for ROLL load here; Python code written for it does not, "
            )
            text += "and docs/migration.md (Code written for ROLL) says what each of its classes becomes"
            raise ModuleNotFoundError(text, name=fullname)
        return None


sys.meta_path.append(_NoSuchModule())
