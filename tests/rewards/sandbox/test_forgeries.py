"""What a policy that is paid for passing might write instead of a solution, and right programs that look like it.

Every forgery scores 0, and is never an error of its row; every right program scores 1.
"""

from __future__ import annotations

import pytest

from roll.rewards.sandbox.snippets import CaseError
from tests.rewards.sandbox.conftest import Verdict, cases_of, truth_of

UNITTEST = """
from solution import *
import unittest
class T(unittest.TestCase):
    def test_a(self): self.assertEqual(f(2), 4)
    def test_b(self): self.assertTrue(f(3) == 9)
"""
ASSERTS = ["assert f(2) == 4", "from solution import f\nassert abs(f(3) - 9) < 1e-6", "assert f(3) in [9]"]
PYTEST = {"pytest": "import pytest\nfrom solution import *\ndef test_a():\n    assert f(2) == pytest.approx(4)\n"}
CALLS = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert not candidate(3) != 9"
NUMBERS = {"asserts": ASSERTS, "unittest": UNITTEST, "pytest": PYTEST, "calls": CALLS, "check": CHECK}
ON_NUMBERS, OTHERS, RIGHT = map(cases_of, ("forged_numbers", "forged_tests", "right_programs"))
EMPTY = "def f(x, *a):\n    x.clear()\n    return []"
assert len(ON_NUMBERS) + len(OTHERS) >= 120 and len(RIGHT) >= 50


@pytest.mark.long_rows("patched_harness")
@pytest.mark.parametrize("name", ON_NUMBERS)
def test_no_form_of_tests_is_forged(verdict: Verdict, name: str) -> None:
    for form, tests in NUMBERS.items():
        row = {"entry_point": "f"} if form == "check" else {}
        outcome = verdict(ON_NUMBERS[name]["source"], tests, row=row, case_timeout=3.0)
        assert outcome.passed == 0, (form, outcome)


@pytest.mark.parametrize("name", OTHERS)
def test_no_test_is_forged(verdict: Verdict, name: str) -> None:
    case = OTHERS[name]
    outcome = verdict(case.get("source", EMPTY), truth_of(case), row=case.get("row", {}), case_timeout=4.0)
    assert outcome.passed == 0, outcome


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(verdict: Verdict, name: str) -> None:
    case = RIGHT[name]
    options = {"row": case.get("row", {}), "wall": 20.0, "case_timeout": 15.0, "memory": 2**31}
    outcome = verdict(case["source"], truth_of(case), **options)
    assert outcome.pass_rate == 1.0, outcome


def test_tests_of_a_module_alone_are_an_error_of_their_row(verdict: Verdict) -> None:
    with pytest.raises(CaseError, match="test nothing"):
        verdict("def gcd(a, b): return 0", "from math import *\nfrom solution import *\nassert gcd(4, 6) == 2")
