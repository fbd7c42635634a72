"""The rollout phase of RLVR: prompts in, a batch of scored samples out; and validation, which answers the prompts of
every set by sampling and greedily."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from roll.config.rewards import model_inputs
from roll.datasets.types import PromptRow
from roll.distributed import DriverLoop
from roll.methods.policy import PromptRows
from roll.pipelines.clusters import Clusters
from roll.pipelines.engine_rollout import RolloutSource
from roll.pipelines.files import dumped_table, pad_token_id
from roll.pipelines.rlvr.accuracy import Answers, overall, pass_metrics, verifier
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.data import RunData
from roll.pipelines.rlvr.plan import RLVRPlan, ValidationSet
from roll.pipelines.sample_records import Notes, sample_notes
from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean, Metrics, Min
from roll.rewards import failure_rates
from roll.rollout.engines import EngineClient
from roll.rollout.filters import build_filter
from roll.rollout.flow import DrawPrompts, GroupSettings, PromptFlow, greedy, sampling_params
from roll.rollout.groups import SampleGroup, build_batch, greedy_baseline, reward_components
from roll.rollout.loops import RolloutLoop, rollout_loops
from roll.rollout.replay import PromptCodec
from roll.rollout.rewarding import ModelScorer, RewardClient, SampleQuarantine
from roll.rollout.scheduling import RolloutScheduler
from roll.strategies.engines.requests import SamplingParams
from roll.tracking import SampleTable


@dataclass(frozen=True)
class ValidationPass:
    """A pass over the prompts of a set, and how it answers them."""

    name: str
    """``sampled`` or ``greedy``, after the set's name if it has one; part of the metrics' names."""
    params: SamplingParams
    num_samples: int


def passes_of(validation_set: ValidationSet) -> list[ValidationPass]:
    """The passes over a set: by sampling and, unless switched off, greedily."""
    prefix, length = f"{validation_set.name}." if validation_set.name else "", validation_set.max_new_tokens
    params = sampling_params(validation_set.generating_args, length)
    passes = [ValidationPass(f"{prefix}sampled", params, validation_set.samples_per_prompt)]
    if validation_set.greedy:
        passes.append(ValidationPass(f"{prefix}greedy", greedy(length, params), 1))
    return passes


@dataclass(frozen=True)
class Round:
    """Prompts of a set that are answered together."""

    way: ValidationPass
    rows: Sequence[PromptRow]
    first: int
    """The number of the first: draws are counted from 0 in every pass of every validation, so the same seeds are used
    each time and two validations differ by the policy alone."""


class ValidationPlan:
    """Prompts of every validation of a run.

    Args:
        rows: the prompts of each set, by its name.
        batch_size: prompts of a round.
    """

    def __init__(self, sets: Sequence[ValidationSet], rows: Mapping[str, Sequence[PromptRow]], batch_size: int) -> None:
        self.passes = {one.name: passes_of(one) for one in sets}
        self._rows = rows
        self._batch_size = batch_size

    def rounds(self) -> Iterator[Round]:
        """Rounds in the order in which they are answered."""
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
    """Answer and score the prompts of every set, round after round, alongside whatever else the engines do."""
    began = time.perf_counter()
    if any(one.num_samples > 1 for passes in plan.passes.values() for one in passes):
        verifier().start()  # it will compare their votes
    answered: dict[str, list[SampleGroup]] = defaultdict(list)
    for one in plan.rounds():
        way, count = one.way, len(one.rows)
        result = await scheduler.collect(draw_from(one.rows), count, way.num_samples, way.params, one.first)
        answered[way.name] += result.groups
    return Validation(plan, answered, time.perf_counter() - began)


def draw_from(rows: Sequence[PromptRow]) -> DrawPrompts:
    """A source that gives ``rows`` in order, once."""
    remaining = iter(rows)
    return lambda count: list(islice(remaining, count))


class PromptSource(RolloutSource[PromptRow, SampleGroup, Validation]):
    """Prompts in the seeded order of their data, answered by the engines and scored by the rewards."""

    def __init__(
        self, config: RLVRConfig, plan: RLVRPlan, clusters: Clusters, data: RunData, engines: EngineClient
    ) -> None:
        self._config = config
        self._plan = plan
        self._data = data
        self._engines = engines
        self._pad_token_id = pad_token_id(data.tokenizer)
        quarantine = SampleQuarantine(plan.log_dir)
        scorer = None
        if clusters.reward_model is not None:
            columns = [config.actor_train.data_args, *(one.data_args for one in plan.validation_sets)]
            scorer = ModelScorer(clusters.reward_model, model_inputs(config.rewards), columns, quarantine)
        self._rewards = RewardClient(clusters.rewards, scorer, quarantine)
        self._validation_plan = ValidationPlan(plan.validation_sets, data.validation, config.val_batch_size)
        self._scheduler = RolloutScheduler(engines, self._rewards, config.seed, deadline=config.rpc_timeout)
        self._params = sampling_params(config.actor_infer.generating_args, plan.max_new_tokens)
        filters = {
            name: build_filter(section.query_filter_config.type, section.query_filter_config.filter_args)
            for name, section in config.rewards.items()
        }
        path = config.user_defined_rollout_loop_cls
        loop: RolloutLoop | None = None if path is None else rollout_loops.resolve(path)()
        self._rows = PromptRows(config, data.tokenizer, plan.max_new_tokens)
        loop = self._rows.loop or loop
        settings = GroupSettings(plan.group_size, self._params, config.seed, filters)
        self.flow = PromptFlow(engines, self._rewards, data.sampler.next_batch, settings, 0, loop)
        self.codec = PromptCodec(data.sampler.find)

    def begin(self, step: int) -> None:
        self._rows.begin(step)

    def batch(self, groups: list[SampleGroup], driver: DriverLoop) -> tuple[DataProto, Metrics]:
        batch, metrics = build_batch(groups, self._pad_token_id), reward_metrics(groups)
        metrics |= self._rows.add_columns(batch, groups)
        quarantine = self._rewards.quarantine
        if quarantine.num_deaths:  # since the run began; nothing before the first
            metrics["scheduler/reward_worker_deaths"] = Mean(quarantine.num_deaths)
            metrics["scheduler/set_aside_samples"] = Mean(quarantine.num_samples)
        if self._config.reward_weights:
            batch.batch["reward_components"] = reward_components(groups, list(self._config.reward_weights))
        if self._plan.needs_greedy_baseline:
            batch.batch.update(greedy_baseline(groups, driver.run(self._greedy([group.prompt for group in groups]))))
            # Samples whose baseline cannot be scored lose their own score, since their advantage is unknown.
            scores = batch.batch["baseline_scores"]
            batch.batch["scores"] = batch.batch["scores"].masked_fill(scores.isnan(), float("nan"))
            scored = scores[~scores.isnan()]
            metrics["critic/baseline_score/mean"] = Mean(float(scored.sum()), len(scored))
        return batch, metrics

    async def _greedy(self, prompts: list[PromptRow]) -> list[SampleGroup]:
        """The greedy response to each of ``prompts``; the engines have nothing left to do afterwards."""
        params = greedy(self._plan.max_new_tokens, self._params)
        result = await self._scheduler.collect(draw_from(prompts), len(prompts), 1, params, first_draw=0)
        await self._engines.drain()
        return result.groups

    def table(self, groups: Sequence[SampleGroup]) -> SampleTable:
        return dumped_table(groups, self._plan.dump_dir)

    def notes(self, groups: Sequence[SampleGroup]) -> Notes:
        return sample_notes(groups)

    def validation(self) -> Coroutine[Any, Any, Validation]:
        """Answer and score the prompts of every set."""
        return validate(self._validation_plan, self._scheduler)

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self._data.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._data.sampler.load_state_dict(state["sampler"])


def reward_metrics(groups: list[SampleGroup]) -> Metrics:
    """Metrics by domain: score, other numbers of the reward, shares of samples whose reward failed or timed out."""
    by_domain: dict[str, list[SampleGroup]] = defaultdict(list)
    for group in groups:
        by_domain[group.prompt.domain].append(group)
    metrics: Metrics = {}
    for domain, members in by_domain.items():
        scores = np.concatenate([group.scores() for group in members])
        scores = scores[~np.isnan(scores)]
        if len(scores):
            metrics[f"{domain}/score/mean"] = Mean(float(scores.sum()), len(scores))
            metrics[f"{domain}/score/max"] = Max(float(scores.max()))
            metrics[f"{domain}/score/min"] = Min(float(scores.min()))
        results = [result for group in members for result in group.rewards]
        metrics |= {f"reward/{domain}/{name}": Mean(rate) for name, rate in failure_rates(results).items()}
        numbers: dict[str, list[float]] = defaultdict(list)
        for result in results:
            for name, number in result.metrics.items():
                numbers[name].append(number)
        metrics |= {f"reward/{domain}/{name}": Mean(sum(n), len(n)) for name, n in numbers.items()}
    return metrics
