"""Fixtures of the tests of recipes and documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny example's model, untrained; made by its own script."""
    folder = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, ROOT / "examples/tiny/prepare.py", "--output", folder, "--seeds", "0"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "seed0" / "init"


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A program in Python's place that writes down its arguments, one a line."""
    program = tmp_path / "record"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program
