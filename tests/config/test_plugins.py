"""Names of an installed package: the template under examples/plugin, installed by pip into a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.good import changed, write_rows
from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.support.tiny_runs import agentic_settings, make_world, rlvr_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "examples/plugin", folder / "source")
    quiet = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "site"


def roll(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "HOME": str(folder)}
    command = [sys.executable, "-m", "roll.cli", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


NAMES = {
    "rewards.math.worker_cls": "right_sum",
    "estimator": "centred",
    "track_with": ["jsonl", "csv"],
    "tracker_kwargs": {"csv": {"file_name": "numbers.csv"}},
    "loss": {"name": "reinforce_clipped", "bound": 5},
    "actor_infer.strategy_args": {"strategy_name": "noisy", "strategy_config": {"noise": 1.0}},
}


@pytest.mark.long
def test_names_of_a_package_are_names_of_the_configuration(site: Path, tmp_path: Path) -> None:
    write_rows(tmp_path)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(changed(NAMES)))
    done = roll(site, tmp_path, "check", "good.yaml", "--skip-files")
    assert done.returncode == 0, done.stderr
    wrong_option = {**NAMES, "tracker_kwargs": {"csv": {"file": "numbers.csv"}}}
    (tmp_path / "option.yaml").write_text(yaml.safe_dump(changed(wrong_option)))
    done = roll(site, tmp_path, "check", "option.yaml", "--skip-files")
    assert done.returncode == 2 and "CsvTracker, which take file_name" in done.stderr, done.stderr
    wrong_option = {**NAMES, "actor_infer.strategy_args.strategy_config": {"nois": 1.0}}
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(changed(wrong_option)))
    done = roll(site, tmp_path, "check", "engine.yaml", "--skip-files")
    assert done.returncode == 2 and "nois" in done.stderr and "noise" in done.stderr, done.stderr
    wrong = {"loss": {"name": "reinforce_clipped", "bond": 5}, "rewards.math.worker_cls": "right_sun"}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(changed(wrong)))
    done = roll(site, tmp_path, "check", "wrong.yaml", "--skip-files")
    assert done.returncode == 2
    assert "right_sun" in done.stderr and "right_sum" in done.stderr, done.stderr


@pytest.mark.long
def test_without_the_package_they_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(changed({"estimator": "centred"})))
    done = roll(tmp_path, tmp_path, "check", "good.yaml", "--skip-files")
    assert done.returncode == 2 and "estimator = 'centred'" in done.stderr


@pytest.mark.long
@pytest.mark.e2e
def test_they_train(site: Path, tiny: Any, tmp_path: Path) -> None:  # noqa: F811
    world = make_world(tiny, tmp_path)
    names = {key.replace("rewards.math", "rewards.digits"): value for key, value in NAMES.items()}
    settings = changed({**names, "max_steps": 1}, rlvr_settings(world, tmp_path / "out"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    done = roll(site, tmp_path, "run", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = (tmp_path / "out/logs/metrics.jsonl").read_text()
    step = next(row for row in map(json.loads, metrics.splitlines()) if "actor/weight" in row)
    assert step["actor/train_infer_log_diff_abs_mean"] > 0.1, "the package's engine"
    assert ",actor/weight," in (tmp_path / "out/logs/numbers.csv").read_text()
    assert "actor/weight" in metrics and "reward/digits/lines" in metrics
    game = {"custom_envs.game.env_type": "parity", "custom_envs.game.env_config": {}, "max_steps": 1}
    (tmp_path / "play.yaml").write_text(yaml.safe_dump(changed(game, agentic_settings(world, tmp_path / "played"))))
    done = roll(site, tmp_path, "run", "play.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_strategy_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    information = tmp_path / "broken-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[roll.strategies]\nquick = no_such_module:BACKEND\n")
    command = [sys.executable, "-c", "import roll.config.strategies.registry"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode and "roll.strategies 'quick' cannot be imported from no_such_module.BACKEND" in done.stderr
