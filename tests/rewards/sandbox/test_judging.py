"""Right and wrong programs against every shape of cases."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from roll.rewards import RewardSample, build_reward
from roll.rewards.code_sandbox import last_code_block
from roll.rewards.sandbox.client import Sandbox, Settings
from roll.rewards.sandbox.judging import read_cases
from roll.rewards.sandbox.snippets import CaseError
from tests.rewards.sandbox.conftest import Verdict, cases_of

PROGRAMS = cases_of("judging")
SOURCE, OWN_ERRORS = PROGRAMS["stack"]["source"], PROGRAMS["own_errors"]["source"]
PASSING, FAILING = PROGRAMS["passing"]["tests"], PROGRAMS["failing"]["tests"]


def test_asserts(verdict: Verdict) -> None:
    outcome = verdict(SOURCE, PASSING)
    assert outcome.passed == len(PASSING), outcome
    outcome = verdict(SOURCE, FAILING)
    assert outcome.passed == 0, outcome
    assert outcome.note.startswith("AssertionError")


@pytest.mark.parametrize(
    "expected", ["VeryMissing", "Missing", "Failure", "KeyError", "LookupError", "(ValueError, Failure)"]
)
def test_own_exceptions_are_caught_by_their_bases_and_keep_their_attributes(verdict: Verdict, expected: str) -> None:
    test = f"try:\n    find('a')\nexcept {expected} as error:\n    assert error.key == 'a' and 'no a' in str(error)"
    assert verdict(OWN_ERRORS, [f"{test}\nelse:\n    raise SystemError"]).passed == 1


def test_own_exceptions_are_not_caught_by_other_classes(verdict: Verdict) -> None:
    texts = [
        "try:\n    find('a')\nexcept ValueError:\n    pass",
        "try:\n    find('a')\nexcept Fatal:\n    pass",
        "try:\n    find('a')\nexcept Missing as error:\n    error.absent",
        "try:\n    find('a')\nexcept Missing as error:\n    assert error.key == 'b'",
    ]
    assert verdict(OWN_ERRORS, texts).passed == 0
    assert verdict(OWN_ERRORS, ["try:\n    stop()\nexcept Fatal as error:\n    assert str(error) == 'end'"]).passed == 1


def test_published_shapes_of_tests(verdict: Verdict) -> None:
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0"
    assert verdict(SOURCE, None, row={"test": check, "entry_point": "add"}).passed == 1
    mbpp = {"test_list": ["assert add(1, 2) == three", "assert add(1, 2) == 4"], "test_setup_code": "three = 3"}
    assert verdict(SOURCE, None, row=mbpp).pass_rate == 0.5
    rows = json.dumps([{"assert_code": "assert add(1, 2) == 3"}])
    assert verdict(SOURCE, None, row={"case_type": "assert", "test_cases": rows}).passed == 1
    assert verdict(SOURCE, "assert add(1, 2) == 3").passed == 1


def test_pytest_files(verdict: Verdict) -> None:
    text = PROGRAMS["pytest_file"]["pytest"]
    outcome = verdict(SOURCE, {"pytest": text}, wall=30.0, case_timeout=20.0)
    assert (outcome.passed, outcome.total) == (3, 5), outcome
    assert verdict("import os\nos._exit(0)", {"pytest": text}).passed == 0


def test_calls(verdict: Verdict) -> None:
    taco = {
        "fn_name": "add",
        "inputs": [[1, 2], ["a", "b"], [[1], [2]], [0.1, 0.2], [[], [5]]],
        "outputs": [[3], "ab", [1, 2], 0.3, [5]],
    }
    assert verdict(SOURCE, json.dumps(taco)).passed == 5
    method = "class Solution:\n    def add(self, a, b): return (a + b,)"
    live = [{"input": "1\n2", "output": "[3]", "testtype": "functional"}, {"input": "1\n2", "output": "[4]"}]
    row = {"metadata": json.dumps({"func_name": "add"}), "test_cases": json.dumps(live)}
    assert verdict(method, None, row=row).pass_rate == 0.5
    assert verdict("def other(): pass", json.dumps(taco)).passed == 0


def test_a_function_that_returns_nothing_is_judged_by_its_argument_in_every_case(verdict: Verdict) -> None:
    cases = json.dumps({"fn_name": "sort", "inputs": [[[3, 1]], [[1, 2]], [[7]]], "outputs": [[1, 3], [1, 2], [7]]})
    assert verdict("def sort(items): items.sort()", cases).passed == 3
    assert verdict("def sort(items): pass", cases).passed == 0
    # Right by chance in the second case; what it does in the third says nothing about the first.
    assert verdict("def sort(items):\n    if len(items) == 1: items.append(0)", cases).passed == 1


def test_calls_with_large_arguments(verdict: Verdict) -> None:
    cases = json.dumps({"fn_name": "length", "inputs": [["x" * 5_000_000]], "outputs": [5_000_000]})
    assert verdict("def length(text): return len(text)", cases).passed == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unittest", "pytest"])
def test_a_late_answer_is_not_taken_for_that_to_the_next_question(verdict: Verdict, kind: str) -> None:
    case = PROGRAMS["a_late_answer"]
    outcome = verdict(case["source"], {"pytest": case[kind]} if kind == "pytest" else [case[kind]], case_timeout=2.0)
    assert outcome.passed == 0 and outcome.timed_out, outcome


def test_a_response_that_has_ended_has_not_raised_what_a_test_expects(verdict: Verdict) -> None:
    test = "try:\n    double(1)\nexcept:\n    pass\nelse:\n    raise AssertionError"
    assert verdict("def double(n): raise ValueError", [test]).passed == 1
    assert verdict("import os\ndef double(n): os._exit(0)", [test]).passed == 0


def test_input_and_output(verdict: Verdict) -> None:
    source = "import sys\nfor line in sys.stdin:\n    print(float(line) / 3, ' ')\n"
    cases = [{"stdin": "3\n6\n", "expected_stdout": "1.0\n2.0"}, {"stdin": "1", "expected_stdout": "0.333333334"}]
    assert verdict(source, json.dumps(cases)).passed == 2
    assert verdict(source, json.dumps(cases), tolerance=0.0).passed == 1
    threads = "import threading\nthreading.Thread(target=lambda: print(input()[::-1])).start()"
    main = "def main():\n    print(input()[::-1])\nif __name__ == '__main__':\n    main()"
    for text in (threads, main):
        assert verdict(text, {"inputs": ["abc"], "outputs": ["cba"]}).passed == 1, text
    late = "print('cba')\nraise ValueError"
    assert verdict(late, {"inputs": ["abc"], "outputs": ["cba"]}).passed == 0, "a program that fails has not succeeded"
    large = {"inputs": ["x" * 3_000_000], "outputs": ["3000000"]}
    assert verdict("print(len(input()))", large).passed == 1


def test_other_programs_than_python(verdict: Verdict) -> None:
    assert shutil.which("sh")
    doubled = {"inputs": ["21", "4"], "outputs": ["42", "8"]}
    command: dict[str, Any] = {"command": ("sh", "main.sh"), "file_name": "main.sh"}
    assert verdict("read n; echo $(expr $n + $n)", doubled, **command).passed == 2
    assert verdict("echo 42; exit 1", doubled, **command).passed == 0
    assert verdict("exec cat /proc/1/environ /etc/shadow", {"inputs": [""], "outputs": ["x"]}, **command).passed == 0


@pytest.mark.long
def test_failures_are_told_apart(verdict: Verdict) -> None:
    doubled = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    assert verdict("def f(:", doubled).compile_error
    assert verdict("def f(:", ["assert f()"]).compile_error
    assert not verdict("raise ValueError", ["assert f()"]).compile_error
    slow = verdict("def f():\n    while True: pass", ["assert f()", "assert True"], case_timeout=0.5)
    assert slow.timed_out
    assert slow.passed == 0
    assert verdict("while True: pass", doubled, case_timeout=0.5).timed_out


@pytest.mark.parametrize(
    ("ground_truth", "row", "message"),
    [
        (None, {}, "the row has none of: test_cases, ground_truth"),
        ("[]", {}, "no test cases"),
        ('[{"question": 1}]', {}, "a case needs stdin or input"),
        ('{"inputs": [1], "outputs": []}', {}, "unknown shape"),
        ("[null]", {}, "unknown shape"),
        ("[1, 2]", {}, "unknown shape"),
        ('{"fn_name": "f", "inputs": ["{"], "outputs": ["1"]}', {}, "unknown shape"),
    ],
)
def test_rows_without_usable_cases(ground_truth: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        read_cases(ground_truth, row)


def test_readable_paths_can_be_read_and_no_more(verdict: Verdict, tmp_path: Path) -> None:
    for name in ("shown", "hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("42")
    more = Sandbox(Settings(readable=(str(tmp_path / "shown"),)))
    source = textwrap.dedent(f"""
        import os
        path = input() + "/file"
        for action in (lambda: print(open(path).read()), lambda: open(path, "w")):
            try:
                action()
            except OSError:
                print("no")
        print(len(os.listdir({str(tmp_path)!r})))
        """)
    cases = {"inputs": [str(tmp_path / "shown"), str(tmp_path / "hidden")], "outputs": ["42\nno\n1", "no\nno\n1"]}
    assert verdict(source, cases, more).passed == 2
    more.close()


@pytest.mark.long
def test_the_reward() -> None:
    reward = build_reward("code_sandbox", {"score": 2.0, "timeout": 20})
    row = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
    texts = {
        "```python\ndef f(n): return n + 1\n```": 2.0,
        "```python\ndef f(n): return 2\n```": 1.0,
        "<think>```python\ndef f(n): return 2\n```</think>It is\n```py\ndef f(n): return n + 1\n```\nand done": 2.0,
        "<think>```python\ndef f(n): return 2\n```": 0.0,
        "def f(n):\n    return n + 1": 2.0,
        "I do not know.": 0.0,
        "": 0.0,
    }
    results = reward([RewardSample("", text, None, row=row) for text in texts])
    assert [result.score for result in results] == list(texts.values())
    assert results[0].metrics == {"pass_rate": 1, "passed": 1, "answered": 1, "compile_error": 0, "timeout": 0}
    assert results[5].metrics["compile_error"] == 1
    (broken,) = reward([RewardSample("", "x = 1", None, row={})])
    assert broken.score is None
    assert "the row has none of" in (broken.error or "")
    reward.close()
    strict = build_reward("code_sandbox", {"partial": False})
    assert [r.score for r in strict([RewardSample("", text, None, row=row) for text in list(texts)[:2]])] == [1.0, 0.0]
    strict.close()


@pytest.mark.long
def test_a_sandbox_that_was_killed_starts_again(verdict: Verdict) -> None:
    killed = Sandbox()
    cases = {"inputs": ["1"], "outputs": ["1"]}
    assert verdict("print(input())", cases, killed).passed == 1
    assert killed._zygote is not None
    killed._zygote.kill()
    killed._zygote.wait()
    assert verdict("print(input())", cases, killed).passed == 1
    killed.close()


F = "```"
BLOCKS = {
    f"a\n{F}python\nx = 1\n{F}\nb\n{F}\ny = 2\n{F}": "x = 1",
    f"{F}python\nx = 1\n{F}\nOutput:\n{F}\n5\n{F}": "x = 1",
    f"{F}\nx = 1\n{F}\nOutput:\n{F}\n5\n7\n{F}": "x = 1",
    f"{F}python\nx = 1\n{F}\nor\n{F}python\ny = 2\n{F}": "y = 2",
    f"{F}python\nx = 1\n{F}\n{F}text\nout\n{F}": "x = 1",
    f"{F}\n5\n{F}": "5",
    f"{F}python\nx = 1": "x = 1",
    f"{F}PYTHON\nx = 1\n{F}\n{F}python\n": "x = 1",
    f"{F}PYTHON\nx = 1\n{F}\n{F}python\n{F}\n": "x = 1",
    f"1. So:\n   {F}python\n   if x:\n       y = 1\n   {F}": "if x:\n    y = 1",
    f"- {F}py\n  x = 1\n  {F}": "x = 1",
    f"> {F}py\n> if x:\n>     y = 1\n> {F}": "if x:\n    y = 1",
    f'{F}python title="main.py" {{1,2}}\nx = 1\n{F}': "x = 1",
    f"{F}python:main.py\nx = 1\n{F}": "x = 1",
    f"{F}{{.python .numberLines}}\nx = 1\n{F}": "x = 1",
    f"{F} python\nx = 1\n{F}": "x = 1",
    f"{F}python3.11\nx = 1\n{F}": "x = 1",
    f"{F}main.py\nx = 1\n{F}": "x = 1",
    f'{F}`python\nx = """\n{F}\n"""\n{F}`': f'x = """\n{F}\n"""',
    "~~~python\nx = 1\n~~~": "x = 1",
    f"So: {F}python\nx = 1{F}": "x = 1",
    f"{F}python\r\nx = 1\r\ny = 2\r\n{F}": "x = 1\ny = 2",
    f"{F}python\nx = 'a\u2028b'\n{F}": "x = 'a\u2028b'",
    f"{F}js\nx\n{F}": None,
    f"Use {F}x{F} here": None,
    "nothing": None,
}


@pytest.mark.parametrize("text", BLOCKS)
def test_the_last_block_of_code(text: str) -> None:
    assert last_code_block(text) == BLOCKS[text]


def test_blocks_of_other_languages() -> None:
    text = f"{F}js\nlet x\n{F}\n{F}python\nx = 1\n{F}\n{F}\n5\n{F}"
    assert last_code_block(text, ("js", "javascript")) == "let x"
    assert last_code_block(text, ("go",)) is None


@pytest.mark.parametrize(
    "text",
    [
        "`" * 300_000 + " x `",
        " " * 300_000 + "x ```python",
        "```\n" + " " * 300_000 + "=",
        "```\n" + "\n" * 300_000,
        ">" * 300_000 + "```python\n" + ">" * 300_000,
        "```\n" * 100_000,
        "~" * 300_000,
    ],
)
def test_hostile_fences_take_no_time(text: str) -> None:
    """Each would take hours if the time grew with the square of the length."""
    last_code_block(text)
