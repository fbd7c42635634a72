"""``examples/training_backends``: every script is the quickstart with the override that its README says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.compose import parse_launcher_args

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/training_backends"
SCRIPTS = sorted(str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.sh"))
ROW = re.compile(r"^\| `(\S+\.sh)` \|.*\| `examples/gsm8k/run_gsm8k\.sh (.*)` \|$", re.MULTILINE)
WRITTEN_OUT = {script: shlex.split(words) for script, words in ROW.findall((FOLDER / "README.md").read_text("utf-8"))}
OWN = ("actor_train.data_args.file_name=[mine.jsonl]", "max_steps=3")
"""A user's overrides, which also spare the script the search for GSM8K."""


def launched(recorder: Path, script: Path, *overrides: str) -> LoadedConfig[Any]:
    """The configuration that a script would run."""
    environment = {**os.environ, "PYTHON": str(recorder)}
    done = subprocess.run([script, *overrides], env=environment, capture_output=True, text=True, check=True)
    launcher, *arguments = done.stdout.splitlines()
    assert launcher == "examples/start_rlvr_pipeline.py"
    found = parse_launcher_args(arguments, "tiny", "rlvr_config")
    return load_config(None, found.config_path, found.config_name, found.overrides, check_files=False)


def test_the_table_has_every_script() -> None:
    assert sorted(WRITTEN_OUT) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_the_quickstart_with_its_override(script: str, recorder: Path) -> None:
    ours = launched(recorder, FOLDER / script, *OWN)
    theirs = launched(recorder, ROOT / "examples/gsm8k/run_gsm8k.sh", *WRITTEN_OUT[script], *OWN)
    assert ours.resolved == theirs.resolved
    assert ours.config == theirs.config
    assert ours.config.max_steps == 3


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "/" in script])
def test_a_backend_s_script_trains_under_it(script: str, recorder: Path) -> None:
    backend = Path(script).stem.removeprefix("run_")
    loaded = launched(recorder, FOLDER / script, *OWN)
    assert loaded.plan.roles["actor_train"].strategy_name == f"{backend}_train"


def test_no_two_scripts_share_a_folder_from_which_they_resume(recorder: Path) -> None:
    runs = [launched(recorder, FOLDER / script, *OWN) for script in SCRIPTS]
    runs.append(launched(recorder, ROOT / "examples/gsm8k/run_gsm8k.sh", *OWN))
    assert all(run.config.resume_from_checkpoint for run in runs)
    assert len({run.plan.checkpoint_dir for run in runs}) == len(runs)
