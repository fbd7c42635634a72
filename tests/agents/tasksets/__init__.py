"""Tasksets of verifiers, and the interpreter that plays them: ``make install-verifiers``."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PYTHON = FOLDER.parents[2] / ".venv-verifiers" / "bin" / "python"
needs_verifiers = pytest.mark.skipif(not PYTHON.exists(), reason="verifiers is not installed: make install-verifiers")
