"""Where the recipes are: the folders ``examples`` and ``configs`` of a clone, or the copy inside an installed wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from roll.config.errors import ConfigError, Problem

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE / "shipped"
"""Written by ``setup.py`` when a wheel is built; a clone has none."""
FOLDERS = ("examples", "configs")


def recipes_root() -> Path:
    """The folder that holds ``examples`` and ``configs``: the root of the clone, or ``roll/shipped`` of a wheel."""
    return SHIPPED if SHIPPED.is_dir() else PACKAGE.parent


def copy_recipes(target: Path) -> list[Path]:
    """Copy ``examples`` and ``configs`` into ``target``; existing files are never replaced.

    Returns:
        The folders that were written.

    Raises:
        ConfigError: ``target`` already has one of the folders.
    """
    root = recipes_root()
    present = [name for name in FOLDERS if (target / name).exists()]
    if present:
        rule = f"already holds {' and '.join(present)}, which are not replaced; choose another folder"
        raise ConfigError([Problem("(folder)", str(target), rule, "my_project")])
    ignored = shutil.ignore_patterns("__pycache__", "artifacts", "output")
    for name in FOLDERS:
        shutil.copytree(root / name, target / name, ignore=ignored)
    return [target / name for name in FOLDERS]
