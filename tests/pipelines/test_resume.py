"""A run that is interrupted and continued gives the numbers of a run that was not, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from roll.checkpoint.store import ObjectStore
from roll.distributed.guard import kill_tree
from tests.pipelines.conftest import Run
from tests.support.checkpoints import bucket  # noqa: F401  the fixture
from tests.support.subprocess_runs import Start
from tests.support.tiny_runs import (
    HERE,
    FinishedRun,
    TinyWorld,
    constant_rate,
    load_changed,
    rlvr_settings,
    role,
    training_args,
    untimed,
)

pytestmark = pytest.mark.e2e

PPO = {
    "max_steps": 4,
    "save_steps": 2,
    "estimator": "gae",
    "ppo_epochs": 2,
    "value_clip": 0.2,
    "dual_clip_loss": True,
    "whiten_advantages": True,
    "norm_mean_type": "running",
    "norm_std_type": "running",
    "add_token_level_kl": True,
    "init_kl_coef": 0.05,
    "target_kl": 0.01,
    "kl_horizon": 100,
    "actor_train.training_args": training_args(4, 2) | {"warmup_steps": 3, "save_hf_model": True},
    "actor_infer.device_mapping": [0],
    "reference": role("fsdp2_infer", [0]),
}
"""Everything that remembers something: critic, adaptive KL, running moments, two optimizers and their schedules."""


def later_steps(finished: FinishedRun, first: int) -> list[dict]:
    return [untimed(row) for row in finished.steps if row["step"] >= first]


def weights(finished: FinishedRun) -> bytes:
    return (finished.output / "model" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_ppo_with_everything_that_has_a_memory(run: Run) -> None:
    """Whether roles stay on the devices that they share or take turns on them."""
    changes = PPO | {"critic": role("fsdp2_train", [0], training_args=training_args(4, 2, 3e-3))}
    whole = run(changes)
    checkpoint = whole.output / "checkpoints" / "checkpoint-2"
    resumed = run(changes | {"resume_from_checkpoint": str(checkpoint), "is_offload_states": True})
    assert [row["step"] for row in resumed.steps] == [2, 3]
    assert later_steps(resumed, 2) == later_steps(whole, 2)
    assert weights(resumed) == weights(whole)
    for name in ("actor_train", "critic", "reference", "actor_infer"):
        assert all(row[f"time/{name}/offload/total"] > 0 for row in resumed.steps), name
    assert not any(key.endswith("/offload/total") for row in whole.steps for key in row)
    assert len(set(whole.values("critic/kl_coef"))) > 2, "the KL controller must have adapted"
    assert len(set(whole.values("critic/lr"))) > 2, "the critic's schedule must have moved"


def test_sft(run: Run, world: TinyWorld) -> None:
    changes = {
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 3,
        "sft_train.training_args": training_args(4, 2) | {"warmup_steps": 4, "save_hf_model": True},
        "validation": {"data_args": {"file_name": str(world.demonstrations), "messages": "messages"}},
    }
    whole = run(changes, pipeline="sft")
    checkpoint = whole.output / "checkpoints" / "checkpoint-2"
    resumed = run(changes | {"resume_from_checkpoint": str(checkpoint)}, pipeline="sft")
    assert later_steps(resumed, 2) == later_steps(whole, 2)
    assert weights(resumed) == weights(whole)
    losses = whole.values("sft_train/loss")
    assert losses[-1] < losses[0]


@pytest.mark.matrix  # what a store does: tests/checkpoint/test_store.py
@pytest.mark.parametrize("kind", ["file", "bucket"])
def test_a_run_whose_folder_is_gone_goes_on_from_the_store(
    request: pytest.FixtureRequest, start: Start, run: Run, world: TinyWorld, tmp_path: Path, kind: str
) -> None:
    """Killed after a checkpoint has been copied; nothing of its machine is left but the configuration."""
    url, options = (f"file://{tmp_path}/store", {}) if kind == "file" else request.getfixturevalue(kind)
    saved_model = constant_rate(training_args(8, 2)) | {"save_hf_model": True}
    plain = {"max_steps": 5, "save_steps": 2, "eval_steps": 0, "actor_train.training_args": saved_model}
    whole = run(plain, output=tmp_path / "whole")
    stored = plain | {
        "resume_from_checkpoint": True,
        "checkpoint_config": {"output_dir": url, "storage_options": options, "keep_local_file": False},
    }
    slow = {"max_steps": 100, "rewards.digits.worker_cls": f"{HERE}.rewards.slow_digit_share"}
    killed, store = tmp_path / "killed", ObjectStore(url, options)
    load_changed(rlvr_settings(world, killed), stored | slow)
    driver = start(killed / "input" / "config.yaml", killed)
    driver.wait_for(lambda: "checkpoint-2" in store.names())
    kill_tree(driver.process.pid)
    driver.process.communicate(timeout=60)
    shutil.rmtree(killed)
    # Which checkpoints the store holds by now depends on when the signal came.
    newest = max(int(name.removeprefix("checkpoint-")) for name in store.names())

    elsewhere = tmp_path / "elsewhere"
    resumed = run(stored | {"resume_from_checkpoint": f"{url}/checkpoint-2"}, output=elsewhere)
    assert [row["step"] for row in resumed.steps] == [2, 3, 4]
    assert list(map(untimed, resumed.steps)) == [untimed(row) for row in whole.steps if row["step"] >= 2]
    model = Path("model") / "model.safetensors"
    assert (elsewhere / model).read_bytes() == (whole.output / model).read_bytes()
    log = (elsewhere / "logs" / "run.log").read_text()
    assert f"continuing from {elsewhere / 'checkpoints' / 'checkpoint-2'}" in log
    assert {"checkpoint-2", "checkpoint-4"} <= set(store.names())
    assert newest == 2 or f"superseded-checkpoint-{newest}" in store.names()
