"""Estimators, KL, clipping and epochs as whole runs."""

from __future__ import annotations

import pytest

from tests.pipelines.conftest import Run
from tests.support.tiny_runs import role, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CRITIC = role("fsdp2_train", [1], training_args=training_args(8, 2, 1e-2))


def test_ppo_learns_values_and_keeps_near_the_reference(run: Run) -> None:
    changes = {
        "max_steps": 12,
        "estimator": "gae",
        "critic": CRITIC,
        "critic_warmup": 6,
        "whiten_advantages": True,
        "add_token_level_kl": True,
        "init_kl_coef": 0.1,
        "reference": role("fsdp2_infer", [0]),
    }
    finished = run(changes)
    trains_actor = ["actor/pg_loss" in row for row in finished.steps]
    assert trains_actor == [False] * 6 + [True] * 6, "critic_warmup: the critic learns alone at first"
    losses = finished.values("critic/loss")
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    kl = finished.values("critic/kl")
    assert kl[:7] == [pytest.approx(0, abs=1e-6)] * 7, "nothing has moved the policy yet"
    assert abs(kl[-1]) > 1e-5
    assert finished.values("critic/kl_coef") == [0.1] * 12


@pytest.mark.long
def test_epochs_of_drawn_mini_batches_are_clipped_and_a_target_entropy_reaches_them(run: Run) -> None:
    """The pass before the update computes entropies for one, sums of squares for the optimal token baseline."""
    changes = {
        "estimator": "optimal_token_baseline",
        "max_steps": 2,
        "ppo_epochs": 2,
        "pg_clip": 0.05,
        "dual_clip_loss": True,
        "dual_clip_coef": 1.1,
        "loss_agg_mode": "prompt-mean",
        "shuffle_mini_batches": True,
        "target_entropy": 50.0,
        "entropy_loss_coef": 0.01,
        "kl_penalty": "k3+",
        "actor_train.training_args": training_args(4, 2, 5e-3),
    }
    finished = run(changes)
    assert finished.values("actor/entropy_coef") == pytest.approx([0.01, 0.015])
    for row in finished.steps:
        assert "time/old_log_probs" in row, "off-policy updates need the log-probs from before"
        assert row["actor/total_samples"] == 2 * 16
        assert row["actor/entropy"] > 0 and row["actor/old_entropy"] > 0
        assert row["actor/ratio_min"] < 0.95 < 1.05 < row["actor/ratio_max"]
        assert 0 < row["actor/clipfrac"] < 1
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-4, "engines follow every optimizer step"


@pytest.mark.long
def test_rejected_tokens_are_not_learnt_from(run: Run) -> None:
    """Engine and trainer round differently: a bound at ratio 1 rejects some of the tokens."""
    changes = {
        "max_steps": 1,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_loss_coef": 0.01,
        "loss_agg_mode": "token-mean",
        "reference": role("fsdp2_infer", [0]),
        "train_infer_correction": [{"level": "token", "action": "reject", "low": 1.0}],
    }
    (row,) = run(changes).steps
    assert 0.1 < row["actor/rejected_token_ratio"] < 0.9
    assert row["actor/train_infer_log_diff_abs_mean"] > 0
    assert row["actor/train_infer_ratio_token_mean"] >= 1, "ratios below are left out"
    assert row["actor/grad_norm"] > 0
