"""Learning-rate schedules: a pure function of the step, so that a step count is all there is to save."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.config.roles import TrainingArguments

SCHEDULES = ("linear", "cosine", "constant")


@dataclass(frozen=True)
class LearningRateSchedule:
    """A linear warm-up to ``peak`` over ``warmup_steps`` steps, then the decay of ``kind`` down to
    ``peak * min_ratio`` at ``total_steps``, and that value from there on."""

    kind: str
    peak: float
    warmup_steps: int
    total_steps: int
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(
                f"training_args.lr_scheduler_type: {self.kind!r}; must be one of {', '.join(SCHEDULES)}, e.g. cosine"
            )
        if not 0.0 <= self.min_ratio <= 1.0:
            raise ValueError(f"training_args.min_lr_ratio: {self.min_ratio}; must lie between 0 and 1, e.g. 0.1")

    @classmethod
    def from_arguments(cls, args: TrainingArguments, total_steps: int) -> LearningRateSchedule:
        """``warmup_steps`` where it is set, else ``warmup_ratio`` of ``total_steps`` (rounded up)."""
        warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
        return cls(args.lr_scheduler_type, args.learning_rate, warmup, total_steps, args.min_lr_ratio)

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer step ``step``, counted from 0. The first step's is never 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        decay = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * decay)
