"""Right, wrong, absent and malformed answers to every rule: a row is (reward, options, response, ground truth, score).

``rule_cases.jsonl`` has them; metrics and a prompt may follow, or behind a score of null a part of the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards import RewardSample, build_reward
from roll.rewards.base import RewardFunction
from roll.rewards.text_rules import F1, repeated_share
from tests.rewards.stated_cases import rows_of

MATH = {"format_score": 0.1, "timeout": 10}
CASES = [
    *rows_of("rule_cases"),
    ["math_rule", MATH, "\\boxed{" + "4" * 2000 + "}", "4", 0.0, {"correct": 0.0, "answered": 0.0}],
]


@pytest.fixture(scope="module")
def built() -> Iterator[Callable[[str, str], RewardFunction]]:
    rewards = []

    @cache
    def build(name: str, options: str) -> RewardFunction:
        rewards.append(build_reward(name, json.loads(options)))
        return rewards[-1]

    yield build
    for reward in rewards:
        reward.close()


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{number}" for number, case in enumerate(CASES)])
def test_scores(built: Callable[[str, str], RewardFunction], case: list[Any]) -> None:
    name, options, response, truth, score, *rest = case
    more, prompt = (rest or [{}])[0], "".join(rest[1:])
    (result,) = built(name, json.dumps(options))([RewardSample(prompt, response, truth)])
    if score is None:
        assert result.score is None and more in (result.error or "")
        return
    assert result.score == pytest.approx(score), result.error
    assert {key: result.metrics[key] for key in more} == pytest.approx(more)


@given(st.text(alphabet="# 0123456789.,$-/e%ab\n", max_size=400), st.sampled_from(["strict", "flexible"]))
@settings(deadline=None)
def test_any_response_gets_a_score(response: str, method: str) -> None:
    (result,) = build_reward("gsm8k_rule", {"method": method})([RewardSample("How many?", response, "72")])
    assert result.score in (0.0, 1.0)


@given(st.integers(min_value=-(10**9), max_value=10**9), st.text(alphabet="abc 123\n", max_size=200))
@settings(deadline=None)
def test_a_marked_answer_counts_whatever_stands_before(number: int, before: str) -> None:
    (result,) = build_reward("gsm8k_rule")([RewardSample("", f"{before}\n#### {number:,}", str(number))])
    assert result.score == 1.0


def test_a_pattern_that_never_ends_is_cut_off_and_reported() -> None:
    rule = build_reward("format", {"pattern": r"(a|b|ab)*c(\w+)*d", "timeout": 0.2})
    slow, quick = rule([RewardSample("", "ab" * 5000 + "c" + "x" * 5000), RewardSample("", "abcxd")])
    assert slow.score is None and "timeout" in (slow.error or "")
    assert quick.score == 1.0


@given(st.text(max_size=40), st.text(max_size=40))
@settings(deadline=None)
def test_f1_is_symmetric_and_bounded(one: str, other: str) -> None:
    rule = F1()
    value = rule.compare(one, other)
    assert 0.0 <= value <= 1.0
    assert value == rule.compare(other, one)
    assert rule.compare(one, one) == 1.0


@pytest.mark.parametrize(
    ("text", "n", "share"),
    [
        ("", 1, 0.0),
        ("a", 2, 0.0),
        ("a a a a", 1, 0.75),
        ("a b a b", 2, 1 / 3),  # ab ba ab: 2 different of 3
        ("a b c d e", 2, 0.0),
        ("x " * 100, 3, 1 - 1 / 98),
    ],
)
def test_repeated_share(text: str, n: int, share: float) -> None:
    assert repeated_share(text.split(), n) == pytest.approx(share)
    words = text.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    assert repeated_share(words, n) == pytest.approx(1 - len(set(grams)) / len(grams) if grams else 0.0)


def test_the_repetition_penalty_beyond_what_is_tolerated() -> None:
    penalty = build_reward("repetition_penalty", {"n": 1, "tolerated": 0.5, "max_penalty": 2.0})
    results = penalty([RewardSample("", text) for text in ("a b", "a A b B", "a a a a")])
    assert [r.score for r in results] == [0.0, 0.0, pytest.approx(-1.0)]
    assert results[2].metrics == {"repeated": 0.75}
    characters = build_reward("repetition_penalty", {"n": 2, "unit": "character"})
    assert characters([RewardSample("", "哈哈哈")])[0].score == -0.5


def test_the_length_penalty() -> None:
    penalty = build_reward("length_penalty", {"free": 100, "limit": 300, "max_penalty": 0.5})
    lengths = (0, 100, 200, 300, 1000)
    scores = [penalty([RewardSample("", "", num_tokens=length)])[0].score for length in lengths]
    assert scores == [0.0, 0.0, -0.25, -0.5, -0.5]


@pytest.mark.parametrize(("tokens", "term"), [(5, -0.5), (100, -0.5), (250, -0.25), (400, 0.0), (900, 0.0)])
def test_crossthinkqa_takes_off_repetition_and_shortness(tokens: int, term: float) -> None:
    rule = build_reward("crossthinkqa", {"length_penalty_coef": 0.2})
    text = r"so so so so \boxed{B}"  # so-so-so twice in 3 3-grams
    (result,) = rule([RewardSample("", text, "B", num_tokens=tokens)])
    assert result.score == pytest.approx(1.0 - 0.5 / 3 + 0.2 * term)
    assert result.metrics["length_term"] == term
