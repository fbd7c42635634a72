"""Batch arithmetic: do the samples of a step divide into optimizer steps, and if not, which values near by would?"""

from __future__ import annotations

from math import gcd, isqrt

from roll.config.plan import TrainingPlan
from roll.config.wording import count


def explain_indivisible(plan: TrainingPlan, prompts: int, group_size: int) -> str | None:
    """The rule with its numbers and the nearest values that work; None when everything divides."""
    samples, mini = plan.samples_per_step, plan.mini_batch_size
    if samples % mini == 0:
        return None
    return (
        f"{prompts} prompts x {group_size} = {samples} samples do not divide into optimizer steps of {mini} "
        f"({plan.micro_batch_size} per micro-batch x "
        f"{count(plan.gradient_accumulation_steps, 'micro-batch', 'micro-batches')} x {count(plan.dp_size, 'rank')})"
    )


def working_values(plan: TrainingPlan, prompts: int, group_size: int, section: str) -> str:
    """Single changes that make the batch divide, each the nearest one to what is written."""
    samples = plan.samples_per_step
    unit = plan.micro_batch_size * plan.dp_size
    found = []
    accumulation = nearest(
        plan.gradient_accumulation_steps, [steps for steps in divisors(samples // unit) if samples % unit == 0]
    )
    if accumulation is not None:
        found.append(f"{section}.training_args.gradient_accumulation_steps: {accumulation}")
    rows = plan.gradient_accumulation_steps * plan.dp_size
    micro = nearest(plan.micro_batch_size, [size for size in divisors(samples // rows) if samples % rows == 0])
    if micro is not None:
        found.append(f"{section}.training_args.per_device_train_batch_size: {micro}")
    quantum = plan.mini_batch_size // gcd(plan.mini_batch_size, group_size)
    multiple = max(1, round(prompts / quantum)) * quantum
    found.append(f"rollout_batch_size: {multiple}")
    return ", or ".join(found)


def divisors(number: int) -> list[int]:
    """All of them, in order; of 0 and below none."""
    small = [candidate for candidate in range(1, isqrt(max(0, number)) + 1) if number % candidate == 0]
    large = [number // candidate for candidate in reversed(small)]
    return small + large[1 if small and small[-1] == large[0] else 0 :]


def nearest(wanted: int, candidates: list[int]) -> int | None:
    return min(candidates, key=lambda candidate: abs(candidate - wanted), default=None)
