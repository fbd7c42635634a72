"""The shortest file that can be run: every other key is left to its default."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import roll
from tests.support.tiny_runs import HERE, TinyWorld

pytestmark = pytest.mark.e2e


@pytest.mark.long
@pytest.mark.usefixtures("run")
def test_it_learns(world: TinyWorld, tmp_path: Path, shared_ray: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten prompts of eight samples a step; the rate is that of a model of a hundred thousand weights."""
    text = f"""\
pretrain: {world.model}
rollout_batch_size: 10
prompt_length: 128
response_length: 12
max_steps: 25
output_dir: {tmp_path}
actor_train:
  training_args: {{learning_rate: 3.0e-3}}
  data_args: {{file_name: {world.train}}}
  strategy_args: {{strategy_name: fsdp2_train}}
actor_infer: {{strategy_args: {{strategy_name: hf_infer}}}}
rewards: {{digits: {{worker_cls: {HERE}.rewards.digit_share}}}}
"""
    monkeypatch.setenv("ROLL_PLATFORM", "cpu")
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    finished = roll.run(yaml.safe_load(text))
    scores = [row["critic/score/mean"] for row in finished.metrics]
    first, last = sum(scores[:5]) / 5, sum(scores[-5:]) / 5
    assert last > first + 0.2, scores
