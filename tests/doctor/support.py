"""Trials that go wrong."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest


def module_of(text: str, name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """A module of this text, here and in the processes of trials."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)
