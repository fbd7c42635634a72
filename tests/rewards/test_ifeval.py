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
from roll.rewards.ifeval import follows, loosened
from roll.rewards.ifeval_instructions import CHECKS, count_sentences
from roll.rewards.rlvr_ifeval import FUNCTIONS, _spans

GERMAN = "Der Garten hinter dem Haus ist im Sommer voller Blumen und die Kinder spielen dort gern."
ENGLISH = "The garden behind the house is full of flowers in summer and the children like to play there."
FRENCH = "Le jardin derrière la maison est plein de fleurs en été et les enfants aiment y jouer."

CASES: dict[str, list[tuple[dict[str, Any], str, bool]]] = {
    "keywords:existence": [
        ({"keywords": ["sun", "Rain"]}, "Sunny, then RAIN.", True),
        ({"keywords": ["sun", "rain"]}, "Only sun.", False),
        ({"keywords": ["c++"]}, "I like C++.", True),
        ({"keywords": ["a.b", "(x)"]}, "a-b x", False),
    ],
    "keywords:frequency": [
        ({"keyword": "cat", "frequency": 2, "relation": "at least"}, "A cat, a Cat.", True),
        ({"keyword": "cat", "frequency": 3, "relation": "at least"}, "A cat, a Cat.", False),
        ({"keyword": "cat", "frequency": 2, "relation": "less than"}, "concatenate", True),
        ({"keyword": "cat", "frequency": 1, "relation": "less than"}, "concatenate", False),
        ({"keyword": "cat", "frequency": 2.0, "relation": "exactly"}, "cat cat", True),
        ({"keyword": "why?", "frequency": 2, "relation": "at least"}, "Why? Wh. WHY?", True),
        ({"keyword": "a.b", "frequency": 2, "relation": "at least"}, "a.b a-b", False),
    ],
    "keywords:forbidden_words": [
        ({"forbidden_words": ["bad"]}, "A badge is fine.", True),
        ({"forbidden_words": ["bad"]}, "Not BAD!", False),
        ({"forbidden_words": ["c++", "x"]}, "I know c++.", False),
    ],
    "keywords:letter_frequency": [
        ({"letter": "e", "let_frequency": 3, "let_relation": "at least"}, "Eee", True),
        ({"letter": "E", "let_frequency": 3, "let_relation": "less than"}, "eee", False),
        ({"letter": "!", "let_frequency": 1, "let_relation": "less than"}, "none", True),
    ],
    "language:response_language": [
        ({"language": "de"}, GERMAN, True),
        ({"language": "en"}, GERMAN, False),
        ({"language": "fr"}, FRENCH, True),
        ({"language": "ja"}, "これは日本語の文章です。とても短いです。", True),
        ({"language": "de"}, "12345", True),  # no language can be told: not held against it
    ],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, "relation": "at least"}, "One. Two!", True),
        ({"num_sentences": 3, "relation": "at least"}, "One. Two!", False),
        (
            {"num_sentences": 2, "relation": "less than"},
            "Dr. Smith met Mr. J. Jones at 5 p.m. in the U.S. embassy.",
            True,
        ),
        ({"num_sentences": 4, "relation": "less than"}, "Really?! Yes... No. Fine.", False),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "One\n***\nTwo", True),
        ({"num_paragraphs": 2}, "***\nOne\n***\nTwo\n***", True),
        ({"num_paragraphs": 3}, "One\n***\n\n***\nThree", False),
        ({"num_paragraphs": 1}, "One\n\nTwo", True),
    ],
    "length_constraints:number_words": [
        ({"num_words": 4, "relation": "at least"}, "It's three words", True),  # It, s, three, words
        ({"num_words": 4, "relation": "less than"}, "It's three words", False),
    ],
    "length_constraints:nth_paragraph_first_word": [
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"}, "Hello.\n\n'Weekend, here!", True),
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "week"}, "Hello.\n\nWeekend.", False),
        ({"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "b"}, "a\n\nb", False),
        ({"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "c"}, "a\n\nb", False),
        ({"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "b"}, "a\n\n\n\nb", False),
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, "Dear [name], at [address].", True),
        ({"num_placeholders": 2}, "Dear [name\n], at [address].", False),
        ({"num_placeholders": 1}, "none", False),
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "Bye.\np.s. one more thing", True),
        ({"postscript_marker": "P.S."}, "Bye.\nP. S. one more thing", True),
        ({"postscript_marker": "P.P.S"}, "Bye.\nP.P.S more", True),
        ({"postscript_marker": "P.P.S"}, "Bye.\nP.S. more", False),
        ({"postscript_marker": "P.S."}, "Bye.\nPS more", False),
    ],
    "detectable_format:number_bullet_lists": [
        ({"num_bullets": 2}, "* one\n  - two", True),
        ({"num_bullets": 2}, "* one\n* two\n* three", False),
        ({"num_bullets": 1}, "**bold**\n* one", True),
        ({"num_bullets": 1}, "*\none", True),
        ({"num_bullets": 1}, "1. one", False),
    ],
    "detectable_format:constrained_response": [
        ({}, "My answer is maybe.", True),
        ({}, "Well. My answer is yes. Indeed", True),
        ({}, "My answer is perhaps.", False),
        ({}, "my answer is yes.", False),
    ],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, "*one* and **two**", True),
        ({"num_highlights": 1}, "* * and ****", False),
        ({"num_highlights": 1}, "*not\nhere*", False),
    ],
    "detectable_format:multiple_sections": [
        ({"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1\na\nSECTION 2\nb", True),
        ({"section_spliter": "SECTION", "num_sections": 3}, "SECTION 1\na\nSECTION 2\nb", False),
        ({"section_spliter": "Day", "num_sections": 1}, "Day one", False),
    ],
    "detectable_format:json_format": [
        ({}, '{"a": [1, 2]}', True),
        ({}, '```json\n{"a": 1}\n```', True),
        ({}, 'Here it is: {"a": 1}', False),
        ({}, "[" * 100_000, False),
    ],
    "detectable_format:title": [
        ({}, "<<Poem of joy>>\nla", True),
        ({}, "<< >>", False),
        ({}, "<<broken\n>>", False),
        ({}, "<single>", False),
    ],
    "combination:two_responses": [
        ({}, "One\n******\nTwo", True),
        ({}, "Same\n******\nSame", False),
        ({}, "One\n******\nTwo\n******\nThree", False),
        ({}, "******\nOne\n******\nTwo", True),
        ({}, "One", False),
    ],
    "combination:repeat_prompt": [
        ({"prompt_to_repeat": "Write a poem."}, " write a POEM. Roses are red.", True),
        ({"prompt_to_repeat": "Write a poem."}, "Sure! Write a poem.", False),
    ],
    "startend:end_checker": [
        ({"end_phrase": "Is there anything else?"}, 'Yes. is there anything else?"', True),
        ({"end_phrase": "Is there anything else?"}, "Is there anything else? No.", False),
    ],
    "startend:quotation": [
        ({}, ' "All of it." ', True),
        ({}, '"Only" some', False),
        ({}, '"', False),
    ],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "at least"}, "NASA launched GPT-4.", True),
        ({"capital_frequency": 2, "capital_relation": "less than"}, "NASA launched it.", True),
        ({"capital_frequency": 1, "capital_relation": "less than"}, "I did.", False),
    ],
    "change_case:english_capital": [
        ({}, ENGLISH.upper(), True),
        ({}, ENGLISH, False),
        ({}, "DER GARTEN HINTER DEM HAUS IST IM SOMMER VOLLER BLUMEN UND KINDER SPIELEN DORT GERN.", False),
    ],
    "change_case:english_lowercase": [
        ({}, ENGLISH.lower(), True),
        ({}, ENGLISH, False),
        ({}, GERMAN.lower(), False),
    ],
    "punctuation:no_comma": [({}, "No comma; none.", True), ({}, "One, two", False)],
}


def test_all_types_are_there() -> None:
    assert len(CHECKS) == 25
    assert set(CASES) == set(CHECKS)
    assert len(FUNCTIONS) == 25
    assert {truth["func_name"] for truth, _, _ in OF_RLVR} == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("identity", "arguments", "text", "expected"),
    [(identity, *case) for identity, cases in CASES.items() for case in cases],
)
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


def of(name: str, /, **arguments: Any) -> dict[str, Any]:
    """A ground truth as RLVR-IFeval publishes it: the arguments of all functions, null where they are another's."""
    return {"func_name": name, **dict.fromkeys(("N", "quantifier", "word", "i", "options")), **arguments}


OF_RLVR: list[tuple[dict[str, Any], str, bool]] = [
    (of("verify_keywords", keyword_list=["sun", "Rain"]), "Sunny, then RAIN.", True),
    (of("verify_keywords", keyword_list=["sun", "rain"]), "Only sun.", False),
    (of("verify_keyword_frequency", word="Cat", N=2), "A cat, a CAT; concatenate.", True),  # whole words
    (of("verify_keyword_frequency", word="cat", N=3), "A cat, a CAT; concatenate.", False),
    (of("verify_keyword_frequency", word="well-known", N=1), "It is well-known.", False),  # no single word
    (of("validate_forbidden_words", forbidden_words=["bad"]), "A badge is fine.", False),  # inside a word as well
    (of("validate_forbidden_words", forbidden_words=["bad"]), "All is well.", True),
    (of("verify_letter_frequency", letter="e", N=2), "Eee", True),  # with its case
    (of("verify_letter_frequency", letter="E", N=3), "Eee", False),
    (of("validate_response_language", language="de"), GERMAN, True),
    (of("validate_response_language", language="en"), GERMAN, False),
    (of("validate_response_language", language="en"), "12345", False),
    (of("verify_paragraph_count", N=2), "One\n* * *\nTwo", True),
    (of("verify_paragraph_count", N=2), "One\n***\nTwo", False),  # IFEval's divider
    (of("verify_paragraph_count", N=3), "One\n* * *\n\n* * *\nThree", False),
    (of("verify_paragraph_count", N=2), "* * *\nOne\n* * *\nTwo", False),
    (of("validate_word_constraint", N=2, quantifier="at most"), "state-of-the-art, isn't", True),  # by white space
    (of("validate_word_constraint", N=3, quantifier="at least"), "state-of-the-art, isn't", False),
    (of("validate_word_constraint", N=20, quantifier="around"), "word " * 18, True),  # a tenth
    (of("validate_word_constraint", N=20, quantifier="around"), "word " * 17, False),
    (of("validate_word_constraint", N=4, quantifier="around"), "word " * 5, True),  # at least one
    (of("verify_sentence_constraint", N=30, quantifier="around"), "One. " * 31, True),  # one more or less, whatever N
    (of("verify_sentence_constraint", N=30, quantifier="around"), "One. " * 28, False),
    (of("verify_sentence_constraint", N=2, quantifier="at most"), "Mr. Smith came, e.g. today. Good.", True),
    (of("verify_sentence_constraint", N=2, quantifier="at least"), "no stop at all", False),
    (of("validate_paragraphs", N=2, i=2, first_word="Week"), "Hello.\n\nWeekend.", True),  # a beginning
    (of("validate_paragraphs", N=2, i=2, first_word="week"), "Hello.\n\nWeekend.", False),
    (of("validate_paragraphs", N=2, i=1, first_word="One"), "One.\n\n\n\nTwo.", False),  # three: one is empty
    (of("verify_postscript", postscript_marker="P.S."), "Bye.\nP.S. one more thing", True),
    (of("verify_postscript", postscript_marker="P.S."), "Bye.\np.s. one more thing", False),
    (of("verify_postscript", postscript_marker="P.S."), "Bye.\nP.S.", False),  # nothing after it
    (of("validate_placeholders", N=2), "Dear [name], at [].", True),
    (of("validate_placeholders", N=1), "Dear [name\n]", False),
    (of("verify_bullet_points", N=3), "* one\n  - two\n**bold** text", True),  # a line that begins with a star
    (of("verify_bullet_points", N=2), "* one\n  - two\n**bold** text", False),
    (of("validate_title"), "<<>>", True),
    (of("validate_title"), "<<broken\n>>", False),
    (of("validate_choice", options=["yes", "no"]), "I say yes", True),
    (of("validate_choice", options="['yes', 'no']"), "Yes", False),
    (of("validate_choice", options="(yes, no)"), "yes", True),
    (of("validate_highlighted_sections", N=2), "**bold**", True),
    (of("validate_highlighted_sections", N=2), "*one* and *two", False),
    (of("validate_sections", N=2, section_splitter="Section"), "SECTION 1\na\nsection 2\nb", True),
    (of("validate_sections", N=1, section_splitter="Day"), "Day one", False),
    (of("validate_json_format"), '{"a": 1}', True),
    (of("validate_json_format"), '```json\n{"a": 1}\n```', False),  # in no fence
    (of("validate_repeat_prompt", original_prompt="Write a poem."), "Write a poem. Roses", True),
    (of("validate_repeat_prompt", original_prompt="Write a poem."), "write a poem. Roses", False),
    (of("validate_two_responses"), "One\n******\nTwo", True),
    (of("validate_two_responses"), "******\nOne\n******\nTwo", False),
    (of("validate_uppercase"), GERMAN.upper(), True),  # in any language
    (of("validate_uppercase"), "123", True),
    (of("validate_lowercase"), GERMAN.lower(), True),
    (of("validate_lowercase"), ENGLISH, False),
    (of("validate_frequency_capital_words", N=2, quantifier="at least"), "NASA launched GPT-4.", True),
    (of("validate_frequency_capital_words", N=1, quantifier="at most"), "The U.S. agency", False),
    (of("validate_frequency_capital_words", N=1, quantifier="at most"), "NASA2 É I", True),
    (of("validate_end", end_phrase="Anything else?"), "Yes. Anything else?", True),
    (of("validate_end", end_phrase="Anything else?"), "Yes. anything else?", False),
    (of("validate_quotation"), '"', True),
    (of("validate_quotation"), '"Only" some', False),
    (of("validate_no_commas"), "a; b", True),
    (of("validate_no_commas"), "a, b", False),
]


@pytest.mark.parametrize(("truth", "text", "expected"), OF_RLVR)
def test_functions_of_rlvr_ifeval_judge_as_open_instruct_does(truth: dict[str, Any], text: str, expected: bool) -> None:
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
