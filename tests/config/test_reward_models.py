"""Keys of the rm pipeline, and of a run whose reward is one of its models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.methods.preferences_keys import DPOConfig
from roll.methods.reward_model_keys import RMConfig
from roll.methods.supervised import SupervisedPlan
from tests.config.good import GOOD_RM, changed, load, mistakes


def test_a_section_reward_train_makes_it_an_rm_run(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD_RM)
    assert loaded.pipeline.name == "rm" and isinstance(loaded.config, RMConfig)
    assert isinstance(loaded.plan, SupervisedPlan) and loaded.plan.global_batch_size == 16
    assert load(tmp_path, GOOD_RM | {"loss_type": "regression"}).pipeline.name == "rm", "loss_type is DPO's key as well"


@pytest.mark.parametrize("asked", ["chat", "tokens"])
def test_a_run_asks_about_the_tokens_that_were_trained(tmp_path: Path, asked: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_labels": 1, "score_input": "tokens"}))
    scorer = {
        "device_mapping": [0, 1],
        "strategy_args": {"strategy_name": "hf_infer"},
        "model_args": {"model_name_or_path": str(model), "model_type": "auto_sequence_classification"},
    }
    reward = {"worker_cls": "reward_model", "reward_kwargs": {"input": asked}}
    data = changed({"reward_model": scorer, "rewards": {"preference": reward}})
    if asked == "tokens":
        assert "reward_model" in load(tmp_path, data).plan.roles
        return
    (problem,) = mistakes(tmp_path, data)
    assert problem.key == "rewards.preference.reward_kwargs.input" and "must be tokens" in problem.rule


def test_kto_reads_single_responses(tmp_path: Path) -> None:
    role = GOOD_RM["reward_train"] | {"model_args": {}}
    data = {"pretrain": "owner/model", "max_steps": 10, "loss_type": "kto", "actor_train": role}
    data["reference"] = {"device_mapping": [0, 1], "strategy_args": {"strategy_name": "fsdp2_infer"}}
    loaded = load(tmp_path, data)
    assert isinstance(loaded.config, DPOConfig) and loaded.plan.needs_reference
    (problem,) = mistakes(tmp_path, data | {"loss_type": ["kto", "sft"]})
    assert problem.key == "loss_type" and "cannot be combined" in problem.rule
