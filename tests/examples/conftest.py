"""What the tests of recipes and documentation run on."""

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
