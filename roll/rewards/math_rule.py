"""Mathematical answers: found in the response, compared as numbers or texts, else by symbolic equivalence, which a
persistent helper process decides within a hard limit of time."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal

from roll.rewards.answers import (
    after_thought,
    isolated_number,
    last_boxed,
    last_marked,
    other_notation,
    parse_number,
    stated_answer,
    tagged_answer,
    value_in_base,
    without_periods,
)
from roll.rewards.base import RewardResult, RewardRule, RewardSample, failure

_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|\$|\\[()\[\]]|\s+|\.$")
_STYLES = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac"}
_NAMES = {"\\varnothing": "\\emptyset", "°": "^\\circ", "\\degree": "^\\circ", "−": "-", "∞": "\\infty", "π": "\\pi"}
_BOLD = re.compile(r"\\(?:boldsymbol|mathbf|bm|bf|pmb)\s*\{([^{}]*)\}")
_PERCENT = re.compile(r"\s*(?:\\text\{\s*)?per\s?cent(?:\s*\})?\s*$", re.IGNORECASE)
# "\textbf{(C)}\ 5", as the answers of multiple-choice contests are printed, and "(C) 5": what stands behind the letter
# counts.
_CHOICE = re.compile(
    r"^\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(?[A-Z]\)?\s*\}\s*(?:\\[ ,;:!]|\\q?quad|[:.)])?\s*(?=\S)"
    r"|^\([A-J]\)\s+(?=[-$0-9]|\\d?frac|\\sqrt)"
)


def canonical(expression: str) -> str:
    """The expression without emphasis, a choice's letter in front, and other names of the same symbol."""
    for name, usual in _NAMES.items():
        expression = expression.replace(name, usual)
    expression = _CHOICE.sub("", expression.strip(), count=1)
    expression = _BOLD.sub(r"\1", expression)
    return without_periods(_PERCENT.sub(r"\\%", expression))


def plain(expression: str) -> str:
    """Spelling without layout: spaces, dollars, ``\\left``, ``\\dfrac`` for ``\\frac``."""
    for styled, simple in _STYLES.items():
        expression = expression.replace(styled, simple)
    return _LAYOUT.sub("", expression.strip())


MAX_ANSWER = 1000
"""Characters; no answer to a question is longer, and algebra on it would only cost time."""

_SOURCES: dict[str, Callable[[str], str | None]] = {
    "boxed": last_boxed,
    "marked": last_marked,
    "tagged": tagged_answer,
    "stated": stated_answer,
    "number": isolated_number,
}
Source = Literal["boxed", "marked", "tagged", "stated", "number"]


@dataclass
class MathRule(RewardRule):
    r"""1 for an answer equivalent to the ground truth, ``format_score`` for another one, 0 where none is found.

    The answer is what the first of ``sources`` finds after the thought (``</think>``); a thought that never ends has no
    answer.  Numbers are compared exactly; what is not decided by that or by equal spelling goes to math-verify in a
    process of its own.
    """

    numbers: ClassVar[tuple[str, ...]] = ("correct", "answered")
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    score: float = 1.0
    format_score: float = 0.0
    """Score of an answer that is found but wrong."""
    sources: list[Source] = field(default_factory=lambda: ["boxed", "marked", "stated", "number"])
    """``boxed`` (``\boxed{}``), ``marked`` (``####``), ``tagged`` (``<answer>``), ``stated`` (``The answer is $3$.``),
    ``number`` (the last one of a sentence without formulas, where the ground truth is a number)."""
    timeout: float = 5.0
    """Seconds for one comparison."""

    def __post_init__(self) -> None:
        self._verifier = MathVerifier(self.timeout)

    def judge(self, sample: RewardSample) -> RewardResult:
        if sample.ground_truth is None:
            return failure("math_rule: the row has no ground_truth")
        gold, is_number = read_truth(str(sample.ground_truth))
        # Numbers in prose say nothing about a truth that is none.
        sources = self.sources if is_number else [source for source in self.sources if source != "number"]
        answer = find_answer(sample.response, sample.prompt, sources)
        if answer is None or len(answer) > MAX_ANSWER:
            return RewardResult(0.0, {"correct": 0.0, "answered": 0.0})
        answer = canonical(answer)
        equal = compare_quickly(gold, answer)
        if equal is None:
            verdict = self._verifier.equivalent(gold, answer)
            if verdict.error is not None:
                return failure(f"math_rule: {verdict.error}")
            equal = bool(verdict.equal)
        return RewardResult(self.score if equal else self.format_score, {"correct": float(equal), "answered": 1.0})

    def close(self) -> None:
        self._verifier.close()


def find_answer(response: str, prompt: str, sources: Sequence[str]) -> str | None:
    """The answer of the first source that has one."""
    text = after_thought(response, prompt)
    if text is None:
        return None
    return next((found for found in (_SOURCES[source](text) for source in sources) if found), None)


@lru_cache(maxsize=4096)
def read_truth(ground_truth: str) -> tuple[str, bool]:
    """The ground truth as it is compared, and whether it is a numeral."""
    gold = canonical(clean_truth(ground_truth))
    return gold, parse_number(plain(gold)) is not None


def clean_truth(ground_truth: str) -> str:
    """A ground truth may itself be a worked solution that ends in a box or behind ``####``."""
    return (last_boxed(ground_truth) or last_marked(ground_truth) or ground_truth).strip().strip("$").strip()


def compare_quickly(gold: str, answer: str) -> bool | None:
    """The verdict where it needs no algebra: two numerals, the answer's also in another notation, both in a base of
    their own, or the same spelling up to layout; else None."""
    left, right = parse_number(plain(gold)), parse_number(plain(answer))
    if left is not None and right is not None:
        # With one percent sign both readings are right: 50% for 0.5, and 50% for "what percentage?" with the truth 50.
        if ("%" in gold) != ("%" in answer):
            part, whole = (left, right) if "%" in gold else (right, left)
            return whole in (part, part / 100)
        return left == right
    if left is not None and "%" not in gold and (value := other_notation(answer)) is not None:
        return value == left
    bases = value_in_base(gold), value_in_base(answer)
    if None not in bases:
        return bases[0] == bases[1]
    return True if plain(gold) == plain(answer) else None


logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds that the process may take to start; loading the algebra packages takes about one."""
KILL_GRACE = 1.0
"""Seconds beyond the limit before a process that does not interrupt itself is killed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Exactly one of ``equal`` and ``error`` is set."""

    equal: bool | None = None
    error: str | None = None


class MathVerifier:
    """One helper process, started at first use and again when it had to be killed.

    Calls may come from any thread; they are answered one after the other.  The limit works off the main thread, where
    signals do not.
    """

    def __init__(self, timeout: float) -> None:
        """
        Args:
            timeout: seconds of wall time for one comparison.
        """
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def equivalent(self, gold: str, answer: str) -> Verdict:
        """Equality of ``answer`` and ``gold``. An error is a timeout of wall time, a crash, or an unreadable
        ``gold``; an answer on which the process spends all of its CPU time does not say the same."""
        verdict, cpu_is_spent = self._ask(gold, answer)
        if cpu_is_spent and self._ask(gold, gold)[0].equal:
            return Verdict(equal=False)
        return verdict

    def _ask(self, gold: str, answer: str) -> tuple[Verdict, bool]:
        """The verdict, and whether the kernel ended the process for the CPU time that it used."""
        request = json.dumps({"gold": gold, "answer": answer, "timeout": self._timeout}) + "\n"
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                process.stdin.write(request.encode())
                process.stdin.flush()
                line = self._read_line(process, self._timeout + KILL_GRACE)
            except (BrokenPipeError, EOFError):
                status = self._stop()
                return Verdict(error="the verifier process died"), status == -signal.SIGXCPU
            except TimeoutError:
                self._stop()
                return Verdict(error=f"timeout: no verdict within {self._timeout:g} s"), False
        reply = json.loads(line)
        if "equal" in reply:
            return Verdict(equal=reply["equal"]), False
        if reply.get("timeout"):
            return Verdict(error=f"timeout: no verdict within {self._timeout:g} s"), False
        return Verdict(error=reply["error"]), False

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "roll.rewards.verifier_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        weakref.finalize(self, end_process, self._process)
        self._read_line(self._process, START_TIMEOUT)
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], timeout: float) -> bytes:
        """The next line.

        Raises:
            TimeoutError: none within ``timeout`` seconds.
            EOFError: the process has ended.
        """
        assert process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                raise EOFError
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _stop(self) -> int | None:
        """End the process; its exit status, negative for a signal."""
        process, self._process, self._received = self._process, None, b""
        if process is None:
            return None
        end_process(process)
        return process.returncode

    def close(self) -> None:
        """End the helper process."""
        with self._lock:
            self._stop()


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                logger.debug("the verifier process had gone before its last request was written")
