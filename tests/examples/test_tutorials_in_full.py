"""The tutorials as their readers run them, to the end: what they promise is learnt."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from roll.tracking import read_metrics
from tests.examples.page_commands import command_blocks
from tests.examples.pages import ROOT, named_files

pytestmark = [pytest.mark.matrix, pytest.mark.e2e, pytest.mark.timeout(3600)]
PAGE = ROOT / "docs/tutorials.md"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which somebody has run both examples, and written the page's files."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("examples", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("artifacts", "__pycache__"))
    for name, text in named_files(PAGE).items():
        (folder / name).write_text(text, encoding="utf-8")
    for script in ("start_rlvr_pipeline.py", "start_agentic_pipeline.py"):
        run(folder, f"{sys.executable} examples/{script}")
    return folder


def run(folder: Path, text: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-e", "-c", text], cwd=folder, env=environment, check=True)


@pytest.mark.parametrize(
    ("experiment", "metric", "gain"),
    [
        ("brief", "reward/word_problems/right", 0.2),
        ("corridor", "critic/score/mean", 0.2),
        ("gated", "critic/score/mean", 0.2),
    ],
)
def test_what_is_promised_is_learnt(reader: Path, experiment: str, metric: str, gain: float) -> None:
    (block,) = [one for one in command_blocks(PAGE) if "roll run" in one.text and experiment in one.text]
    run(reader, block.text)
    (file,) = reader.glob(f"output/{experiment}/**/metrics.jsonl")
    values = [row[metric] for row in read_metrics(file) if metric in row]
    assert fmean(values[-5:]) > fmean(values[:5]) + gain, values
