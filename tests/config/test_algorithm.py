"""Algorithm keys against one another: what cannot teach anything is refused, or said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.corrections import CorrectionRule, correction_options
from tests.config.good import changed, load, mistakes

GROUP = "num_return_sequences_in_group"


@pytest.mark.parametrize(("k", "works"), [(4, 2), (7, 2), (3, None), (1, None)])
def test_pass_k_is_less_than_the_group(tmp_path: Path, k: int, works: int | None) -> None:
    """At the group's size there is one choice of k only: no response does better than another."""
    problems = mistakes(tmp_path, changed({"estimator": "pass@k", "pass_k": k}))
    if works is None:
        assert problems == ()
        return
    assert [problem.key for problem in problems] == ["pass_k"]
    text = str(problems[0])
    assert f"pass_k: {works}" in text and "must be less than num_return_sequences_in_group 4" in text
    assert mistakes(tmp_path, changed({"estimator": "pass@k", "pass_k": works})) == ()


ONE_SAMPLE = {
    "rollout_batch_size": 1,
    GROUP: 1,
    "actor_train.device_mapping": [0],
    "actor_train.training_args.per_device_train_batch_size": 1,
    "actor_train.training_args.gradient_accumulation_steps": 1,
}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"estimator": "reinforce", "norm_mean_type": "batch", **ONE_SAMPLE}, "norm_mean_type"),
        ({"estimator": "gdpo", "reward_weights": {"score": 0.0}}, "reward_weights"),
        (
            {"difficulty_mask": True, "difficulty_low_threshold": 0.5, "difficulty_high_threshold": 0.5},
            "difficulty_high_threshold",
        ),
    ],
)
def test_settings_that_make_every_advantage_zero_are_said(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    said = [notice for notice in load(tmp_path, changed(changes)).warnings if "nothing is learnt" in notice.text]
    assert [notice.key for notice in said] == [key]


@pytest.mark.parametrize(("key", "value"), [("temperature", 0), ("temperature", 0.0), ("do_sample", False)])
def test_a_policy_that_learns_is_sampled(tmp_path: Path, key: str, value: Any) -> None:
    changes = {f"actor_infer.generating_args.{key}": value}
    (problem,) = mistakes(tmp_path, changed(changes))
    assert problem.key == f"actor_infer.generating_args.{key}" and problem.example not in (None, value)


def test_the_filters_of_a_correction_are_sections_of_their_own(tmp_path: Path) -> None:
    filters = [{"agg_type": "sequence", "ratio_enabled": True, "ratio_high": 1.3}, {"enabled": False}]
    correction = {"is_weight": {"enabled": True, "upper_bound": "2e0"}, "filters": filters}
    loaded = load(tmp_path, changed({"train_infer_correction": correction}))
    rules = correction_options(loaded.config.train_infer_correction).rules
    weight, mask = CorrectionRule(high=2.0), CorrectionRule("sequence", "mask", "ratio", 0.8, 1.3)
    assert rules == (weight, mask)
