import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards import RewardOptionError, RewardSample, build_reward
from roll.rewards.text_rules import word_f1


def score(name: str, response: str, truth: object = None, **options: object) -> float | None:
    (result,) = build_reward(name, options)([RewardSample("", response, truth)])
    return result.score


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{B. Paris}", "B"),
        (r"A looks good, but \boxed{B}", "(B)"),
        (r"\boxed{A, C}", "C,A"),
        (r"\boxed{A and C}", "AC"),
        (r"\boxed{AC}", "A, C"),
        ("The answer is B.", "B"),
        ("the answer is (B)", "B"),
        ("Answer: B", "B"),
        ("**Answer: B**", "B"),
        ("The answer is A. No: the answer is B.", "B"),
        ("<answer> B </answer>", "B"),
        ("<think>A. A. A</think> B", "B"),
        ("I think A is a trap.\nB.", "B"),
        ("It must be (B)", "B"),
    ],
)
def test_choices(response: str, truth: str) -> None:
    assert score("multiple_choice", response, truth) == 1.0


@pytest.mark.parametrize(
    "response", ["", "A cat sat on a mat", r"\boxed{42}", "<think> the answer is B", "The answer is a banana", "Bob."]
)
def test_no_choice(response: str) -> None:
    (result,) = build_reward("multiple_choice", {"format_score": 0.1})([RewardSample("", response, "B")])
    assert (result.score, result.metrics["answered"]) == (0.0, 0.0)


def test_choice_options() -> None:
    assert score("multiple_choice", r"\boxed{C}", "B", format_score=0.1) == 0.1
    assert score("multiple_choice", r"\boxed{A, C}", "A") == 0.0
    assert score("multiple_choice", "The answer is B.", "B", boxed_only=True) == 0.0
    assert score("multiple_choice", r"\boxed{B}", "Z") is None
    with pytest.raises(RewardOptionError, match="must be different letters"):
        build_reward("multiple_choice", {"choices": "A,B"})


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        ("<think>a</think> so <answer>c</answer>", 0.0),
        ("<answer>c</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_default_format(response: str, expected: float) -> None:
    assert score("format", response) == expected


def test_format_options() -> None:
    assert score("format", "a 12 b", pattern=r"\d+", mode="search") == 1.0
    assert score("format", "a 12 b", pattern=r"\d+", miss_score=-0.5) == -0.5
    with pytest.raises(RewardOptionError, match="not a regular expression"):
        build_reward("format", {"pattern": "("})


def test_a_pattern_that_never_ends_is_cut_off_and_reported() -> None:
    rule = build_reward("format", {"pattern": r"(a|b|ab)*c(\w+)*d", "timeout": 0.2})
    slow, quick = rule([RewardSample("", "ab" * 5000 + "c" + "x" * 5000), RewardSample("", "abcxd")])
    assert slow.score is None and "timeout" in (slow.error or "")
    assert quick.score == 1.0


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("The Eiffel  Tower!", "eiffel tower", 1.0),
        ("Eiffel", "Eiffel Tower", 0.0),
        ("Rome", ["Paris", "rome"], 1.0),
        ("<think>Rome?</think>Paris", "Paris", 1.0),
        (12, "12", 1.0),
    ],
)
def test_exact_match(response: object, truth: object, expected: float) -> None:
    assert score("exact_match", str(response), truth) == expected


def test_exact_match_options() -> None:
    assert score("exact_match", "Rome", "rome", normalize=False) == 0.0
    assert score("exact_match", r"It is \boxed{Rome}", "rome", source="boxed") == 1.0
    assert score("exact_match", "It is Rome", "rome", source="boxed") == 0.0
    assert score("exact_match", "Rome", None) is None


def test_f1_by_hand() -> None:
    # 2 of 3 words given are wanted, 2 of 4 wanted are given: F1 = 2*(2/3)*(1/2)/(2/3+1/2) = 4/7
    assert score("f1", "red green blue", "red green white black") == pytest.approx(4 / 7)
    assert score("f1", "red", ["blue", "red"]) == 1.0
    assert score("f1", "red red", "red") == pytest.approx(2 / 3)


@given(st.text(max_size=40), st.text(max_size=40))
@settings(deadline=None)
def test_f1_is_symmetric_and_bounded(one: str, other: str) -> None:
    value = word_f1(one, other)
    assert 0.0 <= value <= 1.0
    assert value == word_f1(other, one)
    assert word_f1(one, one) == 1.0
