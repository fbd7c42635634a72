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

from roll.rewards import RewardResult, RewardSample, build_reward
from roll.rewards.answers import after_thought, isolated_number, last_boxed, stated_answer
from roll.rewards.base import RewardFunction
from roll.rewards.math_rule import MathVerifier, Verdict
from roll.rewards.verifier_child import ANSWER_SECONDS
from tests.rewards.math_cases import CASES, HOSTILE
from tests.rewards.stated_cases import RIGHT, WRONG


@pytest.fixture(scope="module")
def rule() -> Iterator[RewardFunction]:
    rule = build_reward("math_rule", {"format_score": 0.1, "timeout": 10})
    yield rule
    rule.close()


def verdict(rule: RewardFunction, response: str, ground_truth: object, prompt: str = "") -> RewardResult:
    (result,) = rule([RewardSample(prompt, response, ground_truth)])
    return result


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}"),
        (r"\boxed{(1,2)\cup(3,4)}", r"(3,4)\cup(1,2)"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{-0.1\overline{36}}", r"-\frac{3}{22}"),
        (r"\boxed{4/11}", r"0.\overline{36}"),
        (r"\boxed{1-0.\bar{6}}", r"\frac13"),
        (r"\boxed{0.\overline{9}}", "1"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{1.0\times 10^3}", "1000"),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\boxed{ 7 }", "$7$"),
        (r"first \boxed{3}, no: \boxed{4}", "4"),
        ("it follows that\n#### 1,234", "1234"),
        ("So the answer is 7.", "7"),
        ("<think> \\boxed{3}, or not </think> \\boxed{4}", "4"),
        (r"\boxed{4}", r"We find \boxed{4}"),
    ],
)
def test_equivalent_answers_are_right(rule: RewardFunction, response: str, truth: str) -> None:
    assert verdict(rule, response, truth) == RewardResult(1.0, {"correct": 1.0, "answered": 1.0})


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        (r"\boxed{3}", "4"),
        (r"\boxed{(0,1)}", "[0,1)"),
        (r"\boxed{\pi}", "3.14159"),
        (r"\boxed{2/3}", "0.6667"),
        (r"\boxed{x+1}", "x-1"),
        (r"\boxed{\{1,2\}}", r"\{1,2,3\}"),
        (r"\boxed{4} and then \boxed{3}", "4"),
        (r"\boxed{\frac{}{}}", "4"),
        ("The first is 4, the second 5", "4"),
    ],
)
def test_other_answers_are_wrong(rule: RewardFunction, response: str, truth: str) -> None:
    assert verdict(rule, response, truth) == RewardResult(0.1, {"correct": 0.0, "answered": 1.0})


@pytest.mark.parametrize(
    ("response", "prompt"),
    [
        ("I do not know", ""),
        ("<think> it is \\boxed{4}", ""),
        ("it is \\boxed{4}", "<|im_start|>assistant\n<think>\n"),
        ("\\boxed{" + "4" * 2000 + "}", ""),
        ("It is 2 + 2, so the answer is \\boxed{4", ""),
        ("We get \\boxed{4", ""),
        ("", ""),
    ],
)
def test_no_answer_scores_zero(rule: RewardFunction, response: str, prompt: str) -> None:
    assert verdict(rule, response, "4", prompt) == RewardResult(0.0, {"correct": 0.0, "answered": 0.0})


def test_a_missing_or_meaningless_ground_truth_is_an_error(rule: RewardFunction) -> None:
    assert "no ground_truth" in (verdict(rule, "\\boxed{4}", None).error or "")
    assert "not a mathematical expression" in (verdict(rule, "\\boxed{4}", "}{").error or "")


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


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        ("2^{2000}", "4^{1000}", True),
        ("2^{1000000}", "4^{500000}", True),  # bounds are relative to the truth's own size
        ("20!", "2432902008176640000", True),
        (r"\binom{100}{50}", r"\frac{100!}{50!50!}", True),
        (r"\sum_{i=1}^{10} i", "55", True),
        ("(x+1)^{2023}", "(1+x)^{2023}", True),
        ("9^{9^{9^9}}", "7", False),
    ],
)
def test_large_but_honest_answers(rule: RewardFunction, truth: str, answer: str, right: bool) -> None:
    result = verdict(rule, rf"\boxed{{{answer}}}", truth)
    assert result.metrics == {"correct": float(right), "answered": 1.0}, result.error


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


def test_a_helper_that_does_not_interrupt_itself_is_killed_and_replaced() -> None:
    verifier = MathVerifier(timeout=2)
    assert verifier.equivalent("x^2", "x*x").equal is True
    helper = verifier._process
    assert helper is not None
    helper.send_signal(19)  # SIGSTOP: deaf to everything but SIGKILL
    assert "timeout" in (verifier.equivalent("x^2", "x*x").error or "")
    assert helper.poll() is not None
    assert verifier.equivalent("x^2", "x*x").equal is True
    verifier.close()


def test_a_helper_that_dies_is_replaced() -> None:
    verifier = MathVerifier(timeout=5)
    assert verifier.equivalent("x^2", "x*x").equal is True
    helper = verifier._process
    assert helper is not None
    helper.kill()
    helper.wait()
    assert verifier.equivalent("x^2", "x*x").equal is True
    assert verifier._process is not helper
    verifier.close()


def test_closing_leaves_no_process() -> None:
    rule = build_reward("math_rule")
    rule([RewardSample("", "\\boxed{x^2}", "x*x")])
    helper = rule._verifier._process  # type: ignore[attr-defined]
    rule.close()
    assert helper.poll() is not None


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\fbox{3}", "3"),
        (r"\boxed 5.", "5"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{}", ""),
        ("boxed{1}", None),
        (r"\boxed", None),
    ],
)
def test_boxes(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "prompt", "rest"),
    [
        ("x", "", "x"),
        ("a</think>b", "", "b"),
        ("<think>a</think>b", "", "b"),
        ("<think>a</think>b<think>c", "", None),
        ("<think>a", "", None),
        ("a", "... <think>\n", None),
        ("a</think>b", "... <think>\n", "b"),
    ],
)
def test_what_stands_after_the_thought(response: str, prompt: str, rest: str | None) -> None:
    assert after_thought(response, prompt) == rest


def test_the_helper_ends_when_its_owner_is_killed() -> None:
    program = (
        "import time; from roll.rewards.math_rule import MathVerifier;"
        "v = MathVerifier(60); v.equivalent('x^2', 'x*x');"
        "print(v._process.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    helper = int(owner.stdout.readline())
    assert runs(helper)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 30
    while runs(helper) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(helper)


def runs(process_id: int) -> bool:
    """True where a process exists and is more than a zombie."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("answer", "truth", "right"), CASES)
def test_hard_cases(rule: RewardFunction, answer: str, truth: str, right: bool) -> None:
    result = verdict(rule, rf"Therefore the answer is $\boxed{{{answer}}}$.", truth)
    assert result.metrics == {"correct": float(right), "answered": 1.0}, result.error


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
    ("\\text{A and B}", "A, B"),
    ("\\text{The answer is }5", "5"),
    ("two thirds", "2/3"),
    ("2h", "2"),
    ("1e5x", "100000x"),
    ("\\text{\\$}5", "5"),
    ("30^\\circ 30'", "30.5^\\circ"),
    ("(-1)^{2n}", "1"),
    ("1_000", "1000"),
    ("2(cos60°+isin60°)", "1+\\sqrt3i"),
    ("5P2", "20"),
    ("5\\\\", "5"),
    ("5?", "5"),
    ("x=>1", "[1,\\infty)"),
    ("\\cos\\theta+i\\sin\\theta", "e^{i\\theta}"),
    ("\\begin{cases}x=1\\\\y=2\\end{cases}", "(1,2)"),
}
"""Those of which the rule says the opposite."""


def test_nasty_cases(rule: RewardFunction) -> None:
    samples = [RewardSample("", rf"So \boxed{{{answer}}}.", truth) for _, answer, truth in NASTY]
    found = [result.metrics.get("correct") for result in rule(samples)]
    wrong = {case[1:] for case, verdict in zip(NASTY, found, strict=True) if verdict != float(case[0] == "=")}
    assert len(NASTY) > 900 and len(wrong) < 0.05 * len(NASTY)
    assert wrong == MISJUDGED


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


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("The answer is 5 m.", "500 cm", True),
        ("The answer is 5 m.", "5 cm", False),
        ("The answer is $5$ m.", "5 cm", False),
        ("The answer is 5 m.", "5", True),
        ("The answer is 12 apples.", "12", True),
        ("It takes 3 hours.", "3", True),
        ("Thus it is $\\sqrt{2}$ hours.", "60\\sqrt{2} minutes", True),
        ("The answer is ½.", "0.5", True),
        ("Answer: 1½", "1.5", True),
        ("The final answer is 2π.", "2\\pi", True),
        ("The answer is 1.6e-19 C.", "9.1e-31", False),
        ("#### 3e8", "3\\times10^8", True),
    ],
)
def test_units_and_characters_outside_a_box(rule: RewardFunction, response: str, truth: str, right: bool) -> None:
    assert verdict(rule, response, truth).metrics == {"correct": float(right), "answered": 1.0}


def last_numeral(text: str) -> str:
    """The last digits, whatever they belong to."""
    return re.findall(r"[0-9]+", text)[-1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is $3$", "3"),
        ("It costs $5 and then $6.", None),
        ("I give up", None),
        ("There are 7 of them and that is good", "7"),
        ("$" * 500, None),
        ("\\(" * 500, None),
        ("the answer is " * 200, "the answer is"),
        ("$1$ " * 600, "1"),
        ("it is " + "7, " * 600, None),
        ("4 = " * 500, None),
    ],
)
def test_what_a_text_states(text: str, answer: str | None) -> None:
    began = time.process_time()
    assert stated_answer(text) == answer
    isolated_number(text)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It costs $5 and then $6.", "$6"),
        ("The first is 4, the second 5", "5"),
        ("3 + 4 = 7 (by rule 2).", "7"),
        ("it is 2^10", None),
        ("it lies in [0, 5]", None),
        ("it is 10:30", None),
        ("It is 7. See $x$.", None),
        ("It is 7.\nSo \\frac{1}{7}", None),
    ],
)
def test_numbers_that_stand_alone(text: str, number: str | None) -> None:
    assert isolated_number(text) == number
