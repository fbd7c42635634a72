"""Repetition and length penalties, and CrossThinkQA's rule, against values worked out by hand."""

from __future__ import annotations

import pytest

from roll.rewards import RewardOptionError, RewardSample, build_reward
from roll.rewards.text_rules import repeated_share


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
    for options in ({"n": 0}, {"tolerated": 1.0}):
        with pytest.raises(RewardOptionError, match="must be at least"):
            build_reward("repetition_penalty", options)


def test_the_length_penalty() -> None:
    penalty = build_reward("length_penalty", {"free": 100, "limit": 300, "max_penalty": 0.5})
    lengths = (0, 100, 200, 300, 1000)
    scores = [penalty([RewardSample("", "", num_tokens=length)])[0].score for length in lengths]
    assert scores == [0.0, 0.0, -0.25, -0.5, -0.5]
    with pytest.raises(RewardOptionError, match="less than limit 100"):
        build_reward("length_penalty", {"free": 100, "limit": 100})


@pytest.mark.parametrize(
    ("response", "loose", "soft", "strict"),
    [
        (r"\boxed{B}", 1, 1, 1),
        ("The answer is B.", 1, 0.5, -1),
        (r"\boxed{A}", -1, -0.5, -1),
        ("The answer is A.", -1, -1, -1),
        ("", -1, -1, -1),
        (r"<think>\boxed{A}</think>The answer is B.", 1, 0.5, -1),
    ],
)
def test_crossthinkqa(response: str, loose: float, soft: float, strict: float) -> None:
    for kind, score in (("loose", loose), ("soft", soft), ("strict", strict)):
        (result,) = build_reward("crossthinkqa", {"reward_type": kind})([RewardSample("", response, "B")])
        assert result.score == score, kind


@pytest.mark.parametrize(("tokens", "term"), [(5, -0.5), (100, -0.5), (250, -0.25), (400, 0.0), (900, 0.0)])
def test_crossthinkqa_takes_off_repetition_and_shortness(tokens: int, term: float) -> None:
    rule = build_reward("crossthinkqa", {"length_penalty_coef": 0.2})
    text = r"so so so so \boxed{B}"  # so-so-so twice in 3 3-grams
    (result,) = rule([RewardSample("", text, "B", num_tokens=tokens)])
    assert result.score == pytest.approx(1.0 - 0.5 / 3 + 0.2 * term)
    assert result.metrics["length_term"] == term
