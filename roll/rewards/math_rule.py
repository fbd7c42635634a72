"""Mathematical answers: found in the response, compared as numbers or texts, else by symbolic equivalence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal

from roll.rewards.base import RewardResult, RewardRule, RewardSample, failure
from roll.rewards.extraction import after_thought, last_boxed, last_marked, tagged_answer
from roll.rewards.math_text import canonical, plain, value_in_base
from roll.rewards.numerals import parse_number
from roll.rewards.stated import isolated_number, stated_answer
from roll.rewards.verifier import MathVerifier

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
    """What the first source that finds anything has found."""
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
    """The verdict where it needs no algebra: two numerals, also in a base of their own, or the same spelling up to
    layout; else None."""
    left, right = parse_number(plain(gold)), parse_number(plain(answer))
    if left is not None and right is not None:
        # With one percent sign both readings are right: 50% for 0.5, and 50% for "what percentage?" with the truth 50.
        if ("%" in gold) != ("%" in answer):
            part, whole = (left, right) if "%" in gold else (right, left)
            return whole in (part, part / 100)
        return left == right
    bases = value_in_base(gold), value_in_base(answer)
    if None not in bases:
        return bases[0] == bases[1]
    return True if plain(gold) == plain(answer) else None
