"""Multiple choice: the letter (or letters) that a response settles on, and CrossThinkQA's rule for such questions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from roll.datasets.forms import last_boxed
from roll.rewards.answers import after_thought, tagged_answer
from roll.rewards.base import RewardOptionError, RewardResult, RewardRule, RewardSample, failure
from roll.rewards.text_rules import repeated_share


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
