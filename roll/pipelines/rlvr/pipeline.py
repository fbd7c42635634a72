"""The RLVR pipeline: reinforcement learning from verifiable rewards. The engines answer prompts, and rewards score the
answers; validation answers the prompts of every set by sampling and greedily."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from roll.config.loader import LoadedConfig
from roll.config.rewards import model_inputs
from roll.datasets.types import PromptRow
from roll.distributed import DriverLoop
from roll.methods.policy import PolicyMethod, PromptRows
from roll.pipelines.clusters import Clusters, ClusterStarter
from roll.pipelines.engine_rollout import RolloutSource, Validation
from roll.pipelines.files import pad_token_id, sample_table
from roll.pipelines.policy_pipeline import PolicyPipeline
from roll.pipelines.rlvr.accuracy import Answers, overall, pass_metrics, verifier
from roll.pipelines.rlvr.config import RLVRConfig, RLVRPlan, ValidationSet
from roll.pipelines.rlvr.data import RunData, load_data
from roll.pipelines.sample_records import sample_notes
from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean, Metrics, Min
from roll.rewards import failure_rates
from roll.rollout.engines import EngineClient
from roll.rollout.flow import GroupFlow, build_filter, by_domain, collected, greedy, sampling_params
from roll.rollout.groups import SampleGroup, build_batch, greedy_baseline, reward_components
from roll.rollout.loops import GroupSettings, RolloutLoop, rollout_loops
from roll.rollout.rewarding import ModelScorer, RewardClient, SampleQuarantine
from roll.rollout.scheduling import prompt_codec
from roll.serving.harness import run_program
from roll.serving.server import FrontOptions, HttpFront
from roll.strategies.engines.requests import SamplingParams
from roll.tracking import SampleTable

# Answers and scores prompts: rows, samples of each, sampling parameters, and the number of the first draw.
Answer = Callable[[Sequence[PromptRow], int, SamplingParams, int], Coroutine[Any, Any, list[SampleGroup]]]


async def validate(
    sets: Sequence[ValidationSet], rows: Mapping[str, Sequence[PromptRow]], batch_size: int, answer: Answer
) -> Validation:
    """Answer and score the ``rows`` of every set, ``batch_size`` at a time, alongside whatever else the engines do: by
    sampling and, unless switched off, greedily. With several sets ``val_correct`` is over all their questions."""
    began = time.perf_counter()
    metrics: dict[str, float] = {}
    primary: dict[str, list[Answers]] = {}
    answered: dict[str, list[tuple[str, list[SampleGroup]]]] = {one.name: [] for one in sets}
    for one in sets:
        params, prompts = sampling_params(one.generating_args, one.max_new_tokens), rows[one.name]
        passes = [("sampled", params, one.samples_per_prompt)]
        passes += [("greedy", greedy(one.max_new_tokens, params), 1)] if one.greedy else []
        for name, own, count in passes:
            groups = []
            for first in range(0, len(prompts), batch_size):
                # Draws are counted from 0 in every pass: with the same seeds, validations differ by the policy alone.
                groups += await answer(prompts[first : first + batch_size], count, own, first)
            answered[one.name].append((f"{one.name}.{name}" if one.name else name, groups))
    seconds = time.perf_counter() - began
    for set_name, passed in answered.items():
        for name, groups in passed:
            answers = [Answers.of(group) for group in groups]
            metrics |= pass_metrics(answers, name, set_name not in primary, in_training=True)
            primary.setdefault(set_name, answers)
    metrics |= overall(primary) if len(primary) > 1 else {}
    return Validation(metrics, {name: passed[0][1] for name, passed in answered.items()}, seconds)


class PromptSource(RolloutSource):
    """Prompts in the seeded order of their data, answered by the engines and scored by the rewards."""

    def __init__(self, config: RLVRConfig, plan: RLVRPlan, clusters: Clusters, data: RunData) -> None:
        self._config, self._plan, self._clusters, self.data = config, plan, clusters, data
        self.tokenizer = data.tokenizer

    def connect(self, engines: EngineClient) -> None:
        config, plan, clusters, self._engines = self._config, self._plan, self._clusters, engines
        self._pad_token_id = pad_token_id(self.tokenizer)
        self._weights = list(config.estimator.get("weights") or ())  # names of the rewards that gdpo normalises apart
        quarantine = SampleQuarantine(plan.log_dir)
        scorer = None
        if clusters.reward_model is not None:
            columns = [config.actor_train.data_args, *(one.data_args for one in plan.validation_sets)]
            scorer = ModelScorer(clusters.reward_model, model_inputs(config.rewards), columns, quarantine)
        self._rewards = RewardClient(clusters.rewards, scorer, quarantine)
        self._params = sampling_params(config.actor_infer.generating_args, plan.max_new_tokens)
        filters = {
            name: build_filter(section.query_filter_config.type, section.query_filter_config.filter_args)
            for name, section in config.rewards.items()
        }
        path = config.user_defined_rollout_loop_cls
        loop: RolloutLoop | None = None if path is None else rollout_loops.resolve(path)()
        self._rows = PromptRows(config, self.tokenizer, plan.max_new_tokens)
        settings = GroupSettings(plan.group_size, self._params, config.seed, by_domain(filters))
        draw, loop = self.data.sampler.next_batch, self._rows.loop or loop
        self.flow = GroupFlow(engines, self._rewards, draw, settings, loop=loop)
        self.codec = prompt_codec(self.data.sampler.find)

    def batch(self, groups: list[SampleGroup], driver: DriverLoop) -> tuple[DataProto, Metrics]:
        batch = build_batch(groups, self._pad_token_id)
        metrics = reward_metrics(groups) | self._rows.add_columns(batch, groups)
        quarantine = self._rewards.quarantine
        if quarantine.num_deaths:  # since the run began; nothing before the first
            metrics["scheduler/reward_worker_deaths"] = Mean(quarantine.num_deaths)
            metrics["scheduler/set_aside_samples"] = Mean(quarantine.num_samples)
        if self._weights:
            batch.batch["reward_components"] = reward_components(groups, self._weights)
        if self._plan.needs_greedy_baseline:
            params, prompts = greedy(self._plan.max_new_tokens, self._params), [group.item for group in groups]
            batch.batch.update(greedy_baseline(groups, driver.run(self._answer(prompts, 1, params, 0))))
            driver.run(self._engines.drain())  # aborted requests would stay in the engines' caches
            # Samples whose baseline cannot be scored lose their own score, since their advantage is unknown.
            scores = batch.batch["baseline_scores"]
            batch.batch["scores"] = batch.batch["scores"].masked_fill(scores.isnan(), float("nan"))
            scored = scores[~scores.isnan()]
            metrics["critic/baseline_score/mean"] = Mean(float(scored.sum()), len(scored))
        return batch, metrics

    async def _answer(
        self, rows: Sequence[PromptRow], num_samples: int, params: SamplingParams, first: int
    ) -> list[SampleGroup]:
        """The scored samples of ``rows``, whose draws are counted from ``first``."""
        settings, remaining = GroupSettings(num_samples, params, self._config.seed), iter(rows)
        flow = GroupFlow(self._engines, self._rewards, lambda count: list(islice(remaining, count)), settings, first)
        return (await collected(flow, len(rows), 0, self._config.rpc_timeout)).groups

    def table(self, groups: Sequence[SampleGroup]) -> SampleTable:
        return sample_table(groups, self._plan.dump_dir)

    notes = staticmethod(sample_notes)

    def validation(self) -> Coroutine[Any, Any, Validation]:
        return validate(self._plan.validation_sets, self.data.validation, self._config.val_batch_size, self._answer)

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.data.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.sampler.load_state_dict(state["sampler"])


def reward_metrics(groups: list[SampleGroup]) -> Metrics:
    """Metrics by domain: score, other numbers of the reward, shares of samples whose reward failed or timed out."""
    by_domain: dict[str, list[SampleGroup]] = defaultdict(list)
    for group in groups:
        by_domain[group.item.domain].append(group)
    metrics: Metrics = {}
    for domain, members in by_domain.items():
        scores = np.concatenate([group.scores() for group in members])
        scores = scores[~np.isnan(scores)]
        if len(scores):
            metrics[f"{domain}/score/mean"] = Mean(float(scores.sum()), len(scores))
            metrics[f"{domain}/score/max"] = Max(float(scores.max()))
            metrics[f"{domain}/score/min"] = Min(float(scores.min()))
        results = [one.reward for group in members for one in group.members]
        metrics |= {f"reward/{domain}/{name}": Mean(rate) for name, rate in failure_rates(results).items()}
        numbers: dict[str, list[float]] = defaultdict(list)
        for result in results:
            for name, number in result.metrics.items():
                numbers[name].append(number)
        metrics |= {f"reward/{domain}/{name}": Mean(sum(n), len(n)) for name, n in numbers.items()}
    return metrics


class RLVRPipeline(PolicyPipeline[RLVRConfig, RLVRPlan]):
    def __init__(self, loaded: LoadedConfig[RLVRConfig]) -> None:
        super().__init__(loaded)
        self.rows_per_step = self.plan.samples_per_step
        self.validates_first = self.config.validation is None or self.config.validation.before_train

    def start_scorers(self, starter: ClusterStarter) -> dict[str, Any]:
        return starter.start_scorers(self.config)

    def load_data(self) -> PromptSource:
        if self.plan.eval_steps and any(one.samples_per_prompt > 1 for one in self.plan.validation_sets):
            verifier().start()  # It will compare votes, and imports while prompts are read.
        return PromptSource(self.config, self.plan, self.clusters, load_data(self.config, self.plan))

    def build_method(self) -> PolicyMethod:
        return PolicyMethod(self.config, self.plan.norm_types, self.plan.max_new_tokens)

    def validate(self, step: int) -> None:
        """Like the base class, after the program of ``validation.harness``, which has the engines to itself."""
        harness = None if self.config.validation is None else self.config.validation.harness
        if harness is not None:
            name, model = harness.name, self.plan.roles["actor_infer"]
            with self.context.phase("val_harness"), self.generating():
                front = HttpFront(FrontOptions(name, max_running_requests=self.config.max_running_requests))
                try:
                    front.open(self.clusters.actor_infer, self.source.tokenizer)
                    output = self.plan.output_dir / "validation" / name / f"step-{step}"
                    metrics = run_program(harness, front, str(model.model_path), output)
                finally:
                    front.close()
            self.by_harness = {f"{name}/{metric}": value for metric, value in metrics.items()}
        super().validate(step)
