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
from tests.support.recipes import EXAMPLES

FOLDER = EXAMPLES / "training_backends"
QUICKSTART = EXAMPLES / "gsm8k/run_gsm8k.sh"
ROW = re.compile(r"^\| `(\S+\.sh)` \|.*\| `examples/gsm8k/run_gsm8k\.sh (.*)` \|$", re.MULTILINE)
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


@pytest.mark.long
def test_a_script_is_the_quickstart_with_its_override_and_a_folder_of_its_own(recorder: Path) -> None:
    written = {script: shlex.split(words) for script, words in ROW.findall((FOLDER / "README.md").read_text("utf-8"))}
    assert sorted(written) == sorted(str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.sh"))
    folders = {launched(recorder, QUICKSTART, *OWN).plan.checkpoint_dir}
    for script, words in written.items():
        ours = launched(recorder, FOLDER / script, *OWN)
        theirs = launched(recorder, QUICKSTART, *words, *OWN)
        assert ours.resolved == theirs.resolved and ours.config == theirs.config, script
        assert ours.config.max_steps == 3 and ours.config.resume_from_checkpoint
        if "/" in script:
            backend = Path(script).stem.removeprefix("run_")
            assert ours.plan.roles["actor_train"].strategy_name == f"{backend}_train"
        folders.add(ours.plan.checkpoint_dir)
    assert len(folders) == 1 + len(written), "no two share a folder from which they resume"
