"""The loops of examples/by_hand give the numbers of the pipelines that they write out."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import roll
from roll.config.loader import copy_recipes
from roll.tracking import METRICS_NAME, read_metrics
from tests.examples.pages import ROOT
from tests.support.tiny_runs import let_go_of_process

STEPS = 3
RECIPES = {
    "grpo": "tiny/rlvr_config",
    "dpo": "tiny_dpo/dpo_config",
    "ppo": "tiny/ppo_config",
    "opd": "tiny_distill/opd_config",
}
COMPARED = {
    "grpo": {"critic/score/mean", "actor/total_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr"},
    "dpo": {"actor/loss", "actor/acc", "actor/grad_norm", "actor/lr"},
    "ppo": {"critic/score/mean", "actor/total_loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"},
    "opd": {"opd/kl", "actor/total_loss", "actor/grad_norm"},
}
SHARED = [f"max_steps={STEPS}", "eval_steps=0", "memory_steps=0", "logging_steps=1"]
SAMPLED = [
    # An untrained model says no answer, and hardly ever its end token.
    "rewards.word_problems.worker_cls=tests.pipelines.rewards.digit_share",
    "rewards.word_problems.reward_kwargs=null",
    f"+actor_infer.generating_args.stop_token_ids={list(range(0, 400, 8))}",
]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes and their data; untrained models take the place of those after a warm start."""
    folder = tmp_path_factory.mktemp("recipes")
    copy_recipes(folder)
    prepare = [sys.executable, str(folder / "examples/tiny/prepare.py"), "--seeds", "0", "1"]
    subprocess.run(prepare, check=True, capture_output=True)
    untrained = folder / "examples/tiny/artifacts/seed0/init"
    (untrained.parent / "warm_start").mkdir()
    (untrained.parent / "warm_start/model").symlink_to(untrained)
    os.utime(untrained)
    subprocess.run([sys.executable, folder / "examples/tiny_dpo/prepare.py"], check=True, cwd=folder)
    return folder


@pytest.fixture
def own_handlers() -> Iterator[None]:
    yield
    let_go_of_process()


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.usefixtures("own_handlers")
@pytest.mark.default_rows("grpo")
@pytest.mark.parametrize("name", list(RECIPES))
def test_numbers_are_those_of_the_pipeline(
    name: str, recipes: Path, shared_ray: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: everything that the loop logs."""
    monkeypatch.chdir(recipes)
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    monkeypatch.syspath_prepend(str(recipes / "examples/by_hand"))
    models = [recipes / f"examples/tiny/artifacts/seed{seed}/init" for seed in (0, 1)]
    # The shared Ray has another working directory.
    words = [*SHARED, *([] if name == "dpo" else SAMPLED), f"pretrain={models[0]}"]
    words += [f"teacher.model_args.model_name_or_path={models[1]}"] if name == "opd" else []
    run = roll.run(RECIPES[name], [*words, f"output_dir={tmp_path / 'pipeline'}"])
    importlib.import_module(name).main([*words, f"output_dir={tmp_path / 'by_hand'}"])
    rows = read_metrics(tmp_path / "by_hand/logs" / METRICS_NAME)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row, wanted in zip(rows, run.metrics, strict=True):
        assert set(row) > COMPARED[name]
        assert {key: wanted.get(key) for key in row if key != "time"} == {k: v for k, v in row.items() if k != "time"}
    assert len({row["actor/grad_norm"] for row in rows}) == STEPS
    assert min(row["actor/grad_norm"] for row in rows) > 0


def test_each_fits_on_a_page() -> None:
    files = sorted((ROOT / "examples/by_hand").glob("*.py"))
    assert [file.stem for file in files] == sorted(RECIPES)
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 150 for file in files)
