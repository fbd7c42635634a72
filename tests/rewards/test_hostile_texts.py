"""Degenerate responses (endless repetition is what a policy writes when training goes wrong) cost linear time, and no
response of any kind makes a rule fail."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards import RewardSample, build_reward
from roll.rewards.base import RewardFunction
from roll.rewards.ifeval import RULES

LENGTH = 60_000
PIECES = [
    *("\\boxed{", "\\boxed", "{", "}", "<answer>", "</answer>", "<think>", "</think>", "#### ", "####\n"),
    *("answer is ", "answer:", "answer", " ", "\n", "A ", "A, ", "(", "1", "1,", "1/", "1.", "$", "-", "the ", "."),
    *("! ", "Mr. ", "[", "<<", "*", "***", "- ", '"'),
]
TEXT_RULES: list[tuple[str, dict[str, object]]] = [
    ("gsm8k_rule", {"method": "flexible"}),
    ("gsm8k_rule", {"method": "flexible", "compare": "string"}),
    ("multiple_choice", {}),
    ("format", {}),
    ("exact_match", {"source": "boxed"}),
    ("f1", {"source": "tagged"}),
    ("crossthinkqa", {}),
    ("repetition_penalty", {"n": 3}),
    ("ifeval", {}),
    ("detection", {}),
]
TRUTHS = {"gsm8k_rule": "1", "detection": "[[0, 0, 1, 1]]"}
COUNTS = """
    frequency let_frequency num_sentences num_paragraphs num_words nth_paragraph num_placeholders num_bullets
    num_highlights num_sections capital_frequency N i
"""
WORDS = "keyword letter first_word prompt_to_repeat end_phrase word original_prompt"
ROW = {
    "instruction_id_list": [name for name in RULES if not name.endswith("response_language")],
    "kwargs": [
        {
            **dict.fromkeys(COUNTS.split(), 1),
            **dict.fromkeys(WORDS.split(), "a"),
            **{key: ["a"] for key in ("keywords", "forbidden_words", "keyword_list", "options")},
            **dict.fromkeys(("relation", "let_relation", "capital_relation"), "at least"),
            **dict.fromkeys(("section_spliter", "section_splitter"), "Section"),
            "postscript_marker": "P.S.",
            "quantifier": "around",
        }
    ]
    * (len(RULES) - 2),
}
"""Every instruction whose time is ours: the package that tells languages reads ten thousand characters."""


@pytest.fixture(scope="module")
def math_rule() -> Iterator[RewardFunction]:
    rule = build_reward("math_rule", {"sources": ["boxed", "marked", "tagged", "number"], "timeout": 10})
    yield rule
    rule.close()


@pytest.mark.parametrize("piece", PIECES)
def test_long_repetitions_take_linear_time(math_rule: RewardFunction, piece: str) -> None:
    repeated = piece * (LENGTH // len(piece))
    texts = (repeated, "answer is" + repeated + "A", "\\boxed{" + repeated)
    samples = [RewardSample("", text, "A", row=ROW) for text in texts]
    began = time.process_time()
    for name, options in TEXT_RULES:
        build_reward(name, options)(samples)
    math_rule(samples)
    # Milliseconds where time is linear; a quadratic search of 60,000 characters takes minutes.
    assert time.process_time() - began < 5


@pytest.mark.long
@given(
    st.lists(st.sampled_from([*PIECES, "x^2", "\\frac{1}{2}", "B", "é", "\ud800", "\x00"]), max_size=30).map("".join)
)
@settings(deadline=None)
def test_no_text_makes_a_rule_fail(text: str) -> None:
    for name, options in TEXT_RULES:
        truth = TRUTHS.get(name, "A")
        (result,) = build_reward(name, options)([RewardSample("", text, truth, row=ROW)])
        assert result.score is not None


@given(st.lists(st.sampled_from([*PIECES, "x^2", "B", "\ud800", "\x00"]), max_size=12).map("".join))
@settings(deadline=None, max_examples=50)
def test_no_text_breaks_the_math_rule(math_rule: RewardFunction, text: str) -> None:
    (first, second) = math_rule([RewardSample("", text, "x+1"), RewardSample("", "\\boxed{1+x}", "x+1")])
    assert first.score is not None or first.error
    assert second.score == 1.0
