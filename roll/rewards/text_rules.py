"""Rules on texts: GSM8K's number, short answers in words, a format, penalties for repetition and length."""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import regex  # type: ignore[import-untyped]

from roll.rewards.answers import SOURCES, after_thought
from roll.rewards.base import NUMERAL, RewardOptionError, RewardResult, RewardRule, RewardSample, failure, parse_number
from roll.rewards.thoughts import opened_thought, split_thought

TAIL = 300
"""Characters at the end of a response in which the answer is looked for: it comes last, and searching is then quick."""

MARGIN = 12  # characters in front of a number that show it to be a part of a formula

# What follows a numeral may not continue it: in "3.5.2" and "2e9" there is no answer 3.5 or 2.
_END = r"(?![0-9]|[.,][0-9]|[eE][-+]?[0-9]|\s?/)"

_STRICT = re.compile(rf"####\s*({NUMERAL}){_END}")
_MARK = "####"
_ANYWHERE = re.compile(rf"(?<![0-9A-Za-z_.,])({NUMERAL}){_END}")
# A part of a formula is no answer: 4 in "\\frac{3}{4}", 10 in "2^{10}".
_IN_FORMULA = re.compile(r"(?:[\^_]\{?|\\[dtc]?frac\{|\}\{|\\sqrt\{?)$")
_STRICT_TEXT = re.compile(r"#### (-?[0-9.,]+)")
_ANYWHERE_TEXT = re.compile(r"-?[0-9.,]+")


@dataclass(frozen=True)
class Gsm8kRule(RewardRule):
    """1 for the right number, ``format_score`` for a wrong one, 0 where no answer is found.

    Source of the answer format: Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv 2110.14168.
    """

    numbers: ClassVar[tuple[str, ...]] = ("correct", "answered")
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    method: Literal["strict", "flexible"] = "strict"
    """``strict``: the number must follow ``####``. ``flexible``: without that mark, the last number counts."""
    score: float = 1.0
    format_score: float = 0.0  # score of an answer that is found but wrong
    compare: Literal["number", "string"] = "number"
    """``string``: compare the characters after removing commas and dollar signs, as verl does, so ``72.`` is not 72."""

    def judge(self, sample: RewardSample) -> RewardResult:
        if sample.ground_truth is None:
            return failure("gsm8k_rule: the row has no ground_truth")
        stated = str(sample.ground_truth).rpartition(_MARK)[2].strip()
        truth: str | Fraction | None
        answer: str | Fraction | None
        if self.compare == "string":
            truth, answer = stated, extract_text(sample.response, self.method)
        else:
            truth, answer = parse_number(stated), extract_number(sample.response, self.method)
            if truth is None:
                return failure(f"gsm8k_rule: ground_truth {sample.ground_truth!r} is not a number")
        right, answered = answer == truth, answer is not None
        score = self.score if right else self.format_score if answered else 0.0
        return RewardResult(score, {"correct": float(right), "answered": float(answered)})


def extract_number(response: str, method: str) -> Fraction | None:
    """The number after the last ``####`` that one follows; ``flexible`` looks further, for the last number."""
    tail = response[-TAIL:]
    marked = _STRICT.findall(tail) if _MARK in tail else []
    if marked:
        return parse_number(marked[-1])
    if method == "strict":
        return None
    numerals = list(_ANYWHERE.finditer(tail))
    begin = numerals[-1].start() if numerals else 0
    if not numerals or _IN_FORMULA.search(tail, max(0, begin - MARGIN), begin):
        return None
    return parse_number(numerals[-1].group(1))


def extract_text(response: str, method: str) -> str | None:
    """The characters of the answer as verl's rule takes them, for ``compare: string``."""
    tail = response[-TAIL:]
    if method == "strict":
        marked = _STRICT_TEXT.findall(tail)
        return marked[-1].replace(",", "").replace("$", "") if marked else None
    numbers = [text for text in _ANYWHERE_TEXT.findall(tail) if text not in ("", ".")]
    return numbers[-1] if numbers else None


Source = Literal["response", "boxed", "marked", "tagged"]
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


@dataclass
class _AgainstTexts(RewardRule):
    """The best comparison with any acceptable answer, times ``score``; a ground truth may be a list of those."""

    name: ClassVar[str]
    score: float = 1.0
    source: Source = "response"
    """Compared text: the whole ``response`` after the thought, or its ``boxed``, ``marked`` or ``tagged`` answer."""

    @abstractmethod
    def compare(self, answer: str, truth: str) -> float:
        """0..1."""

    def judge(self, sample: RewardSample) -> RewardResult:
        truths = sample.ground_truth if isinstance(sample.ground_truth, list | tuple) else [sample.ground_truth]
        wanted = [str(truth) for truth in truths if truth is not None]
        if not wanted:
            return failure(f"{self.name}: the row has no ground_truth")
        text = after_thought(sample.response, sample.prompt)
        answer = None if text is None else SOURCES[self.source](text)
        best = 0.0 if answer is None else max(self.compare(answer, truth) for truth in wanted)
        return RewardResult(self.score * best, {self.numbers[0]: best, "answered": float(answer is not None)})


@dataclass
class ExactMatch(_AgainstTexts):
    """1 where the answer equals (one of) the ground truth, else 0."""

    name: ClassVar[str] = "exact_match"
    numbers: ClassVar[tuple[str, ...]] = ("correct", "answered")
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    normalize: bool = True  # compare without case, punctuation, articles and spacing; false: character by character

    def compare(self, answer: str, truth: str) -> float:
        return float(normalized(answer) == normalized(truth) if self.normalize else answer == truth)


@dataclass
class F1(_AgainstTexts):
    """The F1 of the words shared with the ground truth (the best of several), times ``score``."""

    name: ClassVar[str] = "f1"
    numbers: ClassVar[tuple[str, ...]] = ("f1", "answered")
    client_options: ClassVar[tuple[str, ...]] = ("*",)

    def compare(self, answer: str, truth: str) -> float:
        """Harmonic mean of precision and recall of the words, counted with multiplicity; two empty texts agree."""
        given, wanted = normalized(answer).split(), normalized(truth).split()
        if not given or not wanted:
            return float(given == wanted)
        shared = sum((Counter(given) & Counter(wanted)).values())
        return 2 * shared / (len(given) + len(wanted))


_TAGGED = r"\s*<answer>.*?</answer>\s*"


@dataclass
class FormatRule(RewardRule):
    """``score`` where the pattern matches, ``miss_score`` elsewhere. The ground truth plays no part."""

    numbers: ClassVar[tuple[str, ...]] = ("format",)
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    pattern: str | None = None
    """Regular expression; ``.`` matches line ends too. null: a thought, in the marks of the model's family (the prompt
    may open it), and then ``<answer>``."""
    mode: Literal["full", "search"] = "full"  # `full`: the whole response must match; `search`: some part of it
    score: float = 1.0
    miss_score: float = 0.0
    timeout: float = 1.0
    """Seconds for one match: a pattern that backtracks for ever is the user's, but the text is the model's."""

    def __post_init__(self) -> None:
        try:
            compiled = regex.compile(_TAGGED if self.pattern is None else self.pattern, regex.DOTALL)
        except regex.error as error:
            raise RewardOptionError(f"pattern = {self.pattern!r}: not a regular expression: {error}") from error
        self._match = compiled.fullmatch if self.mode == "full" else compiled.search

    def judge(self, sample: RewardSample) -> RewardResult:
        text: str | None = sample.response
        if self.pattern is None:
            thought, answer = split_thought(sample.response, opened_thought(sample.prompt))
            text = None if thought is None else answer
        try:
            matched = text is not None and self._match(text, timeout=self.timeout) is not None
        except TimeoutError:
            return failure(f"format: timeout: the pattern took more than {self.timeout:g} s")
        return RewardResult(self.score if matched else self.miss_score, {"format": float(matched)})


def repeated_share(parts: list[str], n: int) -> float:
    """Share of the n-grams of ``parts`` that occurred before, 0..1: ``1 - different / all``; 0 if there are none.

    Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv 2502.03373 (a repetition penalty
    on n-grams); the share over the whole response is the form that open implementations use.
    """
    count = len(parts) - n + 1
    if count <= 0:
        return 0.0
    different = set(zip(*(parts[offset : offset + count] for offset in range(n)), strict=True))
    return 1.0 - len(different) / count


@dataclass
class RepetitionPenalty(RewardRule):
    """``-max_penalty`` times the share of repeated n-grams, less what is tolerated."""

    numbers: ClassVar[tuple[str, ...]] = ("repeated",)
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    n: int = 20  # length of an n-gram; short ones repeat in any text
    unit: Literal["word", "character"] = "word"  # unit of n; languages without spaces need `character`
    tolerated: float = 0.0  # share that costs nothing
    max_penalty: float = 1.0  # loss of a response of nothing but repetition

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RewardOptionError(f"n = {self.n}: must be at least 1, for example 20")
        if not 0 <= self.tolerated < 1:
            raise RewardOptionError(f"tolerated = {self.tolerated}: must be at least 0 and less than 1")

    def judge(self, sample: RewardSample) -> RewardResult:
        text = sample.response.lower()
        share = repeated_share(text.split() if self.unit == "word" else list(text), self.n)
        beyond = max(0.0, share - self.tolerated) / (1.0 - self.tolerated)
        return RewardResult(-self.max_penalty * beyond, {"repeated": share})


@dataclass
class LengthPenalty(RewardRule):
    """0 up to ``free`` tokens, then falling linearly to ``-max_penalty`` at ``limit`` tokens."""

    numbers: ClassVar[tuple[str, ...]] = ("over_length",)
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    limit: int  # tokens of a response that loses all of `max_penalty`; longer ones lose no more
    free: int = 0  # tokens that cost nothing
    max_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.free < self.limit:
            raise RewardOptionError(f"free = {self.free}: must be at least 0 and less than limit {self.limit}")

    def judge(self, sample: RewardSample) -> RewardResult:
        share = (sample.num_tokens - self.free) / (self.limit - self.free)
        share = min(1.0, max(0.0, share))
        return RewardResult(-self.max_penalty * share, {"over_length": share})
