"""The score that the role ``reward_model`` gives a response, as a reward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from roll.rewards.base import RewardOptionError, RewardResult, RewardRule, RewardSample, failure


@dataclass
class RewardModelScore(RewardRule):
    """``scale * raw + shift``, perhaps squashed; ``raw`` is what a sequence-classification model with one label says.

    The model is computed before this rule is asked (:mod:`roll.rollout.rewarding`).
    """

    numbers: ClassVar[tuple[str, ...]] = ("raw",)
    input: Literal["chat", "tokens"] = "chat"
    """``chat``: the row's messages and the response through the reward model's own tokenizer and chat template;
    ``tokens``: the tokens of prompt and response as the policy has them, for a model with the same vocabulary."""
    scale: float = 1.0
    shift: float = 0.0
    squash: Literal["none", "sigmoid", "tanh"] = "none"
    """Applied last; ``sigmoid`` gives 0..1."""
    clip: float | None = None
    """Raw scores are clipped to plus and minus this."""

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise RewardOptionError(f"clip = {self.clip}: must be greater than 0, or null for none")

    def judge(self, sample: RewardSample) -> RewardResult:
        given = sample.model_result
        if given is None:
            return failure("reward_model: the sample was not given to the role reward_model")
        if given.score is None:
            return failure(f"reward_model: {given.error}")
        raw = given.score
        if not math.isfinite(raw):
            return failure(f"reward_model: the model's score is {raw}")
        value = raw if self.clip is None else max(-self.clip, min(self.clip, raw))
        value = self.scale * value + self.shift
        if self.squash == "sigmoid":
            value = 0.5 * (1.0 + math.tanh(value / 2.0))
        elif self.squash == "tanh":
            value = math.tanh(value)
        return RewardResult(value, {"raw": raw})
