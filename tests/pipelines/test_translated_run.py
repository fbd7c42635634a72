"""Translated launches run as they are: what `roll translate --yaml` writes is started like any recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from roll.cli import main
from tests.support.tiny_runs import FinishedRun, TinyWorld

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 3
LAUNCH = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
  data.train_files={folder}/train.parquet data.val_files={folder}/train.parquet \\
  data.max_prompt_length=96 data.max_response_length=24 data.train_batch_size=4 data.shuffle=False \\
  actor_rollout_ref.model.path={student} actor_rollout_ref.actor.optim.lr=3e-3 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
  actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4 \\
  distillation.enabled=True distillation.teacher_model.model_path={teacher} \\
  distillation.n_gpus_per_node=0 distillation.nnodes=0 \\
  distillation.distillation_loss.use_task_rewards=False {form} \\
  trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.total_training_steps={steps} trainer.logger='[console,file]' \\
  trainer.save_freq=-1 trainer.test_freq=-1 trainer.val_before_train=False trainer.resume_mode=disable
"""
LOSS = "distillation.distillation_loss"


@pytest.fixture
def translated_run(
    world: TinyWorld,
    shared_ray: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], FinishedRun]:
    """A run of verl's columns and keys, with a teacher on the trainer's devices and ``form``: keys of the loss."""

    def run(form: str) -> FinishedRun:
        published = [
            {
                "data_source": "openai/gsm8k",
                "prompt": row["messages"],
                "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
            }
            for row in map(json.loads, world.train.open())
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(published), tmp_path / "train.parquet")
        script, recipe = tmp_path / "launch.sh", tmp_path / "translated.yaml"
        places = {"folder": tmp_path, "student": world.model, "teacher": world.teacher}
        script.write_text(LAUNCH.format(**places, form=form, steps=STEPS))
        assert main(["translate", "--quiet", "--yaml", str(script)]) == 0
        recipe.write_text(capsys.readouterr().out)
        monkeypatch.setenv("RAY_ADDRESS", shared_ray)
        assert main(["run", str(recipe), f"output_dir={tmp_path}", f"logging_dir={tmp_path}/logs"]) == 0
        return FinishedRun(tmp_path)

    return run


def test_distillation_as_an_advantage(translated_run: Callable[[str], FinishedRun]) -> None:
    """On policy, the loss is the estimated KL from the teacher, and equal rewards give no warning."""
    done = translated_run(f"{LOSS}.loss_mode=k1 {LOSS}.use_policy_gradient=True")
    assert done.values("actor/pg_loss") == pytest.approx(done.values("opd/teacher/kl"), rel=1e-5)
    assert done.values("opd/teacher/kl")[0] > 0.1 and len(done.steps) == STEPS
    assert "got the score 0" not in (done.logs / "run.log").read_text()
