"""Rewards by name and by section: options, failures, and of several rewards what their score is made of and what is
logged."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from roll.config.rewards import REWARDS, RewardComponentConfig, RewardConfig
from roll.rewards import (
    RewardError,
    RewardOptionError,
    RewardResult,
    RewardSample,
    apply_on_error,
    build_reward,
    build_section,
    failure_rates,
    resolve_name,
    reward_options,
)
from roll.rewards.base import GuardedReward, RewardFunction, failure
from roll.rewards.registry import Component, CompositeReward
from tests.rewards.stated_cases import rows_of

OWN = "tests.rewards.own_rewards"
NEEDED = {
    "length_penalty": {"limit": 10},
    "http_reward": {"url": "http://127.0.0.1:9", "max_retries": 0},
    "llm_judge": {"base_url": "http://127.0.0.1:9/v1", "model": "absent", "max_retries": 0},
}
"""Options without a default."""
CHOICES = ("multiple_choice", "crossthinkqa")
PUBLISHED = "roll.pipeline.rlvr.rewards"


def test_published_class_paths_and_short_names() -> None:
    assert resolve_name(f"{PUBLISHED}.math_rule_reward_worker.MathRuleRewardWorker") == "math_rule"
    path = f"{PUBLISHED}.multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker"
    assert resolve_name(path) == "multiple_choice"
    assert resolve_name("gsm8k_rule") == "gsm8k_rule"
    for name in sorted(REWARDS):
        build_reward(name, NEEDED.get(name)).close()
    assert build_reward("gsm8k_rule", {"score": 2})([RewardSample("", "#### 1", "1")])[0].score == 2.0, "for a float"


@pytest.mark.parametrize(("name", "options", "message"), rows_of("refused_options"))
def test_options_that_cannot_work_say_why(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(RewardOptionError) as caught:
        build_reward(name, options)
    assert message in str(caught.value)


def test_a_plain_function_gets_what_it_asks_for() -> None:
    short = build_reward(f"{OWN}.shortness", {"limit": 3})
    assert [r.score for r in short([RewardSample("", "abc"), RewardSample("", "abcd")])] == [1.0, 0.0]
    everything = build_reward(f"{OWN}.everything")
    row = {"difficulty": 4, "prompt": "the column, not the rendered text", "tag": "t"}
    (result,) = everything([RewardSample("p", "yes", "yes", row=row)])
    assert result == RewardResult(1.0, {"columns": 3.0, "difficulty": 4.0})


def test_what_a_function_raises_is_that_samples_error(caplog: pytest.LogCaptureFixture) -> None:
    reward = build_reward(f"{OWN}.everything")
    samples = [RewardSample("", text, "ok") for text in ("boom", "ok", "boom")]
    results = reward(samples)
    assert [r.score for r in results] == [None, 1.0, None]
    assert "AssertionError: the response went boom" in (results[0].error or "")
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def test_what_is_no_score_is_an_error() -> None:
    errors = {
        "nan": "must be finite",
        "huge": "must be finite",
        "none": "must return numbers",
        "text": "must return numbers",
        "dict": "no 'score'",
    }
    reward = build_reward(f"{OWN}.returns")
    for result, error in zip(reward([RewardSample("", name) for name in errors]), errors.values(), strict=True):
        assert result.score is None and error in (result.error or "")
    assert reward([RewardSample("", "true")])[0].score == 1.0
    (guarded,) = GuardedReward("x", build_reward(f"{OWN}.Constant", {"value": 1e300}))([RewardSample("", "")])
    assert guarded.score is None and "no finite number of float32" in (guarded.error or "")


def test_a_rule_class_by_dotted_path() -> None:
    assert build_reward(f"{OWN}.Constant", {"value": 3})([RewardSample("", "")])[0].score == 3.0


FAILED = [RewardResult(1.0), RewardResult(None, {}, "x: timeout: slow"), RewardResult(None, {}, "broken")]


def test_failures_are_masked_valued_or_raised_and_always_counted() -> None:
    assert [r.score for r in apply_on_error(FAILED, "mask")] == [1.0, None, None]
    valued = apply_on_error(FAILED, "value", -1.0)
    assert [r.score for r in valued] == [1.0, -1.0, -1.0]
    with pytest.raises(RewardError, match="2 of 3 samples failed, the first with: x: timeout"):
        apply_on_error(FAILED, "raise")
    assert apply_on_error(FAILED[:1], "raise") == FAILED[:1]
    assert failure_rates(FAILED) == failure_rates(valued) == {"error_rate": 2 / 3, "timeout_rate": 1 / 3}
    assert failure_rates([]) == {}


def test_a_section_names_its_reward_and_options() -> None:
    config = RewardConfig(worker_cls="gsm8k_rule", reward_kwargs={"method": "flexible"}, timeout=7)
    assert reward_options("gsm", config) == ("gsm8k_rule", {"method": "flexible"})
    assert reward_options("math_rule", RewardConfig(timeout=7)) == ("math_rule", {"timeout": 7})
    config = RewardConfig(format_pattern="a+", timeout=7, reward_kwargs={"timeout": 2})
    assert reward_options("format", config) == ("format", {"pattern": "a+", "timeout": 2})
    assert reward_options("own", RewardConfig(worker_cls=f"{OWN}.shortness"))[1] == {}
    for name in sorted(REWARDS):
        config = RewardConfig(format_pattern="a", reward_kwargs=NEEDED.get(name, {}))
        build_reward(*reward_options(name, config)).close()


def test_rewards_load_without_the_heavy_packages() -> None:
    program = (
        "import sys; from roll.rewards import build_reward; build_reward('gsm8k_rule'); build_reward('math_rule');"
        "print([m for m in ('torch', 'numpy', 'transformers', 'ray', 'sympy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_a_rule_returns_the_numbers_that_it_tells_of(name: str) -> None:
    rule = build_reward(name, NEEDED.get(name))
    for response in ("#### 7", "\\boxed{A}", "seven", ""):
        (result,) = rule([RewardSample("question", response, "A" if name in CHOICES else "7")])
        assert tuple(result.metrics) == rule.numbers or result.error is not None
    rule.close()


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
