"""Validation: the prompts of every set, answered by sampling and greedily, and scored."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from roll.datasets.types import PromptRow
from roll.pipelines.rlvr.accuracy import Answers, overall, pass_metrics
from roll.pipelines.rlvr.plan import ValidationSet
from roll.rollout.flow import DrawPrompts, greedy, sampling_params
from roll.rollout.groups import SampleGroup
from roll.rollout.scheduling import RolloutScheduler
from roll.strategies.engines.requests import SamplingParams


@dataclass(frozen=True)
class ValidationPass:
    """One way of answering the questions of a set."""

    name: str
    """``sampled`` or ``greedy``, behind the set's name if it has one; part of the metrics' names."""
    params: SamplingParams
    num_samples: int


def passes_of(one: ValidationSet) -> list[ValidationPass]:
    """By sampling and, unless switched off, greedily."""
    prefix = f"{one.name}." if one.name else ""
    params = sampling_params(one.generating_args, one.max_new_tokens)
    passes = [ValidationPass(f"{prefix}sampled", params, one.samples_per_prompt)]
    if one.greedy:
        passes.append(ValidationPass(f"{prefix}greedy", greedy(one.max_new_tokens, params), 1))
    return passes


@dataclass(frozen=True)
class Round:
    """Questions that are asked together."""

    way: ValidationPass
    rows: Sequence[PromptRow]
    first: int
    """The number of the first: draws are counted from 0 in every pass of every validation, so the same seeds are used
    each time and two validations differ by the policy alone."""


class ValidationPlan:
    """Prompts of every validation of a run.

    Args:
        rows: the questions of each set, by its name.
        batch_size: questions of a round.
    """

    def __init__(self, sets: Sequence[ValidationSet], rows: Mapping[str, Sequence[PromptRow]], batch_size: int) -> None:
        self.passes = {one.name: passes_of(one) for one in sets}
        self._rows = rows
        self._batch_size = batch_size

    def rounds(self) -> Iterator[Round]:
        """In the order in which they are asked."""
        for name, passes in self.passes.items():
            rows = self._rows[name]
            for one in passes:
                for first in range(0, len(rows), self._batch_size):
                    yield Round(one, rows[first : first + self._batch_size], first)


@dataclass(frozen=True)
class Validation:
    """The scored responses of a validation."""

    plan: ValidationPlan
    answered: Mapping[str, list[SampleGroup]]
    """By pass."""
    seconds: float
    """From the first prompt to the last score."""

    def report(self) -> tuple[dict[str, float], dict[str, list[SampleGroup]]]:
        """Metrics (see :func:`pass_metrics`), and the groups of each set's first pass. With several sets
        ``val_correct`` is over the questions of all of them."""
        metrics: dict[str, float] = {}
        primary: dict[str, list[Answers]] = {}
        for name, passes in self.plan.passes.items():
            for one in passes:
                answers = [Answers.of(group) for group in self.answered[one.name]]
                metrics |= pass_metrics(answers, one.name, one is passes[0], in_training=True)
                primary.setdefault(name, answers)
        shown = {name: self.answered[passes[0].name] for name, passes in self.plan.passes.items()}
        return metrics | (overall(primary) if len(primary) > 1 else {}), shown


async def validate(plan: ValidationPlan, scheduler: RolloutScheduler) -> Validation:
    """Answer and score the prompts of every set, round after round, whatever else the engines do."""
    began = time.perf_counter()
    answered: dict[str, list[SampleGroup]] = defaultdict(list)
    for one in plan.rounds():
        way, count = one.way, len(one.rows)
        result = await scheduler.collect(draw_from(one.rows), count, way.num_samples, way.params, one.first)
        answered[way.name] += result.groups
    return Validation(plan, answered, time.perf_counter() - began)


def draw_from(rows: Sequence[PromptRow]) -> DrawPrompts:
    """Gives ``rows`` in order, once."""
    remaining = iter(rows)
    return lambda count: list(islice(remaining, count))
