"""The format rule: does a response have the form that a regular expression describes?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import regex  # type: ignore[import-untyped]

from roll.rewards.base import RewardOptionError, RewardResult, RewardRule, RewardSample, failure

THINK_THEN_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"


@dataclass
class FormatRule(RewardRule):
    """``score`` where the pattern matches, ``miss_score`` elsewhere. The ground truth plays no part."""

    numbers: ClassVar[tuple[str, ...]] = ("format",)
    pattern: str = THINK_THEN_ANSWER
    """Regular expression; ``.`` matches line ends too. The default asks for ``<think>`` and then ``<answer>``."""
    mode: Literal["full", "search"] = "full"
    """``full``: the whole response must match; ``search``: some part of it."""
    score: float = 1.0
    miss_score: float = 0.0
    timeout: float = 1.0
    """Seconds for one match: a pattern that backtracks for ever is the user's, but the text is the model's."""

    def __post_init__(self) -> None:
        try:
            compiled = regex.compile(self.pattern, regex.DOTALL)
        except regex.error as error:
            raise RewardOptionError(f"pattern = {self.pattern!r}: not a regular expression: {error}") from error
        self._match = compiled.fullmatch if self.mode == "full" else compiled.search

    def judge(self, sample: RewardSample) -> RewardResult:
        try:
            matched = self._match(sample.response, timeout=self.timeout) is not None
        except TimeoutError:
            return failure(f"format: timeout: the pattern took more than {self.timeout:g} s")
        return RewardResult(self.score if matched else self.miss_score, {"format": float(matched)})
