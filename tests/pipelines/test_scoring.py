"""Between scores and update: samples that could not be scored must leave no trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from roll.config.rewards import FilterConfig, RewardConfig
from roll.methods.policy import PolicyMethod
from roll.pipelines.rlvr.config import RLVRConfig
from roll.protocol import DataProto
from roll.protocol.metrics import to_floats
from roll.rollout.groups import build_batch
from tests.support.keys import config_of
from tests.support.sample_groups import make_group

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
        {"estimator": "grpo"},
        {"estimator": "rloo"},
        {"estimator": "gae", "add_token_level_kl": True, "whiten_advantages": True},
        {"estimator": "reinforce++", "add_token_level_kl": True, "target_kl": 0.1},
        {"estimator": "reinforce", "norm_mean_type": "running", "norm_std_type": "running"},
        {"estimator": "grpo", "difficulty_mask": True, "difficulty_loss_weight": True, "length_loss_weight": True},
    ],
    ids=lambda settings: " ".join(settings)[14:] + settings["estimator"],
)
def test_failed_samples_change_nothing_for_the_others(settings: dict[str, Any]) -> None:
    config = config_of(RLVRConfig, **settings)
    norm_types = (config.norm_mean_type, config.norm_std_type)
    with_failures, without = scored_batch(True), scored_batch(False)
    scoring, expected_scoring = PolicyMethod(config, norm_types, 3), PolicyMethod(config, norm_types, 3)
    metrics, expected = scoring.credit(with_failures), expected_scoring.credit(without)
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


def settled(settings: dict[str, Any], limit: int, **columns: torch.Tensor) -> tuple[DataProto, dict[str, float]]:
    """The batch without failures after scoring, and its metrics."""
    config = config_of(RLVRConfig, **settings)
    batch = scored_batch(False)
    batch.batch.update(columns)
    metrics = PolicyMethod(config, (config.norm_mean_type, config.norm_std_type), limit).credit(batch)
    return batch, to_floats(metrics)


def test_overlong_punishment_falls_linearly_within_the_buffer() -> None:
    """Lengths 3, 1, 2, 2, 2, 2, 3 under a limit of 4 with a buffer of 2: nothing up to 2 tokens, half at 3."""
    settings = {"estimator": "reinforce", "overlong_buffer_length": 2, "overlong_penalty_factor": 0.5}
    batch, metrics = settled(settings, 4)
    raw = batch.batch["scores"]
    expected = raw - 0.25 * (batch.batch["response_mask"].sum(-1) == 3)
    torch.testing.assert_close(batch.batch["response_level_rewards"], expected)
    assert raw.tolist() == [1.0, 0.25, 0.0, 0.5, 1.0, 3.0, 7.0], "accuracies and filters see the raw score"
    assert metrics["critic/overlong_penalty"] == pytest.approx(0.25 * 2 / 7)


@pytest.mark.parametrize("settings", [{}, {"overlong_buffer_length": 2}, {"whiten_advantages": True}])
def test_a_step_without_any_score_has_numbers_all_the_same(settings: dict[str, Any]) -> None:
    nothing = torch.full((7,), float("nan"))
    batch, metrics = settled({"estimator": "grpo", **settings}, 4, scores=nothing)
    assert not batch.batch["advantages"].any() and not batch.batch["loss_mask"].any()
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []


def test_filtered_responses_stay_in_the_baseline_and_out_of_the_loss() -> None:
    keep = FilterConfig("mean_filter", {"threshold_down": 0.4, "threshold_up": 4.0})
    plain, _ = settled({"estimator": "grpo"}, 4)
    domain = str(plain.non_tensor_batch["domain"][0])
    rewards = {domain: RewardConfig(response_filter_config=keep)}
    batch, metrics = settled({"estimator": "grpo", "rewards": rewards}, 4)
    of_domain = torch.from_numpy(batch.non_tensor_batch["domain"] == domain)
    scores = batch.batch["scores"]
    rejected = of_domain & ((scores <= 0.4) | (scores >= 4.0))
    assert rejected.any() and not rejected.all()
    assert torch.equal(batch.batch["loss_mask"].any(-1), ~rejected)
    torch.testing.assert_close(batch.batch["advantages"], plain.batch["advantages"])
    assert metrics["actor/response_filter_mask_ratio"] == pytest.approx(1 - float(rejected.float().mean()))


def test_remax_subtracts_the_greedy_reward_made_as_a_samples_is() -> None:
    baseline = {
        "baseline_scores": torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0, 9.0, 9.0]),
        "baseline_lengths": torch.tensor([3, 3, 1, 1, 1, 1, 1]),
    }
    settings = {"estimator": "remax", "overlong_buffer_length": 2, "reward_clip": 5.0}
    batch, _ = settled(settings, 4, **baseline)
    rewards = batch.batch["scores"] - 0.5 * (batch.batch["response_mask"].sum(-1) == 3)
    expected = rewards.clamp(max=5) - torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 5.0, 5.0])
    last_token = batch.batch["advantages"][batch.batch["response_mask"]]
    torch.testing.assert_close(last_token, expected.repeat_interleave(batch.batch["response_mask"].sum(-1)))


@pytest.mark.parametrize("kl_coef", [0.0, 2.0])
def test_pass_at_k_takes_right_and_wrong_from_the_raw_score(kl_coef: float) -> None:
    """A divergence in the reward, however large, makes no wrong answer right and no right one wrong."""
    settings = {"estimator": "pass@k", "pass_k": 2, "add_token_level_kl": True, "init_kl_coef": kl_coef}
    batch, _ = settled(settings, 4)
    advantages = batch.batch["advantages"].gather(1, batch.batch["response_mask"].int().argmax(-1, keepdim=True))
    # Scores 1, 0.25 | 0, 0.5, 1 | 3, 7. Of three with two wrong, one of two is right with 2/3: s = sqrt(2)/3. The right
    # one gets (1/3)/s, a wrong one (1/3 - 1/2)/s. Groups of two have one choice of two.
    expected = [0.0, 0.0, -(0.125**0.5), -(0.125**0.5), 0.5**0.5, 0.0, 0.0]
    torch.testing.assert_close(advantages[:, 0], torch.tensor(expected))


def test_steps_without_advantages_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Scores differ, but not within a group."""
    config = config_of(RLVRConfig, adv_estimator="grpo")
    scoring = PolicyMethod(config, (config.norm_mean_type, config.norm_std_type), 4)
    for _ in range(4):
        batch = scored_batch(False)
        batch.batch["scores"] = torch.tensor([1.0, 1.0, 0.1, 0.1, 0.1, 0.5, 0.5])
        scoring.credit(batch)
    assert [record.message for record in caplog.records if "every advantage of the last 3 steps" in record.message]
    assert len(caplog.records) == 1


def test_the_entropy_bonus_follows_a_target_and_survives_a_checkpoint() -> None:
    """2505.22312: off above the target; below it the weight of the step, which then grows by delta."""
    settings = {"target_entropy": 0.5, "entropy_loss_coef": 0.01}
    config = config_of(RLVRConfig, adv_estimator="grpo", **settings)
    scoring = PolicyMethod(config, (config.norm_mean_type, config.norm_std_type), 4)
    weights = []
    for entropy in (0.2, 0.3, 0.4, 0.9, 0.9, 0.1, 0.5, 0.5):
        batch = scored_batch(False)
        batch.batch["old_entropy"] = torch.where(batch.batch["response_mask"], entropy, 77.0)
        metrics = to_floats(scoring.credit(batch))
        weights.append(scoring.entropy_coef)
        assert metrics["actor/old_entropy"] == pytest.approx(entropy)
        assert metrics["actor/entropy_coef"] == scoring.entropy_coef
        resumed = PolicyMethod(config, (config.norm_mean_type, config.norm_std_type), 4)
        resumed.load_state_dict(scoring.state_dict())
        scoring = resumed
    assert weights == pytest.approx([0.01, 0.015, 0.02, 0.0, 0.0, 0.015, 0.02, 0.02])


def test_gdpo_normalises_the_weighed_rewards_apart() -> None:
    components = torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 1], [0, 1], [0, 0], [1, 1]])
    settings = {"estimator": "gdpo", "reward_weights": {"right": 2.0, "short": 0.5}}
    batch, _ = settled(settings, 4, reward_components=components)
    total = torch.zeros(7, dtype=torch.float64)
    for weight, column in ((2.0, components[:, 0].double()), (0.5, components[:, 1].double())):
        for rows in ([0, 1], [2, 3, 4], [5, 6]):
            group = column[rows]
            if group.std() > 0:
                total[rows] += weight * (group - group.mean()) / group.std()
    expected = (total - total.mean()) / total.std()
    first_token = batch.batch["advantages"][torch.arange(7), batch.batch["response_mask"].int().argmax(-1)]
    torch.testing.assert_close(first_token.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_policy_loss_uses_the_tokens_of_highest_entropy_among_those_of_the_loss() -> None:
    batch = scored_batch(False)
    entropy = torch.rand(batch.batch["response_mask"].shape, generator=torch.Generator().manual_seed(1))
    settings = {"estimator": "grpo", "top_entropy_quantile": 0.4, "difficulty_mask": True}
    batch, metrics = settled(settings, 4, old_entropy=entropy)
    loss_mask, policy_mask = batch.batch["loss_mask"], batch.batch["policy_mask"]
    kept, dropped = entropy[policy_mask], entropy[loss_mask & ~policy_mask]
    assert len(kept) == round(0.4 * int(loss_mask.sum()))
    assert not (policy_mask & ~loss_mask).any() and kept.min() >= dropped.max()
    assert metrics["actor/top_entropy_mean"] == pytest.approx(float(kept.mean()))
