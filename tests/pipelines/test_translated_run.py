"""Translated launches run as they are: what `roll translate --yaml` writes is started like any recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from roll.cli import main
from tests.pipelines.tiny_runs import FinishedRun, TinyWorld

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


def translated_run(
    form: str, world: TinyWorld, folder: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, ray: str
) -> FinishedRun:
    """A launch with verl's columns and keys, and a teacher on the trainer's devices."""
    rows = [json.loads(line) for line in world.train.open()]
    published = [
        {
            "data_source": "openai/gsm8k",
            "prompt": row["messages"],
            "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
        }
        for row in rows
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(published), folder / "train.parquet")
    script = folder / "launch.sh"
    script.write_text(LAUNCH.format(folder=folder, student=world.model, teacher=world.teacher, form=form, steps=STEPS))
    assert main(["translate", "--quiet", "--yaml", str(script)]) == 0
    recipe = folder / "translated.yaml"
    recipe.write_text(capsys.readouterr().out)
    patch.setenv("RAY_ADDRESS", ray)
    assert main(["run", str(recipe), f"output_dir={folder}", f"logging_dir={folder}/logs"]) == 0
    return FinishedRun(folder)


def test_distillation_as_an_advantage(
    world: TinyWorld,
    shared_ray: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On policy, the loss is the estimated KL from the teacher; nobody is told to look after rewards."""
    form = f"{LOSS}.loss_mode=k1 {LOSS}.use_policy_gradient=True"
    done = translated_run(form, world, tmp_path, capsys, monkeypatch, shared_ray)
    assert done.values("actor/pg_loss") == pytest.approx(done.values("opd/teacher/kl"), rel=1e-5)
    assert done.values("opd/teacher/kl")[0] > 0.1 and len(done.steps) == STEPS
    assert "got the score 0" not in (done.logs / "run.log").read_text()


def test_distillation_of_the_most_probable_tokens(
    world: TinyWorld,
    shared_ray: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The divergence falls from step to step."""
    form = f"{LOSS}.loss_mode=forward_kl_topk {LOSS}.topk=8"
    found = translated_run(form, world, tmp_path, capsys, monkeypatch, shared_ray).values("actor/opd_loss")
    assert len(found) == STEPS and found[2] < found[1] < found[0]
