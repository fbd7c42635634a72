"""A judge or a reward model of the run: what is asked of it, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config.rewards import judge_length
from roll.rewards import reward_options
from tests.config.good import changed, load, mistakes


def test_options_of_a_judge_come_from_its_section(tmp_path: Path) -> None:
    section: dict[str, Any] = {
        "worker_cls": "llm_judge",
        "tag_included": ["essay"],
        "judge_model_type": "inference",
        "device_mapping": [0, 1],
        "model_args": {"model_name_or_path": "judge/model"},
        "generating_args": {"max_new_tokens": 100, "temperature": 0.8, "top_p": 0.8, "top_k": 50, "num_beams": 1},
        "strategy_args": {"strategy_name": "hf_infer", "strategy_config": None},
    }
    options = reward_options("essays", load(tmp_path, changed({"rewards.essays": section})).config.rewards["essays"])[1]
    wanted = {"temperature": 0.8, "top_p": 0.8, "max_tokens": 100, "extra_body": {"top_k": 50}}
    assert {name: options[name] for name in wanted} == wanted
    own = changed({"rewards.essays": section | {"reward_kwargs": {"max_tokens": 7}}})
    assert reward_options("essays", load(tmp_path, own).config.rewards["essays"])[1]["max_tokens"] == 7


def test_room_for_a_question() -> None:
    assert judge_length(1000, None) == 4048
    assert judge_length(1000, 3000) == 3000


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
