"""``roll sweep``: every combination is a run in a folder of its own, and the last line names the best."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll import cli
from roll.config.reading.errors import ConfigError
from roll.sweep import Sweep, split
from roll.tracking import read_metrics
from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.support.tiny_runs import make_world, rlvr_settings

ROOT = Path(__file__).parents[1]


def test_keys_with_several_values_are_the_space() -> None:
    space, fixed = split(["a.lr=1e-6,3e-6", "b=[1,2]", "c=range(1,3)", "d=x"])
    assert space == {"a.lr": ["1e-06", "3e-06"], "c": ["1", "2"]} and fixed == ["b=[1,2]", "d=x"]
    words = Sweep("x.yaml", ("d=x",), "/out", "loss").words({"a.lr": "1e-06", "c": "a/b"})
    folder = "/out/lr=1e-06,c=a_b"
    assert words == ["d=x", "a.lr=1e-06", "c=a/b", f"output_dir={folder}", f"logging_dir={folder}/logs"]
    with pytest.raises(ConfigError, match="no key has several values"):
        split(["d=x"])


def test_a_mistake_in_one_combination_is_found_before_any_run(
    tiny: Any,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(rlvr_settings(make_world(tiny, tmp_path), tmp_path / "out")))
    assert cli.main(["sweep", str(path), "adv_estimator=grpo,gpro"]) == cli.EXIT_CONFIG
    assert "gpro" in capsys.readouterr().err and not (tmp_path / "out-sweep").exists()


@pytest.mark.long
@pytest.mark.e2e
def test_the_best_of_two_runs(tiny: Any, tmp_path: Path) -> None:  # noqa: F811
    settings = rlvr_settings(make_world(tiny, tmp_path), tmp_path / "out") | {"max_steps": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    words = [
        "sweep",
        "run.yaml",
        "--metric",
        "actor/lr",
        "actor_train.training_args.learning_rate=1e-4,1e-3",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "roll.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["trials"], said["failed"]) == (2, 0), done.stdout + done.stderr
    best = said["best"]
    assert best["overrides"]["actor_train.training_args.learning_rate"] == "0.001" and best["metric"] == "actor/lr"
    folders = sorted(path.parent.parent for path in (tmp_path / "out-sweep").glob("*/logs/metrics.jsonl"))
    assert len(folders) == 2 and Path(best["output_dir"]) in folders
    assert read_metrics(Path(best["output_dir"]) / "logs/metrics.jsonl")[0]["actor/lr"] == best["value"]
