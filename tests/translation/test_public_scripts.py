"""verl's and SkyRL's published scripts: translated into runs that ``roll check`` passes, or refused with a true reason.

They are not part of this repository: the test reads the folder that ``PUBLIC_CONFIGS_DIR`` names (``verl/`` and
``skyrl/`` within it), where it is set.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.config.reading.errors import ConfigError
from roll.rewards.sandbox.client import Sandbox, Settings
from roll.translation.command import load
from roll.translation.reading import read_recording
from roll.translation.recording import REQUIRED, record
from tests.translation.conftest import QUICKSTART, Translate

FOLDER = os.environ.get("PUBLIC_CONFIGS_DIR")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="PUBLIC_CONFIGS_DIR names no folder of published scripts")

REASONS = {
    "files that are not there": "is not here: start where --config-path leads to it",
    "variables that are not set": "is a variable that is not set",
    "families that are not tested": "is tested with none of this family|moves the bias of the routers|"
    "is computed without its vision tower here",
    "programs of their own": "is a program of its own|names a program of its own|names code of theirs",
    "an algorithm without an equal": r"policy_loss_type = |advantage_estimator = ",
    "an engine over two nodes": "would span two nodes",
    "batches that do not divide": "do not divide into micro-batches of",
}
"""Why a script is refused."""
PAGE = (Path(__file__).parents[2] / "docs/translation.md").read_text(encoding="utf-8")
SCRIPTS, TRANSLATED = map(int, re.search(r"Of (\d+) scripts .*?(\d+) translate", PAGE, re.DOTALL).groups())  # type: ignore[union-attr]
"""The page's statement."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(Settings(require=REQUIRED))
    yield box
    box.close()


@pytest.mark.long
def test_published_scripts(translated: Translate, sandbox: Sandbox) -> None:
    assert FOLDER is not None
    scripts = sorted(script for project in ("verl", "skyrl") for script in (Path(FOLDER) / project).rglob("*.sh"))
    assert scripts
    done, refused, unexplained = 0, Counter[str](), []
    for script in scripts:
        try:
            load(translated(read_recording(record(script, sandbox=sandbox), script.name)), QUICKSTART)
            done += 1
        except ConfigError as error:
            reason = next((name for name, pattern in REASONS.items() if re.search(pattern, str(error))), None)
            if reason is None:
                unexplained.append(f"{script.name}: {error}")
            else:
                refused[reason] += 1
    assert unexplained == []
    counted = f"{done} of {len(scripts)} translate; refused: {dict(refused)}"
    if len(scripts) == SCRIPTS:
        assert done == TRANSLATED, counted
    assert done >= TRANSLATED / SCRIPTS * len(scripts), counted
