import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.distributed.guard import is_alive
from roll.rewards import RewardResult, RewardSample, build_reward
from roll.rewards.answers import isolated_number, stated_answer
from roll.rewards.base import RewardFunction
from roll.rewards.math_rule import MathVerifier, Verdict
from roll.rewards.verifier_child import ANSWER_SECONDS
from tests.rewards.stated_cases import RIGHT, WRONG, rows_of
from tests.support.processes import have_ended


@pytest.fixture(scope="module")
def rule() -> Iterator[RewardFunction]:
    rule = build_reward("math_rule", {"format_score": 0.1, "timeout": 60})  # of a busy machine
    yield rule
    rule.close()


def verdict(rule: RewardFunction, response: str, ground_truth: object, prompt: str = "") -> RewardResult:
    (result,) = rule([RewardSample(prompt, response, ground_truth)])
    return result


HOSTILE: list[str] = [
    *Path(__file__).with_name("hostile_answers.txt").read_text(encoding="utf-8").splitlines(),
    r"\begin{pmatrix}" + r"\\".join("&".join("1" * 22) for _ in range(22)) + r"\end{pmatrix}",
    "(" * 200 + "1" + ")" * 200,
    "{" * 300 + "1" + "}" * 300,
    r"\sqrt{2+" * 40 + "2" + "}" * 40,
    r"\frac{1}{1+" * 60 + "x" + "}" * 60,
    "-" * 500 + "1",
]
"""Answers that a naive evaluation does not survive."""


@pytest.mark.long
def test_hostile_answers_are_wrong_at_once_and_keep_the_helper(rule: RewardFunction) -> None:
    verdict(rule, "\\boxed{x^2}", "x*x")
    helper = rule._verifier._process  # type: ignore[attr-defined]
    results: list[RewardResult] = []

    def score() -> None:
        for answer in HOSTILE:
            began = cpu_seconds(helper.pid)
            results.append(verdict(rule, rf"\boxed{{{answer}}}", "7"))
            spent.append(cpu_seconds(helper.pid) - began)

    spent: list[float] = []
    thread = threading.Thread(target=score)  # the limit holds off the main thread
    thread.start()
    thread.join()
    assert len(HOSTILE) >= 40
    assert [answer for answer, result in zip(HOSTILE, results, strict=True) if result.metrics["correct"] != 0.0] == []
    assert rule._verifier._process is helper  # type: ignore[attr-defined]
    assert helper.poll() is None
    slow = [answer for answer, seconds in zip(HOSTILE, spent, strict=True) if seconds > 0.5]
    assert len(slow) <= 6, f"a bound on size should refuse these before they are evaluated: {slow}"
    assert max(spent) < ANSWER_SECONDS + 0.5
    assert verdict(rule, "\\boxed{\\sqrt{8}}", "2\\sqrt{2}").score == 1.0


@pytest.mark.long
def test_an_answer_that_takes_all_cpu_time_is_wrong() -> None:
    verifier = MathVerifier(timeout=60)
    assert verifier.equivalent("x^2", "x*x").equal is True
    helper = verifier._process
    assert helper is not None
    helper.send_signal(signal.SIGSTOP)
    verdicts: list[Verdict] = []
    asking = threading.Thread(target=lambda: verdicts.append(verifier.equivalent("x^2", "x*x+1")))
    asking.start()
    helper.send_signal(signal.SIGXCPU)  # what the kernel sends to a process beyond its limit of CPU time
    helper.send_signal(signal.SIGCONT)
    asking.join()
    assert verdicts == [Verdict(equal=False)]
    verifier.close()


def cpu_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])  # deaf to everything else, or dead
def test_a_helper_that_does_not_answer_is_killed_and_replaced(number: signal.Signals) -> None:
    verifier = MathVerifier(timeout=2)
    assert verifier.equivalent("x^2", "x*x").equal is True
    helper = verifier._process
    assert helper is not None
    helper.send_signal(number)
    if number == signal.SIGSTOP:
        assert "timeout" in (verifier.equivalent("x^2", "x*x").error or "")
    assert helper.wait(30) < 0
    assert verifier.equivalent("x^2", "x*x").equal is True
    assert verifier._process is not helper
    verifier.close()


@pytest.mark.long
def test_closing_leaves_no_process() -> None:
    rule = build_reward("math_rule")
    rule([RewardSample("", "\\boxed{x^2}", "x*x")])
    helper = rule._verifier._process  # type: ignore[attr-defined]
    rule.close()
    assert helper.poll() is not None


@pytest.mark.long
def test_the_helper_ends_when_its_owner_is_killed() -> None:
    program = (
        "import time; from roll.rewards.math_rule import MathVerifier;"
        "v = MathVerifier(60); v.equivalent('x^2', 'x*x');"
        "print(v._process.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    helper = int(owner.stdout.readline())
    assert is_alive(helper)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert have_ended([helper])


NASTY = [
    tuple(line.split("\t"))
    for line in Path(__file__).with_name("nasty_cases.tsv").read_text(encoding="utf-8").splitlines()
]
"""``=`` (equal) or ``#``, answer, truth: verdicts known by hand."""
MISJUDGED = {
    ("y=2, x=1", "(1,2)"),
    ("3+4i", "3 + 4j"),
    ("one half", "\\frac12"),
    ("A=(1,2), B=(3,4)", "(1,2),(3,4)"),
    ("FF_{16}", "255"),
    ("two thirds", "2/3"),
    ("2h", "2"),
    ("1e5x", "100000x"),
    ("\\text{\\$}5", "5"),
    ("(-1)^{2n}", "1"),
    ("1_000", "1000"),
    ("2(cos60°+isin60°)", "1+\\sqrt3i"),
    ("5\\\\", "5"),
    ("5?", "5"),
    ("x=>1", "[1,\\infty)"),
    ("\\cos\\theta+i\\sin\\theta", "e^{i\\theta}"),
}
"""Those of which the rule says the opposite."""


@pytest.mark.long
@pytest.mark.default_rows("0")
@pytest.mark.parametrize("part", range(5))
def test_nasty_cases(rule: RewardFunction, part: int) -> None:
    assert len(NASTY) > 1000 and len(MISJUDGED) < 0.05 * len(NASTY)
    cases = NASTY[part::5]
    results = rule([RewardSample("", rf"So \boxed{{{answer}}}.", truth) for _, answer, truth in cases])
    assert all(result.metrics.get("answered") == 1.0 for result in results if result.error is None)
    found = [result.metrics.get("correct") for result in results]
    wrong = {case[1:] for case, verdict in zip(cases, found, strict=True) if verdict != float(case[0] == "=")}
    assert wrong == MISJUDGED & {case[1:] for case in cases}


def misjudged(rule: RewardFunction, cases: list[tuple[str, str]], right: bool) -> list[tuple[str, str]]:
    results = rule([RewardSample("", response, truth) for response, truth in cases])
    return [case for case, result in zip(cases, results, strict=True) if result.metrics.get("correct") != float(right)]


def test_answers_stated_outside_a_box(rule: RewardFunction) -> None:
    assert len(set(RIGHT)) >= 250
    assert len(set(WRONG)) >= 150
    wrong_numbers = [last_numeral(response) for response, _ in WRONG]
    assert [case for case, last in zip(WRONG, wrong_numbers, strict=True) if last != case[1]] == []
    # What remains: 5! without formula signs, where a sentence may end with an exclamation mark.
    assert misjudged(rule, RIGHT, True) == [("Answer: 5!", "120")]
    assert misjudged(rule, WRONG, False) == []


def last_numeral(text: str) -> str:
    """The last digits, whatever they belong to."""
    return re.findall(r"[0-9]+", text)[-1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *rows_of("number_cases", "stated"),
        *((text, None) for text in ("$" * 500, "\\(" * 500, "it is " + "7, " * 600, "4 = " * 500)),
        *(("the answer is " * 200, "the answer is"), ("$1$ " * 600, "1")),
    ],
)
def test_what_a_text_states(text: str, answer: str | None) -> None:
    began = time.process_time()
    assert stated_answer(text) == answer
    isolated_number(text)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(("text", "number"), rows_of("number_cases", "alone"))
def test_numbers_that_stand_alone(text: str, number: str | None) -> None:
    assert isolated_number(text) == number
