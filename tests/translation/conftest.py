"""Shared parts of the tests of the translation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from roll.config.loader import load_config
from roll.pipelines.rlvr.config import RLVRConfig
from roll.translation.engine import DIALECTS, Translation, dialect_of, translate
from roll.translation.reading import Source, read_text

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/gsm8k/rlvr_config.yaml"
Translate = Callable[..., Translation]


@pytest.fixture(scope="session")
def translated() -> Translate:
    """Translate a text (or what was read already) as changes to the quickstart, or as the whole run that it is."""
    recipe = load_config(RLVRConfig, QUICKSTART, check_files=False)

    def run(given: str | Source, dialect: str | None = None, train_rows: int | None = None) -> Translation:
        source = read_text(given) if isinstance(given, str) else given
        return translate(source, DIALECTS[dialect] if dialect else dialect_of(source), recipe, train_rows)

    return run
