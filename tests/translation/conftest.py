"""Shared parts of the tests of the translation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.config.loader import LoadedConfig, load_composed, load_config
from roll.config.reading.compose import Composed
from roll.config.reading.errors import Problems
from roll.config.reading.yaml_files import SourceFile
from roll.pipelines.rlvr.config import RLVRConfig
from roll.translation.command import load, tree
from roll.translation.engine import DIALECTS, Translation, dialect_of, translate
from roll.translation.reading import Source, read_text

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/gsm8k/rlvr_config.yaml"
Translate = Callable[..., Translation]


@pytest.fixture(scope="session")
def translated() -> Translate:
    """Translate a text (or what was read already) as changes to the quickstart, or as the whole run that it is."""
    recipe = load_config(RLVRConfig, QUICKSTART, check_files=False)
    done: dict[tuple[str, str | None, int | None], Translation] = {}

    def run(given: str | Source, dialect: str | None = None, train_rows: int | None = None) -> Translation:
        key = (given, dialect, train_rows) if isinstance(given, str) and "--config" not in given else None
        if key is None or key not in done:  # what files say may change
            source = read_text(given) if isinstance(given, str) else given
            found = translate(source, DIALECTS[dialect] if dialect else dialect_of(source), recipe, train_rows)
            if key is None:
                return found
            done[key] = found
        return done[key]

    return run


def run_of(translation: Translation) -> LoadedConfig[Any]:
    """As :func:`roll.translation.command.load`: of a whole run without the file in between, which takes ten times as
    long."""
    if not translation.whole or "${" in str(translation.keys):
        return load(translation, QUICKSTART)
    composed = Composed(tree(translation), SourceFile(Path("translated.yaml")))
    return load_composed(None, composed, Problems(), check_files=False)
