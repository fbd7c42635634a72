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
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Literal

from roll.datasets.forms import last_boxed, last_marked
from roll.rewards.answers import SOURCES, after_thought, other_notation, value_in_base
from roll.rewards.base import CURRENCIES, NUMERAL, RewardResult, RewardRule, RewardSample, failure, parse_number
from roll.rewards.notation import canonical, choice_in_front, plain, top_level_items
from roll.rewards.units import quantity

MAX_ANSWER = 1000  # characters; no answer to a question is longer, and algebra on it would only cost time

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
    format_score: float = 0.0  # score of an answer that is found but wrong
    sources: list[Source] = field(default_factory=lambda: ["boxed", "marked", "stated", "number"])
    """``boxed`` (``\boxed{}``), ``marked`` (``####``), ``tagged`` (``<answer>``), ``stated`` (``The answer is $3$.``),
    ``number`` (the last one of a sentence without formulas, where the ground truth is a number)."""
    timeout: float = 5.0  # seconds for one comparison

    def __post_init__(self) -> None:
        self._verifier = MathVerifier(self.timeout)

    def judge(self, sample: RewardSample) -> RewardResult:
        if sample.ground_truth is None:
            return failure("math_rule: the row has no ground_truth")
        gold, is_number = read_truth(str(sample.ground_truth))
        # Numbers in prose say nothing about a truth that is none.
        sources = self.sources if is_number else [source for source in self.sources if source != "number"]
        text = after_thought(sample.response, sample.prompt) or ""
        answer = next((found for found in (SOURCES[source](text) for source in sources) if found), None)
        if answer is not None and len(top_level_items(gold)) > 1 and answer == last_boxed(text):
            answer = ", ".join(neighbouring_boxes(text))
        if answer is None or len(answer) > MAX_ANSWER:
            return RewardResult(0.0, {"correct": 0.0, "answered": 0.0})
        found, truth = canonical(answer), str(sample.ground_truth)
        # A letter alone is compared with the letter in front of a value.
        if gold in _CHOICES:
            found = choice_in_front(answer) or found
        elif found in _CHOICES:
            gold = choice_in_front(last_boxed(truth) or truth) or gold
        verdict = equivalent(gold, found, self._verifier)
        if verdict.error is not None:
            return failure(f"math_rule: {verdict.error}")
        score = self.score if verdict.equal else self.format_score
        return RewardResult(score, {"correct": float(bool(verdict.equal)), "answered": 1.0})

    def prepare(self) -> str:
        self._verifier.start()
        return ""

    def close(self) -> None:
        self._verifier.close()


def neighbouring_boxes(text: str) -> list[str]:
    r"""The last box, after those that a comma or a word joins to it, as in ``$x = \boxed{1}$ or $x = \boxed{2}$``."""
    found: list[str] = []
    joined: re.Match[str] | None = None
    while (content := last_boxed(text)) and (joined is None or text.endswith(f"{content}}}")):
        found.insert(0, content)
        before = text[: max(text.rfind("\\boxed"), text.rfind("\\fbox"))]
        joined = _JOINED_TO_BOX.search(before)
        text = before[: joined.start() + 1] if joined else ""
    return found


@lru_cache(maxsize=4096)
def read_truth(ground_truth: str) -> tuple[str, bool]:
    """The ground truth as it is compared, and whether it is a numeral."""
    # A ground truth may itself be a worked solution that ends in a box or after `####`.
    gold = canonical((last_boxed(ground_truth) or last_marked(ground_truth) or ground_truth).strip().strip("$").strip())
    return gold, parse_number(plain(gold)) is not None


def equivalent(gold: str, answer: str, verifier: MathVerifier) -> Verdict:
    """Equality of two expressions in their :func:`~roll.rewards.notation.canonical` form, by the ``verifier`` where it
    needs algebra."""
    quick = compare_quickly(gold, answer)
    if quick is not None:
        return Verdict(quick)
    for left, right in readings(gold, answer):
        quick = compare_quickly(left, right)
        verdict = Verdict(quick) if quick is not None else verifier.equivalent(left, right)
        if verdict.equal or verdict.error is not None:
            return verdict
    return Verdict(False)


def compare_quickly(gold: str, answer: str) -> bool | None:
    """The verdict where it needs no algebra: two numerals, the answer's also in another notation, both in a base of
    their own, or the same spelling up to layout, of words in any case; else None."""
    left, right = parse_number(plain(gold)), parse_number(plain(answer))
    if left is not None and right is not None:
        # With one percent sign both readings are right: 50% for 0.5, and 50% for "what percentage?" with the truth 50.
        if ("%" in gold) != ("%" in answer):
            part, whole = (left, right) if "%" in gold else (right, left)
            return whole in (part, part / 100)
        currencies = [_CURRENCY.findall(text) for text in (gold, answer)]
        return left == right and (currencies[0] == currencies[1] or [] in currencies)
    if left is not None and "%" not in gold and (value := other_notation(answer)) is not None:
        return value == left
    bases = value_in_base(gold), value_in_base(answer)
    if None not in bases:
        return bases[0] == bases[1]
    if plain(gold) == plain(answer):
        return True
    if _DATE.fullmatch(gold) and _DATE.fullmatch(answer):
        return [int(part) for part in _DIGITS.findall(gold)] == [int(part) for part in _DIGITS.findall(answer)]
    if _RATIO.fullmatch(gold) and _RATIO.fullmatch(answer):
        shares = [[Fraction(int(part)) for part in _DIGITS.findall(side)] for side in (gold, answer)]
        return [part * sum(shares[1]) for part in shares[0]] == [part * sum(shares[0]) for part in shares[1]]
    if len(gold) == len(answer) == 1 and (gold + answer).isalpha():
        return gold.casefold() == answer.casefold()
    if _SEVERAL_CHOICES.fullmatch(gold) and _SEVERAL_CHOICES.fullmatch(answer):
        return sorted(_CAPITAL.findall(gold)) == sorted(_CAPITAL.findall(answer))
    if any(_SET.fullmatch(one) and _PAIR.fullmatch(other) for one, other in ((gold, answer), (answer, gold))):
        return False
    words = [_WORDS.fullmatch(text) for text in (gold, answer)]
    if words[0] and words[1]:
        return words[0].group(1).casefold() == words[1].group(1).casefold() or None
    return None


def readings(gold: str, answer: str) -> list[tuple[str, str]]:
    """Pairs of expressions of which one must be equal: without what both sides say about unit, modulus and percent, or
    what only one says, where the other leaves it open. Empty: units of another dimension, another modulus."""
    (left, unit), (right, own) = quantity(gold), quantity(answer)
    # "2 t" may be a product; against an expression with letters it is one.
    if unit is not None and own is None and not unit.is_sure and _LETTERS.search(answer):
        left, unit = gold, None
    if own is not None and unit is None and not own.is_sure and _LETTERS.search(gold):
        right, own = answer, None
    if unit is not None and own is not None:
        angles = {"degree": r"\cdot\pi/180", "radian": ""}
        kinds = [dict(one.dimension).keys() for one in (unit, own)]
        if kinds[0] != kinds[1] and all(len(kind) == 1 and kind <= angles.keys() for kind in kinds):
            return [(f"({left}){angles[min(kinds[0])]}", f"({right}){angles[min(kinds[1])]}")]
        if unit.dimension != own.dimension:
            return []
        pairs = [(_times(left, unit.size / own.size), right)]
    elif known := unit or own:
        pairs = [(left, right)]
        if known.dimension == (("degree", 1),):
            # An angle without a unit may also be one in radians; other units are left open.
            pairs.append((rf"({left})\cdot\pi/180", right) if unit else (left, rf"({right})\cdot\pi/180"))
    else:
        pairs = _without_modulus(_in_digits(left, right), _in_digits(right, left))
    found = []
    for left, right in pairs:
        bare = [_PERCENT_SIGN.sub("", text) for text in (left, right)]
        found.append((bare[0], bare[1]))
        if (bare[0] == left) != (bare[1] == right):
            # With a percent sign on one side both readings are right.
            part = Fraction(1, 100)
            found.append((_times(bare[0], part), right) if bare[0] != left else (left, _times(bare[1], part)))
    return found


def _times(value: str, factor: Fraction) -> str:
    number = parse_number(plain(value))
    if number is not None:
        return str(number * factor)
    return value if factor == 1 else rf"({value})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}"


def _without_modulus(gold: str, answer: str) -> list[tuple[str, str]]:
    """Residues, where one side names the modulus; nothing where the sides name different ones."""
    found = _MODULUS.fullmatch(gold), _MODULUS.fullmatch(answer)
    left, right = (one["value"] if one else text for one, text in zip(found, (gold, answer), strict=True))
    moduli = {int(one["modulus"]) for one in found if one}
    numbers = parse_number(plain(left)), parse_number(plain(right))
    if len(moduli) == 2:
        return []
    if moduli and (modulus := moduli.pop()) and numbers[0] is not None and numbers[1] is not None:
        # A truth that is a plain number must be the answer's residue itself.
        return [(str(numbers[0] % modulus if found[0] else numbers[0]), str(numbers[1] % modulus))]
    return [(left, right)]


def _in_digits(expression: str, other: str) -> str:
    """A number in words as digits; next to a number, one that words follow without them (``5 people``)."""
    value = None if value_in_base(expression) else other_notation(expression)
    if value is not None:
        return str(value)
    counted = _COUNTED.fullmatch(expression)
    return counted[1] if counted and parse_number(plain(other)) is not None else expression


_COUNTED = re.compile(
    rf"({NUMERAL})\s*(?:\\text\s*\{{)?\s*(?!(?:or|and|to|mod)\b)[A-Za-z]{{3,}}(?: [A-Za-z]{{2,}})*\s*\}}?"
)
_JOINED_TO_BOX = re.compile(
    r"\}[\s$\\()\[\]]{0,20}(?:[,;]|\band\b|\bor\b)(?:[\s$\\()\[\],;]|\band\b|\bor\b){0,20}(?:[A-Za-z](?:_\{?[0-9]\}?)?\s*=\s*)?$"
)
_SET, _PAIR = re.compile(r"\\\{[^(){}]*,[^(){}]*\\\}"), re.compile(r"\([^(){}]*,[^(){}]*\)")
_CURRENCY = re.compile(rf"[{CURRENCIES}]|\\\$")
_DIGITS = re.compile("[0-9]+")
_CHOICES = frozenset("ABCDEFGHIJ")
_SEVERAL_CHOICES, _CAPITAL = re.compile(r"[A-J](?:(?: ?,| and) ?[A-J])+|[A-J]{2,10}"), re.compile("[A-J]")
_RATIO = re.compile(r"[0-9]{1,15}(?: ?: ?[0-9]{1,15}){2,}")
_DATE = re.compile(r"(?=.*(?:\b0[0-9]|[0-9]{4}))[0-9]{1,4}([-/.])[0-9]{1,2}\1[0-9]{1,4}")
_WORDS = re.compile(r"(?:\\(?:text|mathrm|textrm|mbox)\s*\{)?\s*([A-Za-z]{2,}(?: [A-Za-z]+)*)\s*[.!]?\s*\}?[.!]?")
_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+(?![A-Za-z]*\{)")
_MODULUS = re.compile(
    r"(?:[A-Za-z]\s*\\equiv\s*)?(?P<value>[^\\]{1,60}?)\s*(?:\\pmod|\(?\s*\\b?mod|\(\s*mod\b)"
    r"\s*\{?\s*(?P<modulus>[0-9]{1,15})\s*\}?\s*\)?"
)
_PERCENT_SIGN = re.compile(r"\s*\\?%\s*$")

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0  # seconds that the process may take to start; loading the algebra packages takes about one
KILL_GRACE = 1.0  # seconds beyond the limit before a process that does not interrupt itself is killed


@dataclass(frozen=True, slots=True)
class Verdict:
    """Exactly one of ``equal`` and ``error`` is set."""

    equal: bool | None = None
    error: str | None = None


class MathVerifier:
    """One helper process, started at first use if not before, and again when it had to be killed.

    Calls may come from any thread; they are answered one after the other.  The limit, ``timeout`` seconds of wall time
    for one comparison, works off the main thread, where signals do not.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._received = b""

    def start(self) -> None:
        """Start the process, and do not wait for it: ahead of the first use, its start costs nobody time."""
        with self._lock:
            if self._process is None:
                self._launch()

    def equivalent(self, gold: str, answer: str) -> Verdict:
        """Equality of ``answer`` and ``gold``. An error is a timeout of wall time, a crash, or an unreadable
        ``gold``; an answer on which the process spends all of its CPU time does not say the same."""
        verdict, cpu_is_spent = self._ask(gold, answer)
        # Asked about the truth alone: if that is decided, the answer was what used up the time, and counts as wrong.
        # Else truth or machine are to blame, and the error stands.
        if cpu_is_spent and self._ask(gold, gold)[0].equal:
            return Verdict(equal=False)
        return verdict

    def _ask(self, gold: str, answer: str) -> tuple[Verdict, bool]:
        """The verdict, and whether the kernel ended the process for the CPU time that it used."""
        request = json.dumps({"gold": gold, "answer": answer, "timeout": self._timeout}) + "\n"
        with self._lock:
            try:
                process = self._process
                if process is None or process.poll() is not None:
                    self._stop()
                    process = self._launch()
                if not self._is_ready:
                    self._read_line(process, START_TIMEOUT)
                    self._is_ready = True
                assert process.stdin is not None
                process.stdin.write(request.encode())
                process.stdin.flush()
                line = self._read_line(process, self._timeout + KILL_GRACE)
            except (BrokenPipeError, EOFError):
                status = self._stop()
                return Verdict(error="the verifier process died"), status == -signal.SIGXCPU
            except TimeoutError:
                # Killed, not kept: its late verdict would be read as that of the next request.
                self._stop()
                return Verdict(error=f"timeout: no verdict within {self._timeout:g} s"), False
        reply = json.loads(line)
        if reply.get("timeout"):
            return Verdict(error=f"timeout: no verdict within {self._timeout:g} s"), False
        return Verdict(reply.get("equal"), reply.get("error")), False

    def _launch(self) -> subprocess.Popen[bytes]:
        self._is_ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "roll.rewards.verifier_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        # A verifier that is dropped without close() (an error at start, a test) leaves no process behind.
        weakref.finalize(self, end_process, self._process)
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], timeout: float) -> bytes:
        """The next line; ``TimeoutError`` after ``timeout`` seconds, ``EOFError`` where the process has ended."""
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
