"""A domain of several rewards: what its score is made of, what is logged, and what a failing part does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from roll.config.rewards import RewardComponentConfig, RewardConfig
from roll.rewards import RewardOptionError, RewardResult, RewardSample, build_section, failure_rates
from roll.rewards.base import GuardedReward, RewardFunction, failure
from roll.rewards.composition import Component, CompositeReward

OWN = "tests.rewards.own_rewards"


@dataclass
class Told(RewardFunction):
    """Gives the results that it was told."""

    results: list[RewardResult]
    numbers: tuple[str, ...] = ()
    closed: bool = field(default=False, init=False)

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        return self.results[: len(samples)]

    def close(self) -> None:
        self.closed = True


def combined(*parts: tuple[RewardResult, dict[str, Any]]) -> RewardResult:
    components = [
        Component(f"c{i}", Told([result]), RewardComponentConfig(**options))
        for i, (result, options) in enumerate(parts)
    ]
    return CompositeReward(components)([RewardSample("", "")])[0]


def scored(value: float) -> RewardResult:
    return RewardResult(value)


GATE: dict[str, Any] = {"gate": True}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(scored(1), {}), (scored(0.5), {"weight": 0.2})], 1.1),
        ([(scored(1), {}), (scored(3), {"weight": -0.5})], -0.5),
        ([(scored(1), {}), (scored(0), GATE)], 0.0),
        ([(scored(1), {"weight": 2}), (scored(0.25), GATE)], 0.5),
        ([(scored(0.25), GATE), (scored(1), {}), (scored(0.5), GATE), (scored(1), {})], 0.25),
        ([(scored(-1), {}), (scored(0), GATE)], 0.0),
        ([(scored(1), {}), (scored(7), {"weight": 0})], 1.0),
        ([(scored(1), {}), (failure("x"), {})], None),
        ([(scored(1), {}), (failure("x"), GATE)], None),
        ([(scored(1), {}), (failure("x"), {"error_value": -1.0, "weight": 0.5})], 0.5),
        ([(scored(1), {}), (failure("x"), GATE | {"error_value": 1.0})], 1.0),
        ([(failure("x"), {}), (scored(0), GATE)], 0.0),
    ],
)
def test_the_score_is_the_weighted_sum_times_the_gates(
    parts: list[tuple[RewardResult, dict[str, Any]]], expected: float | None
) -> None:
    result = combined(*parts)
    assert result.score == (None if expected is None else pytest.approx(expected))
    assert (result.error is None) == (expected is not None)


def test_every_component_is_logged_apart_with_its_failures() -> None:
    first = Told([RewardResult(1.0, {"correct": 1.0}), failure("math: timeout: slow"), RewardResult(0.0, {})])
    second = Told([RewardResult(0.5), RewardResult(0.5), failure("broken")])
    reward = CompositeReward([Component("math", first), Component("style", second, RewardComponentConfig(weight=2.0))])
    results = reward([RewardSample("", "")] * 3)
    assert results[0] == RewardResult(
        2.0,
        {
            "math/correct": 1.0,
            "math/score": 1.0,
            "math/error_rate": 0.0,
            "math/timeout_rate": 0.0,
            "style/score": 0.5,
            "style/error_rate": 0.0,
            "style/timeout_rate": 0.0,
        },
    )
    assert results[1].error == "math: math: timeout: slow"
    assert (results[1].metrics["math/error_rate"], results[1].metrics["math/timeout_rate"]) == (1.0, 1.0)
    assert "math/score" not in results[1].metrics
    assert results[2].metrics["style/error_rate"] == 1.0
    assert failure_rates(results) == {"error_rate": 2 / 3, "timeout_rate": 1 / 3}
    reward.close()
    assert first.closed and second.closed


def test_a_section_of_components() -> None:
    config = RewardConfig(
        timeout=7,
        format_pattern=r".*\\boxed\{.*\}.*",
        components={
            "correctness": RewardComponentConfig("math_rule"),
            "format": RewardComponentConfig(gate=True),
            "brevity": RewardComponentConfig(f"{OWN}.shortness", {"limit": 12}, weight=0.5, timeout=2),
        },
    )
    reward = build_section("math", config)
    samples = [RewardSample("", text, "7") for text in (r"\boxed{7}", r"It is \boxed{7}.", "#### 7", r"\boxed{8}")]
    assert [result.score for result in reward(samples)] == [1.5, 1.0, 0.0, 0.5]
    assert reward(samples[2:3])[0].metrics["correctness/correct"] == 1.0
    assert getattr(reward, "numbers", None) == (), "a function of one's own does not tell its numbers"
    reward.close()


def test_numbers_are_told_where_every_component_tells_them() -> None:
    config = RewardConfig(
        components={"gsm": RewardComponentConfig("gsm8k_rule"), "format": RewardComponentConfig(gate=True)}
    )
    reward = build_section("math", config)
    (result,) = reward([RewardSample("", "#### 1", "1")])
    assert set(getattr(reward, "numbers", ())) == set(result.metrics)


def test_a_wrong_option_names_its_component() -> None:
    config = RewardConfig(components={"gsm": RewardComponentConfig("gsm8k_rule", {"metod": "strict"})})
    with pytest.raises(RewardOptionError, match="did you mean 'method'") as caught:
        build_section("math", config)
    assert caught.value.component == "gsm"


class Fragile(RewardFunction):
    """Raises for one text, wherever it stands in a batch; returns too little for another."""

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        if any(sample.response == "boom" for sample in samples):
            raise ZeroDivisionError("boom went off")
        return [RewardResult(1.0) for sample in samples if sample.response != "lost"]


def test_what_a_reward_raises_costs_one_sample_and_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = GuardedReward("fragile", Fragile())
    with caplog.at_level(logging.WARNING):
        results = reward([RewardSample("", text) for text in ("a", "boom", "b", "lost")])
        again = reward([RewardSample("", "boom")])
    assert [result.score for result in results] == [1.0, None, 1.0, None]
    assert results[1].error == "fragile: ZeroDivisionError: boom went off"
    assert "returned 0 results for 1 samples" in (results[3].error or "")
    assert again[0].score is None
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert "in __call__" in caplog.text, "the traceback shows where"
