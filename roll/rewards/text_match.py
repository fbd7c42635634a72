"""Short answers in words: equality after normalisation, and the F1 of shared words.

Normalisation and F1 are those of SQuAD's evaluation (Rajpurkar et al., arXiv 1606.05250): lower case, without
punctuation and articles, white space collapsed.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from roll.rewards.base import RewardResult, RewardRule, RewardSample, failure
from roll.rewards.extraction import after_thought, last_boxed, last_marked, tagged_answer

Source = Literal["response", "boxed", "marked", "tagged"]

_SOURCES: dict[str, Callable[[str], str | None]] = {
    "response": str.strip,
    "boxed": last_boxed,
    "marked": last_marked,
    "tagged": tagged_answer,
}
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall of the words, counted with multiplicity; two empty texts agree."""
    given, wanted = normalized(answer).split(), normalized(truth).split()
    if not given or not wanted:
        return float(given == wanted)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted))


def truths(ground_truth: Any) -> list[str]:
    """Acceptable answers: one, or any of a list."""
    values = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    return [str(value) for value in values if value is not None]


@dataclass
class ExactMatch(RewardRule):
    """1 where the answer equals (one of) the ground truth, else 0."""

    numbers: ClassVar[tuple[str, ...]] = ("correct", "answered")
    score: float = 1.0
    source: Source = "response"
    """What is compared: the whole ``response`` after the thought, or its ``boxed``, ``marked`` or ``tagged`` answer."""
    normalize: bool = True
    """Compare without case, punctuation, articles and spacing; false: character by character."""

    def judge(self, sample: RewardSample) -> RewardResult:
        wanted = truths(sample.ground_truth)
        if not wanted:
            return failure("exact_match: the row has no ground_truth")
        answer = answer_text(sample, self.source)
        if answer is None:
            return RewardResult(0.0, {"correct": 0.0, "answered": 0.0})
        if self.normalize:
            right = normalized(answer) in [normalized(truth) for truth in wanted]
        else:
            right = answer in wanted
        return RewardResult(self.score if right else 0.0, {"correct": float(right), "answered": 1.0})


@dataclass
class F1(RewardRule):
    """The F1 of the words shared with the ground truth (the best of several), times ``score``."""

    numbers: ClassVar[tuple[str, ...]] = ("f1", "answered")
    score: float = 1.0
    source: Source = "response"
    """As for ``exact_match``."""

    def judge(self, sample: RewardSample) -> RewardResult:
        wanted = truths(sample.ground_truth)
        if not wanted:
            return failure("f1: the row has no ground_truth")
        answer = answer_text(sample, self.source)
        if answer is None:
            return RewardResult(0.0, {"f1": 0.0, "answered": 0.0})
        best = max(word_f1(answer, truth) for truth in wanted)
        return RewardResult(self.score * best, {"f1": best, "answered": 1.0})


def answer_text(sample: RewardSample, source: Source) -> str | None:
    text = after_thought(sample.response, sample.prompt)
    return None if text is None else _SOURCES[source](text)
