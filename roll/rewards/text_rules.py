"""Rules on texts: GSM8K's number, short answers in words, the letters of multiple choice, a format, penalties for
repetition and length."""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import regex  # type: ignore[import-untyped]

from roll.datasets.forms import last_boxed
from roll.rewards.answers import SOURCES, after_thought, tagged_answer
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


@dataclass
class MultipleChoice(RewardRule):
    """1 for the right choice, ``format_score`` for another one, 0 where none is found.

    The choice is looked for in the last box, then in ``<answer>``, then after the last "answer is" or "answer:", and,
    unless ``boxed_only``, as the last letter standing alone. Several letters (``A, C``) must agree as a set.
    """

    numbers: ClassVar[tuple[str, ...]] = ("correct", "answered")
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    score: float = 1.0
    format_score: float = 0.0
    choices: str = "ABCDEFGHIJ"  # the letters that can be chosen
    boxed_only: bool = False  # accept only an answer in a box

    def __post_init__(self) -> None:
        if not self.choices.isalpha() or len(set(self.choices.upper())) != len(self.choices):
            raise RewardOptionError(f"choices = {self.choices!r}: must be different letters, such as 'ABCD'")
        upper = self.choices.upper()
        # "a banana" is no choice: small letters must be followed by a stop, a bracket or nothing.
        # One or several: "A", "A, C", "A and C".
        series = r"[{0}](?:\s*(?:,|;|and|&)\s*[{0}])*"
        several = rf"{series.format(upper)}(?![A-Za-z])|{series.format(upper.lower())}(?=\s*(?:[^\sA-Za-z]|$))"
        # Possessive quantifiers: a long run of spaces is passed once, not in every way it can be divided.
        wrapped = rf"[\s(\[{{*\"'$]*+(?:\\text\w*+\{{)?\(?({several})"
        self._content = re.compile(wrapped)
        # "AC" for A and C: capitals in alphabetical order, each at most once.
        self._together = re.compile("".join(f"{letter}?" for letter in sorted(upper)))
        # "so", "is" and the like are words in any case, so the claim itself may be written in any case.
        self._claim = re.compile(rf"(?i:answer|choice|option)(?i:\s++is|\s*+[:=])(?:\s*+(?i:option))?{wrapped}")
        # "A" as an article and "I" as a pronoun are more often words than choices: those need a bracket or a stop.
        self._alone = re.compile(rf"(?:\(([{upper}])\)|(?<![A-Za-z'])([{upper}])(?=\s*(?:[.):,*]|$)))")

    def judge(self, sample: RewardSample) -> RewardResult:
        truth = self._letters(str(sample.ground_truth or ""))
        if not truth:
            return failure(f"multiple_choice: ground_truth {sample.ground_truth!r} names none of {self.choices}")
        chosen = self.choose(sample.response, sample.prompt)
        if not chosen:
            return RewardResult(0.0, {"correct": 0.0, "answered": 0.0})
        right = chosen == truth
        return RewardResult(self.score if right else self.format_score, {"correct": float(right), "answered": 1.0})

    def choose(self, response: str, prompt: str = "") -> frozenset[str]:
        """The chosen letters in upper case; empty if there is no choice."""
        text = after_thought(response, prompt)
        if text is None:
            return frozenset()
        box = last_boxed(text)
        if box is not None or self.boxed_only:
            return self._letters(box or "")
        tagged = tagged_answer(text)
        if tagged is not None and self._letters(tagged):
            return self._letters(tagged)
        claims = self._claim.findall(text)
        if claims:
            return self._set_of(claims[-1])
        alone = self._alone.findall(text)
        return frozenset("".join(alone[-1])) if alone else frozenset()

    def _letters(self, content: str) -> frozenset[str]:
        """The letters a short text begins with: ``B``, ``(b)``, ``\\text{B}``, ``A, C``, ``AC`` or ``B. Paris``."""
        content = content.strip()
        if content and self._together.fullmatch(content):
            return frozenset(content)
        match = self._content.match(content)
        return self._set_of(match.group(1)) if match else frozenset()

    def _set_of(self, letters: str) -> frozenset[str]:
        return frozenset(re.sub(r"and|[^A-Za-z]", "", letters).upper())


REWARDS = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}
"""Score by reward type, of (correct, boxed)."""
REPETITION_N = 3
SHORTEST, LONG_ENOUGH = 100, 400  # tokens: the length term is at its lowest up to the first and gone from the second on


@dataclass
class CrossThinkQA(RewardRule):
    """The choice in a box, scored by ``reward_type``, less a repetition penalty and a term for short responses.

    The numbers are those of ROLL's reward of this name: minus ``repetition_penalty`` times the share of repeated
    3-grams of words; plus ``length_penalty_coef`` times a term that rises from -0.5 (100 tokens or fewer) to 0 (400).
    """

    numbers: ClassVar[tuple[str, ...]] = ("correct", "format", "repeated", "length_term")
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    reward_type: Literal["loose", "soft", "strict"] = "soft"
    """``loose``: the box does not count; ``soft``: half for a correct answer without it; ``strict``: nothing."""
    repetition_penalty: float = 0.5
    length_penalty_coef: float = 0.0
    choices: str = "ABCDEFGHIJ"  # the letters that can be chosen

    def __post_init__(self) -> None:
        self._choice = MultipleChoice(choices=self.choices)

    def judge(self, sample: RewardSample) -> RewardResult:
        verdict = self._choice.judge(sample)
        if verdict.error is not None:
            return failure(verdict.error.replace("multiple_choice", "crossthinkqa", 1))
        correct = verdict.metrics["correct"] == 1.0
        boxed = last_boxed(after_thought(sample.response, sample.prompt) or "") is not None
        repeated = repeated_share(sample.response.lower().split(), REPETITION_N)
        shortness = (LONG_ENOUGH - max(SHORTEST, sample.num_tokens)) / (LONG_ENOUGH - SHORTEST)
        length_term = -0.5 * max(0.0, shortness)
        score = REWARDS[self.reward_type][correct, boxed]
        score += self.length_penalty_coef * length_term - self.repetition_penalty * repeated
        return RewardResult(
            score, {"correct": float(correct), "format": float(boxed), "repeated": repeated, "length_term": length_term}
        )
