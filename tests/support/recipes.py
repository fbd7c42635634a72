"""Configurations of the repository, each loaded once in a process: composing one takes longer than most looks at it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from roll.config.loader import LoadedConfig, load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@cache
def loaded(recipe: Path) -> LoadedConfig[Any]:
    """A recipe by its absolute path, without a look at the files that it names."""
    return load_config(None, recipe, check_files=False)
