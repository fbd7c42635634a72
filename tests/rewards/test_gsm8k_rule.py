import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards import RewardResult, RewardSample, build_reward
from roll.rewards.text_rules import _ANYWHERE, last_numeral


def verdict(response: str, ground_truth: object, **options: object) -> RewardResult:
    rule = build_reward("gsm8k_rule", options)
    (result,) = rule([RewardSample("How many?", response, ground_truth)])
    return result


RIGHT_IN_BOTH = [
    ("48/2 = 24\n48+24 = 72\n#### 72", "72"),
    ("#### 72.", "72"),
    ("#### 72.00", "72"),
    ("####72", "72"),
    ("#### $72", "72"),
    ("#### -$5", "-5"),
    ("#### 1,234", "1234"),
    ("#### 1234", "1,234"),
    ("#### 72 eggs", "72"),
    ("#### 72, which is right", "72"),
    ("#### 0.5", "1/2"),
    ("#### 25%", "25"),
    ("#### 5\nNo, wait.\n#### 72", "72"),
    ("#### 72\nThat took 3 steps.", "72"),
    ("#### 72", "so it is 24+48\n#### 72"),
    ("#### 72", 72),
]
WRONG_IN_BOTH = [
    ("#### 71", "72"),
    ("#### -72", "72"),
    ("#### 72\n#### 73", "72"),
    ("#### 172", "72"),
    ("#### 7.2", "72"),
    ("#### 1/2", "1"),
]
UNANSWERED_IN_BOTH = ["", "####", "#### none", "no idea", "#### 3.5.2", "#### 7e2", "#### 12,34", "A7B"]


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize(
    ("response", "truth", "score", "correct", "answered"),
    [(*case, 2.5, 1.0, 1.0) for case in RIGHT_IN_BOTH]
    + [(*case, 0.1, 0.0, 1.0) for case in WRONG_IN_BOTH]
    + [(text, "72", 0.0, 0.0, 0.0) for text in UNANSWERED_IN_BOTH],
)
def test_answers(response: str, truth: object, method: str, score: float, correct: float, answered: float) -> None:
    result = verdict(response, truth, method=method, score=2.5, format_score=0.1)
    assert result == RewardResult(score, {"correct": correct, "answered": answered})


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("The answer is $72.", "72"),
        ("She has 5, then 1,234.", "1234"),
        ("so -3", "-3"),
        ("(72)", "72"),
        ("=72", "72"),
        ("10-5", "5"),
    ],
)
def test_flexible_takes_the_last_number_and_strict_does_not(response: str, truth: str) -> None:
    assert verdict(response, truth, method="flexible").score == 1.0
    assert verdict(response, truth, method="strict").score == 0.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        (r"4 of them: $x = \frac{3}{4}$", "4"),
        (r"so $2^{10}$", "10"),
        (r"$\sqrt{12}$", "12"),
        ("x_2", "2"),
        ("2^10", "10"),
    ],
)
def test_flexible_takes_no_part_of_a_formula(response: str, truth: str) -> None:
    assert verdict(response, truth, method="flexible").score == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "as_text", "as_number"),
    [
        ("#### 72", "72", 1.0, 1.0),
        ("#### 72.", "72", 0.0, 1.0),
        ("#### 72.0", "72", 0.0, 1.0),
        ("#### 1,234", "1234", 1.0, 1.0),
        ("####72", "72", 0.0, 1.0),
        ("#### $72", "72", 0.0, 1.0),
    ],
)
def test_string_comparison_differs_where_it_should(response: str, truth: str, as_text: float, as_number: float) -> None:
    assert verdict(response, truth, compare="string").score == as_text
    assert verdict(response, truth, compare="number").score == as_number


@pytest.mark.parametrize("truth", [None, "seventy-two", ""])
def test_a_bad_ground_truth_is_an_error_and_not_a_zero(truth: object) -> None:
    result = verdict("#### 72", truth)
    assert result.score is None
    assert "ground_truth" in (result.error or "")


@given(st.text(alphabet="# 0123456789.,$-/e%ab\n", max_size=400), st.sampled_from(["strict", "flexible"]))
@settings(deadline=None)
def test_any_response_gets_a_score(response: str, method: str) -> None:
    assert verdict(response, "72", method=method).score in (0.0, 1.0)


@given(st.text(alphabet="0123456789.,$-/ ab", max_size=300))
@settings(deadline=None)
def test_looking_at_the_end_first_finds_the_same_number(text: str) -> None:
    everywhere = _ANYWHERE.findall(text)
    assert last_numeral(text) == (everywhere[-1] if everywhere else None)


@given(st.integers(min_value=-(10**9), max_value=10**9), st.text(alphabet="abc 123\n", max_size=200))
@settings(deadline=None)
def test_a_marked_answer_counts_whatever_stands_before(number: int, before: str) -> None:
    assert verdict(f"{before}\n#### {number:,}", str(number)).score == 1.0
