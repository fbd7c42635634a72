from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from roll.pipelines.rlvr.accuracy import (
    Answers,
    best_at_k,
    estimate,
    majority_at_k,
    merged_votes,
    overall,
    pass_at_k,
    pass_metrics,
    voted_answer,
)
from tests.support.sample_groups import make_group


@pytest.mark.parametrize(("n", "c", "k"), [(8, 0, 4), (8, 3, 1), (8, 3, 4), (8, 8, 8), (5, 2, 3), (4, 1, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n, c, k):
    correct = np.array([True] * c + [False] * (n - c))
    subsets = list(combinations(correct, k))
    assert pass_at_k(correct, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_accuracy_counts_only_full_scores_and_weighs_samples_alike():
    groups = [
        make_group(0, [1], [[1], [2]], [1.0, 0.5], tag="a"),
        make_group(1, [1], [[1, 1], [2]], [1.0, 1.5], tag="b"),  # with a bonus
        make_group(2, [1], [[1], [2]], [None, 0.0], tag="b"),
    ]
    metrics = pass_metrics([Answers.of(group) for group in groups], "sampled", is_primary=True, in_training=True)
    assert metrics["val/sampled/accuracy"] == pytest.approx(3 / 6)
    assert metrics["val_correct/all/mean"] == pytest.approx(3 / 6)
    assert metrics["val_correct/a/mean"] == pytest.approx(1 / 2)
    assert metrics["val/sampled/b/accuracy"] == pytest.approx(2 / 4)
    assert metrics["val/sampled/response_length"] == pytest.approx(7 / 6)
    assert metrics["val/sampled/pass@1"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert metrics["val/sampled/pass@2"] == pytest.approx(2 / 3)
    assert "val/sampled/pass@4" not in metrics
    assert metrics["val/sampled/best@2"] == pytest.approx((1 + 1.5 + 0) / 3)
    assert metrics["val/sampled/a/pass@2"] == 1
    assert metrics["val/sampled/accuracy_low"] < 0.5 < metrics["val/sampled/accuracy_high"]


def test_a_validation_in_training_reports_rewards_and_powers_of_two_alone():
    groups = [make_group(0, [1], [[1], [2], [3]], [1.0, 0.5, None], tag="a")]
    metrics = pass_metrics([Answers.of(group) for group in groups], "sampled", is_primary=True, in_training=True)
    assert metrics["val/sampled/reward"] == metrics["val/sampled/a/reward"] == 0.75
    assert metrics["val/sampled/reward_failed"] == pytest.approx(1 / 3)
    assert not any("chosen@" in name for name in metrics)
    assert {name.rpartition("/")[2] for name in metrics if "best@" in name} == {"best@1", "best@2"}


def test_a_graded_reward_has_no_accuracy():
    scores = np.linspace(0.1, 0.9, 12)
    groups = [make_group(place, [1], [[1], [2]], list(pair)) for place, pair in enumerate(scores.reshape(6, 2))]
    answers = [Answers.of(group) for group in groups]
    metrics = pass_metrics(answers, "sampled", is_primary=True, in_training=True)
    assert metrics["val/sampled/reward"] == pytest.approx(0.5)
    assert metrics["val/sampled/reward_low"] < 0.5 < metrics["val/sampled/reward_high"]
    assert "val/sampled/best@2" in metrics
    assert not any(word in name for name in metrics for word in ("accuracy", "correct", "pass@", "maj@"))
    assert overall({"": answers}) == {}


def test_further_numbers_of_a_reward_are_validated_too():
    group = make_group(0, [1], [[1], [2]], [1.0, 0.0])
    for one, lines in zip(group.members, (1.0, 4.0), strict=True):
        one.reward = replace(one.reward, metrics={"lines": lines})
    metrics = pass_metrics([Answers.of(group)], "greedy", is_primary=False, in_training=True)
    assert metrics["val/greedy/reward/lines"] == 2.5


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_best_at_k_is_the_mean_over_all_choices(k):
    scores = np.array([0.25, 1.0, -0.5, 0.75], dtype=np.float32)
    assert best_at_k(scores, k) == pytest.approx(np.mean([max(chosen) for chosen in combinations(scores, k)]))
    assert best_at_k(np.array([np.nan, 1.0, 0.5]), 1) == pytest.approx((0.5 + 1.0 + 0.5) / 3)
    assert best_at_k(np.array([np.nan, np.nan]), 2) == 0


def test_majorities_of_blocks():
    votes = ["4", "4", "5", None, "7", "7", "4", "5"]
    right = np.array([True, True, False, False, False, False, True, False])
    assert majority_at_k(votes, right, 8) == 1.0
    assert majority_at_k(votes, right, 4) == pytest.approx((1 + 0) / 2)
    assert majority_at_k(votes, right, 2) == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    assert majority_at_k(votes, right, 1) == pytest.approx(right.mean())
    assert majority_at_k([None, None], np.array([True, True]), 2) == 0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{ 1/2 } #### 9", "1/2"),
        ("It is 0.50", "1/2"),
        ("#### 1,234.", "1234"),
        ("<answer> X + 1 </answer>", "X + 1"),
        ("<think>it is 3</think> the answer is $72", "72"),
        ("<think>it is 3", None),
        (r"\boxed{50\%}", "50\\%"),
        ("no idea", None),
    ],
)
def test_votes(response, answer):
    assert voted_answer(response) == answer


def test_votes_for_the_same_value_are_one():
    """Whatever their spelling, and only within a verdict: where the reward tells two answers apart, they are two."""
    votes = [r"\frac{1}{2}", "1/2", None, "x+1", "1 + x", "½", r"\{1,2\}", r"\{2,1\}", "B", "C", "1+x", "2", "1/2"]
    correct = np.array([True, True, False, False, False, True, False, False, False, False, True, False, False])
    half, sum_, both = r"\frac{1}{2}", "x+1", r"\{1,2\}"
    expected = [half, half, None, sum_, sum_, half, both, both, "B", "C", "1+x", "2", "1/2"]
    assert merged_votes(votes, correct) == expected
    right = np.array([True, True, True, False, False])
    scattered = [r"\sqrt{12}", r"2\sqrt{3}", r"2\sqrt3", "3", "3"]
    assert majority_at_k(scattered, right, 5) == 0 and majority_at_k(merged_votes(scattered, right), right, 5) == 1


def test_intervals_are_those_of_wilson_and_narrow_with_more_samples():
    """Reference values: Wilson's interval without continuity correction (Newcombe, 1998, table I: 81/263, 15/148)."""
    for right, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        found = estimate([1.0] * right + [0.0] * (n - right))
        assert (found.mean, found.low, found.high) == pytest.approx((right / n, low, high), abs=1e-4)
    whole = estimate([1.0, 0.0] * 20)
    fractions = estimate([0.75, 0.25] * 20)
    assert whole.mean == fractions.mean == 0.5
    assert fractions.high - fractions.low < 0.6 * (whole.high - whole.low)
    assert estimate([1.0] * 5).low < 0.6 < estimate([1.0] * 5).high == 1.0


def test_no_rounding_puts_the_mean_outside_its_interval():
    for n in range(1, 200):
        nothing, everything = estimate([0.0] * n), estimate([1.0] * n)
        assert nothing.low == nothing.mean == 0.0 < nothing.high
        assert everything.low < everything.mean == everything.high == 1.0


def test_intervals_hold_the_truth_as_often_as_they_say():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        chances = random.beta(2, 3, size=60)
        found = estimate(random.binomial(4, chances) / 4)
        held += found.low <= 0.4 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_several_sets_are_pooled_by_question():
    sets = {
        "": [make_group(0, [1], [[1], [2]], [1.0, 1.0], tag="a")],
        "hard": [make_group(0, [1], [[1]], [0.0], tag="a"), make_group(1, [1], [[1]], [1.0], tag="b")],
    }
    found = {name: [Answers.of(group) for group in groups] for name, groups in sets.items()}
    assert overall(found) == pytest.approx(
        {
            "val_correct/a/mean": 1 / 2,
            "val_correct/b/mean": 1,
            "val_correct/hard/mean": 1 / 2,
            "val_correct/all/mean": 2 / 3,
        }
    )
