"""Between scores and update: samples that could not be scored must leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.config.rlvr import RLVRConfig
from roll.pipelines.rlvr.scoring import Scoring
from roll.protocol import DataProto
from roll.rollout.batch import build_batch
from tests.rollout.helpers import make_group

COLUMNS = ("loss_mask", "response_level_rewards", "token_level_rewards", "advantages", "returns")


def scored_batch(with_failures: bool) -> DataProto:
    """Two groups of a domain and one of another; the failures, where there are any, stand in the middle."""
    middle = [None, None] if with_failures else []
    groups = [
        make_group(0, [1, 2], [[3, 4, 5], *([[6, 7, 8]] * len(middle)), [9]], [1.0, *middle, 0.25]),
        make_group(1, [1], [[4, 4], [5, 5], [6, 6]], [0.0, 0.5, 1.0]),
        make_group(2, [1], [[4, 4], [5, 5, 5]], [3.0, 7.0], domain="other"),
    ]
    batch = build_batch(groups, pad_token_id=0)
    generator = torch.Generator().manual_seed(0)
    by_token = torch.rand(20, generator=generator)
    for name, shift in (("old_log_probs", 0), ("ref_log_probs", 3), ("values", 5)):
        column = -by_token[(batch.batch["input_ids"] + shift) % 20]
        batch.batch[name] = torch.where(batch.batch["response_mask"], column, 0.0)
    return batch


@pytest.mark.parametrize(
    "settings",
    [
        {"adv_estimator": "grpo"},
        {"adv_estimator": "rloo"},
        {"adv_estimator": "gae", "add_token_level_kl": True, "whiten_advantages": True},
        {"adv_estimator": "reinforce++", "add_token_level_kl": True, "target_kl": 0.1},
        {"adv_estimator": "reinforce", "norm_mean_type": "running", "norm_std_type": "running"},
        {"adv_estimator": "grpo", "difficulty_mask": True, "difficulty_loss_weight": True, "length_loss_weight": True},
    ],
    ids=lambda settings: " ".join(settings)[14:] + settings["adv_estimator"],
)
def test_failed_samples_change_nothing_for_the_others(settings: dict[str, Any]) -> None:
    config = RLVRConfig(**settings)
    norm_types = (config.norm_mean_type, config.norm_std_type)
    with_failures, without = scored_batch(True), scored_batch(False)
    scoring, expected_scoring = Scoring(config, norm_types), Scoring(config, norm_types)
    metrics, expected = scoring(with_failures), expected_scoring(without)
    scored = ~with_failures.batch["scores"].isnan()
    assert scored.tolist() == [True, False, False, True, True, True, True, True, True]
    columns = [*COLUMNS, *(["sample_weights"] if "difficulty_loss_weight" in settings else [])]
    for name in columns:
        column = with_failures.batch[name]
        torch.testing.assert_close(column[scored], without.batch[name], rtol=0, atol=0, msg=name)
        assert not column[~scored].any(), name
    assert metrics.pop("critic/unscored_ratio").value() == pytest.approx(2 / 9)
    assert expected.pop("critic/unscored_ratio").value() == 0
    assert {k: m.value() for k, m in metrics.items()} == {k: m.value() for k, m in expected.items()}
    assert scoring.state_dict() == expected_scoring.state_dict()
