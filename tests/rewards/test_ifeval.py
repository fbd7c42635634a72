"""IFEval: cases at the edge of every instruction, with the verdict that the published checker gives."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.installation import install_command
from roll.rewards import RewardOptionError, RewardSample, build_reward
from roll.rewards.ifeval import CHECKS, FUNCTIONS, _spans, count_sentences, follows, loosened
from tests.rewards.stated_cases import rows_of

GERMAN = "Der Garten hinter dem Haus ist im Sommer voller Blumen und die Kinder spielen dort gern."
ENGLISH = "The garden behind the house is full of flowers in summer and the children like to play there."
FRENCH = "Le jardin derrière la maison est plein de fleurs en été et les enfants aiment y jouer."


CASES = [row[:4] for row in rows_of("ifeval_cases")]
"""Name, arguments, text and verdict; the reason behind it is not read."""
OF_IFEVAL = [*(case for case in CASES if ":" in case[0]), ["detectable_format:json_format", {}, "[" * 100_000, False]]
OF_RLVR = [case for case in CASES if ":" not in case[0]]


def test_all_types_are_there() -> None:
    assert {case[0] for case in OF_IFEVAL} == set(CHECKS) and len(CHECKS) == 25
    assert {case[0] for case in OF_RLVR} == set(FUNCTIONS) and len(FUNCTIONS) == 25


@pytest.mark.parametrize(("identity", "arguments", "text", "expected"), OF_IFEVAL)
def test_verdicts(identity: str, arguments: dict[str, Any], text: str, expected: bool) -> None:
    row = {"instruction_id_list": [identity], "kwargs": [arguments]}
    (result,) = build_reward("ifeval")([RewardSample("", text, row=row)])
    assert result.score == float(expected), result.error
    assert not follows(" \n", identity, arguments), "an empty response follows nothing"


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", 0),
        ("no stop at all", 1),
        ("One. And a rest", 2),
        ('He said "Stop." Then he left.', 2),
        ("Versions 2.5 and 3.1 came e.g. in May. Good.", 2),
        ("It was I. You knew.", 2),
        ("今天天气很好。我们去公园吧！", 2),
        ("- Item one.\n- Item two.\n", 2),
        ("etc.", 1),
    ],
)
def test_sentences(text: str, sentences: int) -> None:
    assert count_sentences(text) == sentences


def test_words() -> None:
    assert CHECKS["length_constraints:number_words"]("state-of-the-art, isn't it?", num_words=7, relation="exactly")
    # As NLTK cuts words: "DO", "N'T".
    capitals = CHECKS["change_case:capital_word_frequency"]
    assert capitals("The U.S. and NASA's I DON'T a1 A1", capital_frequency=6, capital_relation="exactly")
    assert capitals("`LOG_LEVEL=DEBUG` (A-B/C), IT'S GPT-4.", capital_frequency=5, capital_relation="exactly")


def test_loose_variants_are_the_published_eight() -> None:
    text = "Sure!\n*Body*\nBye."
    assert {text, *loosened(text)} == {
        text,
        "*Body*\nBye.",
        "Sure!\n*Body*",
        "*Body*",
        "Sure!\nBody\nBye.",
        "Body\nBye.",
        "Sure!\nBody",
        "Body",
    }


ROW = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation", "detectable_format:title"],
    "kwargs": [{"num_words": None, "relation": None}, {}, {}],
}


def test_strict_loose_and_partial() -> None:
    sample = RewardSample("", 'Sure, here it is:\n"<<Title>> text"', row=ROW)
    results = {
        (mode, partial): build_reward("ifeval", {"mode": mode, "partial": partial})([sample])[0]
        for mode in ("strict", "loose")
        for partial in (False, True)
    }
    assert {key: result.score for key, result in results.items()} == {
        ("strict", False): 0.0,
        ("strict", True): pytest.approx(1 / 3),
        ("loose", False): 1.0,
        ("loose", True): 1.0,
    }
    assert results["strict", True].metrics == {
        "strict": 0.0,
        "loose": 1.0,
        "instructions_strict": pytest.approx(1 / 3),
        "instructions_loose": 1.0,
    }


def test_the_thought_does_not_count() -> None:
    row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    rule = build_reward("ifeval")
    texts = ("<think>one, two</think>fine", "<think>fine", "fine")
    assert [r.score for r in rule([RewardSample("", text, row=row) for text in texts])] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "columns",
    [
        {"row": ROW},
        {"row": ROW | {"kwargs": json.dumps(ROW["kwargs"])}},
        {"ground_truth": ROW},
        {"ground_truth": json.dumps(ROW), "row": {"tag": "if"}},
    ],
)
def test_instructions_come_from_columns_or_from_the_ground_truth(columns: dict[str, Any]) -> None:
    (result,) = build_reward("ifeval")([RewardSample("", '"<<Title>> text"', **columns)])
    assert result.score == 1.0


@pytest.mark.parametrize(("name", "arguments", "text", "expected"), OF_RLVR)
def test_functions_of_rlvr_ifeval_judge_as_open_instruct_does(
    name: str, arguments: dict[str, Any], text: str, expected: bool
) -> None:
    # As published: the arguments of all functions, null where they are another's.
    truth = {"func_name": name, **dict.fromkeys(("N", "quantifier", "word", "i", "options")), **arguments}
    (result,) = build_reward("ifeval")([RewardSample("", text, json.dumps(truth))])
    assert result.score == float(expected), result.error


@given(st.text(alphabet="[]<>*a\n", max_size=40))
def test_marks_are_paired_as_by_a_lazy_expression(text: str) -> None:
    assert _spans(text, "[", "]") == len(re.findall(r"\[(.*?)\]", text))
    assert _spans(text, "*", "*") == len(re.findall(r"\*(.*?)\*", text))
    assert _spans(text, "<<", ">>") == len(re.findall(r"<<(.*?)>>", text))


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({}, "no instruction_id_list"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, "did you mean 'punctuation:no_comma'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "kwargs lack 'keywords'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": []}, "1 instructions but 0 kwargs"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "above"}],
            },
            "relation 'above': must be one of",
        ),
        (
            {"instruction_id_list": ["detectable_format:number_bullet_lists"], "kwargs": [{"num_bullets": "two"}]},
            "invalid literal",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_an_error(row: dict[str, Any], error: str) -> None:
    (result,) = build_reward("ifeval")([RewardSample("", "text", row=row)])
    assert result.score is None
    assert error in (result.error or "")


def test_without_langdetect_the_run_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RewardOptionError, match=re.escape(install_command("ifeval"))):
        build_reward("ifeval")
