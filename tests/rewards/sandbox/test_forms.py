"""Forms in which data sets write tests and models write programs: a right program scores 1, a wrong one 0.

A form that cannot work between two processes is an error of its row for every program, never a score.
"""

from __future__ import annotations

import textwrap

import pytest

from roll.rewards.sandbox.judging import read_cases
from roll.rewards.sandbox.snippets import CaseError
from tests.rewards.sandbox.conftest import Verdict, cases_of, truth_of

FORMS, UNUSABLE = cases_of("forms"), cases_of("unusable_tests")
assert len(FORMS) >= 60
ADD, BAD_ADD = "def add(a, b): return a + b", "def add(a, b): return a - b - 1"


@pytest.mark.parametrize("name", FORMS)
def test_right_and_wrong_programs(verdict: Verdict, name: str) -> None:
    tests, options = truth_of(FORMS[name]), {"row": FORMS[name].get("row", {}), "wall": 20.0, "case_timeout": 15.0}
    right = verdict(FORMS[name].get("right", ADD), tests, **options)
    assert right.pass_rate == 1.0, right
    wrong = verdict(FORMS[name].get("wrong", BAD_ADD), tests, **options)
    assert wrong.pass_rate < 1.0, wrong
    if not (isinstance(tests, dict) and len(tests.get("inputs", ())) > 1):
        assert wrong.passed == 0, wrong
    for nothing in ("pass", "def unrelated(): pass", "import os\nos._exit(0)"):
        assert verdict(nothing, tests, **options).passed == 0


@pytest.mark.parametrize("name", [name for name, case in UNUSABLE.items() if "right" not in case])
def test_tests_that_cannot_judge_are_errors(name: str) -> None:
    with pytest.raises(CaseError, match=UNUSABLE[name]["error"]):
        read_cases(truth_of(UNUSABLE[name]), {})


@pytest.mark.parametrize("name", [name for name, case in UNUSABLE.items() if "right" in case])
def test_what_cannot_be_handed_over_is_an_error(verdict: Verdict, name: str) -> None:
    with pytest.raises(CaseError, match=UNUSABLE[name]["error"]):
        verdict(UNUSABLE[name]["right"], truth_of(UNUSABLE[name]))


def test_a_set_up_that_fails_by_itself_is_an_error(verdict: Verdict) -> None:
    row = {"test_list": ["assert add(1, 2) == three"], "test_setup_code": "three = {}['three']"}
    with pytest.raises(CaseError, match="the set-up fails by itself: KeyError"):
        verdict(ADD, None, row=row)
    row["test_setup_code"] = "three = add(1, 2)[0]"
    assert verdict(ADD, None, row=row).passed == 0, "what it makes of the response is the response's"


def test_each_test_of_a_text_is_a_case(verdict: Verdict) -> None:
    functions = "def test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert add(1, 2) == 4"
    assert verdict(ADD, functions).pass_rate == 0.5
    methods = "import unittest\nclass T(unittest.TestCase):\n" + textwrap.indent(
        "def test_a(self): self.assertEqual(add(1, 2), 3)\ndef test_b(self): self.assertEqual(add(1, 2), 4)\n"
        "@unittest.skip('no pass')\ndef test_c(self): pass",
        "    ",
    )
    assert (verdict(ADD, methods).passed, verdict(ADD, methods).total) == (1, 3)
    assert verdict(ADD, ["import math", "assert add(1, 2) == 3", "assert add(1, 2) == 4"]).pass_rate == 0.5
