"""verl's and SkyRL's published scripts: translated into runs that ``roll check`` passes, or refused with a true reason.

They are not part of this repository: the test reads the folder that ``PUBLIC_CONFIGS_DIR`` names (``verl/`` and
``skyrl/`` within it), where it is set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.config.reading.errors import ConfigError
from roll.rewards.sandbox import Sandbox, Settings
from roll.translation.command import load
from roll.translation.reading import read_recording
from roll.translation.recording import REQUIRED, record
from roll.translation.tables import EXPERTS, MULTIMODAL, TURNS
from tests.translation.conftest import QUICKSTART, Translate

FOLDER = os.environ.get("PUBLIC_CONFIGS_DIR")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="PUBLIC_CONFIGS_DIR names no folder of published scripts")

FAMILIES = {
    "experts": EXPERTS,
    "images, video, audio": f"{MULTIMODAL}|the language part of a model of images|simulated worlds",
    "turns, tools, agents": TURNS,
    "programs of their own": "is a program of its own|names a program of its own|belongs to ArcticRL's own program",
}
"""What is not supported as a whole."""
OTHERS = {
    "an algorithm without an equal": r"policy_loss_type = |advantage_estimator = |rollout_rs = ",
    "engines on other hosts": "engines on other hosts are not available",
    "an engine over two nodes": "would span two nodes",
    "batches that do not divide": "do not divide into micro-batches of",
    "programs scored by a service": "scores come from a program service",
}
SHARE = 0.85
"""Of the scripts whose family is supported, so many are translated at least."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(Settings(require=REQUIRED))
    yield box
    box.close()


def test_published_scripts(translated: Translate, sandbox: Sandbox) -> None:
    assert FOLDER is not None
    scripts = sorted(script for project in ("verl", "skyrl") for script in (Path(FOLDER) / project).rglob("*.sh"))
    assert scripts
    done, by_family, unexplained = 0, 0, []
    for script in scripts:
        try:
            load(translated(read_recording(record(script, sandbox=sandbox), script.name)), QUICKSTART)
            done += 1
        except ConfigError as error:
            reason = str(error)
            if any(re.search(pattern, reason) for pattern in FAMILIES.values()):
                by_family += 1
            elif not any(re.search(pattern, reason) for pattern in OTHERS.values()):
                unexplained.append(f"{script.name}: {reason}")
    assert unexplained == []
    assert done >= SHARE * (len(scripts) - by_family), f"{done} of {len(scripts)}, {by_family} of other families"
