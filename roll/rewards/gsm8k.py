"""The GSM8K rule: the number behind ``####`` (or, flexibly, the last number) against the ground truth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Literal

from roll.rewards.base import RewardResult, RewardRule, RewardSample, failure
from roll.rewards.numerals import NUMERAL, parse_number

TAIL = 300
"""Characters at the end of a response in which the answer is looked for: it comes last, and searching is then quick."""

WINDOW, MARGIN = 70, 12
"""The last number is looked for in so many characters first; what begins in the margin may have been cut."""

# What follows a numeral may not continue it: in "3.5.2" and "2e9" there is no answer 3.5 or 2.
_END = r"(?![0-9]|[.,][0-9]|[eE][-+]?[0-9]|\s?/)"

_STRICT = re.compile(rf"####\s*({NUMERAL}){_END}")
_MARK = "####"
_ANYWHERE = re.compile(rf"(?<![0-9A-Za-z_.,])({NUMERAL}){_END}")
# A part of a formula is no answer: 4 in "\\frac{3}{4}", 10 in "2^{10}".
_IN_FORMULA = re.compile(r"(?:[\^_]\{?|\\[dtc]?frac\{|\}\{|\\sqrt\{?)$")
_STRICT_TEXT = re.compile(r"#### (-?[0-9.,]+)")
_ANYWHERE_TEXT = re.compile(r"-?[0-9.,]+")


@lru_cache(maxsize=4096)
def _truth(ground_truth: str) -> Fraction | None:
    return parse_number(ground_truth.rpartition(_MARK)[2])


@dataclass(frozen=True)
class Gsm8kRule(RewardRule):
    """1 for the right number, ``format_score`` for a wrong one, 0 where no answer is found.

    Source of the answer format: Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv 2110.14168.
    """

    numbers: ClassVar[tuple[str, ...]] = ("correct", "answered")
    method: Literal["strict", "flexible"] = "strict"
    """``strict``: the number must stand behind ``####``. ``flexible``: without that mark, the last number counts."""
    score: float = 1.0
    format_score: float = 0.0
    """Score of an answer that is found but wrong."""
    compare: Literal["number", "string"] = "number"
    """``string``: compare the characters after removing commas and dollar signs, as verl does, so ``72.`` is not 72."""

    def judge(self, sample: RewardSample) -> RewardResult:
        if sample.ground_truth is None:
            return failure("gsm8k_rule: the row has no ground_truth")
        if self.compare == "string":
            return self._score_text(sample.response, str(sample.ground_truth))
        truth = _truth(str(sample.ground_truth))
        if truth is None:
            return failure(f"gsm8k_rule: ground_truth {sample.ground_truth!r} is not a number")
        answer = extract_number(sample.response, self.method)
        return self._verdict(answer is not None, answer == truth)

    def _score_text(self, response: str, ground_truth: str) -> RewardResult:
        answer = extract_text(response, self.method)
        return self._verdict(answer is not None, answer == ground_truth.rpartition(_MARK)[2].strip())

    def _verdict(self, answered: bool, right: bool) -> RewardResult:
        if right:
            return RewardResult(self.score, {"correct": 1.0, "answered": 1.0})
        score = self.format_score if answered else 0.0
        return RewardResult(score, {"correct": 0.0, "answered": float(answered)})


def extract_number(response: str, method: str) -> Fraction | None:
    """The answer of a response, or None.

    The last ``####`` that is followed by a number decides; only ``flexible`` looks further, for the last number.
    """
    tail = response[-TAIL:]
    marked = _STRICT.findall(tail) if _MARK in tail else []
    if marked:
        return parse_number(marked[-1])
    if method == "strict":
        return None
    last = last_numeral(tail)
    return parse_number(last) if last is not None else None


def last_numeral(text: str) -> str | None:
    """The last numeral of ``text``, looked for in its last characters first; None where it is part of a formula."""
    for begin in (max(0, len(text) - WINDOW), 0):
        matches = list(_ANYWHERE.finditer(text, begin))
        # A match near the cut might be the end of a longer numeral: then the whole text decides.
        if matches and (begin == 0 or matches[-1].start() >= begin + MARGIN):
            last = matches[-1]
            return None if _IN_FORMULA.search(text, max(0, last.start() - MARGIN), last.start()) else last.group(1)
    return None


def extract_text(response: str, method: str) -> str | None:
    """The characters of the answer as verl's rule takes them, for ``compare: string``."""
    tail = response[-TAIL:]
    if method == "strict":
        marked = _STRICT_TEXT.findall(tail)
        return marked[-1].replace(",", "").replace("$", "") if marked else None
    numbers = [text for text in _ANYWHERE_TEXT.findall(tail) if text not in ("", ".")]
    return numbers[-1] if numbers else None
