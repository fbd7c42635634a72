"""The evaluation: every model answers the prompts of every set, rewards score the answers, and the models are compared.

Engines are started once for all models that share an architecture and a tokenizer; between two of them only weights are
exchanged. What is answered is on disk at once, so that an evaluation that is killed continues where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roll.config.loader import LoadedConfig
from roll.config.plan.plan import RolePlan
from roll.config.rewards import REWARD_MODEL, judge_role, model_inputs
from roll.config.weight_sync import WeightSyncConfig
from roll.datasets import PromptDataset
from roll.distributed import Cluster, DriverLoop
from roll.pipelines.evaluate.checks import describe
from roll.pipelines.evaluate.config import EvaluateConfig
from roll.pipelines.evaluate.plan import EvaluatedModel, EvaluatePlan, Pass
from roll.pipelines.evaluate.results import Results
from roll.pipelines.evaluate.samples import SampleFile, settings_of
from roll.pipelines.files import load_tokenizer
from roll.pipelines.residency import GENERATION, WEIGHTS, Residency, moves_states
from roll.pipelines.rlvr.data import read_prompts
from roll.pipelines.rlvr.judge import JudgeService
from roll.pipelines.rlvr.planning import judge_roles
from roll.pipelines.run_context import RunContext
from roll.rollout.engines import EngineClient
from roll.rollout.flow import GroupSettings, PromptFlow, greedy, sampling_params
from roll.rollout.groups import SampleGroup
from roll.rollout.rewarding import ModelScorer, RewardClient
from roll.rollout.routing import build_router
from roll.strategies.engines.requests import SamplingParams
from roll.weight_sync.controller import WeightSync
from roll.weight_sync.messages import MIB, SyncOptions
from roll.workers import GENERATION_WORKER, REWARD_MODEL_WORKER, REWARD_WORKER, STORED_WEIGHTS_WORKER
from roll.workers.generation import GenerationWorker
from roll.workers.model import ModelWorker
from roll.workers.reward import RewardSettings, RewardWorker
from roll.workers.stored_weights import StoredWeightsWorker

logger = logging.getLogger(__name__)

EXIT_BELOW = 3
"""Exit status of an evaluation in which a model stays below a threshold."""


class EvaluationContext(RunContext):
    """As other runs', without checkpoints: every answer is on disk."""

    def record_validation(self, metrics: Mapping[str, float], steps_done: int) -> None:
        """Metrics of a model, under its place among the models."""
        self._tracker.log(metrics, steps_done)

    def _account(self) -> str:
        return f"what is answered is in {self.plan.output_dir}: the same command continues there"


@dataclass
class Scorers:
    """The clusters that score, for the whole evaluation."""

    rewards: Mapping[str, Cluster] = field(default_factory=dict)
    reward_model: Cluster | None = None
    judges: Mapping[str, JudgeService] = field(default_factory=dict)
    judge_engines: Mapping[str, Cluster] = field(default_factory=dict)


class EvaluatePipeline:
    """An evaluation, from start to table."""

    def __init__(self, loaded: LoadedConfig[EvaluateConfig]) -> None:
        assert isinstance(loaded.plan, EvaluatePlan)
        self.loaded = loaded
        self.config: EvaluateConfig = loaded.config
        self.plan: EvaluatePlan = loaded.plan
        self.context = EvaluationContext(loaded)

    def run(self) -> int:
        """Ask all models; the exit status."""
        with self.context.running() as resources:
            settings = settings_of(self.config, self.plan)
            self.samples = SampleFile(self.plan.output_dir, settings, self.config.evaluate.resume)
            self.context.at_end(self.samples.close)
            self.driver = DriverLoop()
            self.context.at_end(self.driver.close)
            self.residency = Residency(self.plan, moves_states(self.config.is_offload_states))
            self.resources = resources
            self.scorers: Scorers | None = None
            self.version = 0
            self.results = Results(self.config, self.plan, self.samples)
            for group in self.plan.groups():
                self.evaluate_group(group)
        return EXIT_BELOW if self.results.finish() else 0

    def evaluate_group(self, models: Sequence[EvaluatedModel]) -> None:
        """Models that share engines: the first of them that has something left to do loads its own weights."""
        base = self.role_of(models[0])
        tokenizer = load_tokenizer(base.model_path, base.section.model_args.trust_remote_code)
        plan = replace(self.plan, roles={**self.plan.roles, "actor_infer": base})
        prompts = {
            one.name: read_prompts(self.config, plan, one.data_args, one.prompt_length, tokenizer)
            for one in self.plan.validation_sets
        }
        engines: Engines | None = None
        for model in models:
            left = [(way, numbers) for way in self.plan.passes if (numbers := self.unanswered(model, way, prompts))]
            if left:
                with self.context.interruptible():
                    engines = self.load(model, base, engines)
                    for way, numbers in left:
                        logger.info("%s: %s, %d prompts x %d", describe(model), way.name, len(numbers), way.num_samples)
                        self.driver.run(self.answer(model, way, prompts[way.set_name], numbers, engines.client))
            metrics = self.results.of_model(model.name)
            self.context.record_validation(metrics, self.plan.models.index(model))
            shown = ", ".join(f"{way.name} {metrics[f'val/{way.name}/accuracy']:.3f}" for way in self.plan.passes)
            logger.info("%s: accuracy %s", describe(model), shown)
        if engines is not None:
            engines.close(self.residency)

    def unanswered(self, model: EvaluatedModel, way: Pass, prompts: Mapping[str, PromptDataset]) -> list[int]:
        """Numbers of the prompts that a pass still has to ask."""
        answered = self.samples.answered(model.name, way.name)
        return [number for number in range(len(prompts[way.set_name])) if number not in answered]

    async def answer(
        self, model: EvaluatedModel, way: Pass, prompts: PromptDataset, numbers: Sequence[int], client: EngineClient
    ) -> None:
        """Have prompts answered and scored, ``val_batch_size`` in flight at a time; each is written when it is done.

        The seed of a prompt's samples depends on its number alone: not on what else is in flight, nor on how often the
        evaluation was interrupted.
        """
        assert self.scorers is not None
        params = self.params_of(way)
        temperature = params.temperature
        flow = PromptFlow(
            client,
            self.reward_client(),
            lambda count: [prompts[flow.next_order]],
            GroupSettings(way.num_samples, params, self.config.seed),
            first_draw=0,
        )
        waiting = iter(numbers)

        def fill() -> None:
            while flow.num_in_flight < self.config.val_batch_size and (number := next(waiting, None)) is not None:
                flow.next_order = number
                flow.start(1)

        fill()
        try:
            while flow.num_in_flight:
                done = await flow.progress(self.config.rpc_timeout)
                for group in done.accepted:
                    self.write(model, way, group, temperature)
                fill()
        finally:
            await flow.abort()

    def write(self, model: EvaluatedModel, way: Pass, group: SampleGroup, temperature: float) -> None:
        self.samples.write(model.name, way.name, group, temperature=temperature)

    def params_of(self, way: Pass) -> SamplingParams:
        """Sampling parameters of a pass."""
        one = next(one for one in self.plan.validation_sets if one.name == way.set_name)
        params = sampling_params(one.generating_args, one.max_new_tokens)
        if way.is_greedy:
            return greedy(one.max_new_tokens, params)
        return params if way.temperature is None else replace(params, temperature=way.temperature)

    # Engines and rewards

    def role_of(self, model: EvaluatedModel) -> RolePlan:
        """``actor_infer`` with the folder of a model."""
        role = self.plan.roles["actor_infer"]
        model_args = replace(role.section.model_args, model_name_or_path=model.base)
        return replace(role, model_path=model.base, section=replace(role.section, model_args=model_args))

    def load(self, model: EvaluatedModel, base: RolePlan, engines: Engines | None) -> Engines:
        """Engines that hold the weights of ``model``: started for it, or given them."""
        if engines is None:
            self.start_scorers()
            engines = Engines(self, base if model.checkpoint else self.role_of(model))
            if model.checkpoint is None:
                self.bring()
                return engines
        self.residency.bring({"actor_infer": WEIGHTS})
        self.version += 1
        with self.context.phase("step_model_update"):
            engines.exchange(model, self.version)
        self.bring()
        return engines

    def bring(self) -> None:
        """Everything that answers and scores, on its devices."""
        assert self.scorers is not None
        judges = dict.fromkeys(("actor_infer", *self.scorers.judges), GENERATION)
        self.residency.bring({REWARD_MODEL: WEIGHTS, **judges})
        for judge in self.scorers.judges.values():
            judge.resume()

    def cluster(self, name: str, worker: str, settings: Any = None, role: RolePlan | None = None) -> Cluster:
        section = (role or self.plan.roles[name]).section
        timeout = self.config.rpc_timeout
        cluster = Cluster(
            *(name, section.worker_cls if worker != REWARD_WORKER and section.worker_cls else worker),
            self.resources,
            section,
            seed=self.config.seed,
            settings=settings,
            rpc_timeout=timeout,
        )
        self.context.watch([cluster])
        return cluster

    def start_scorers(self) -> None:
        """Reward workers, judges and the reward model; once."""
        if self.scorers is not None:
            return
        config, plan = self.config, self.plan
        asked = judge_roles(config)
        judges = {name: JudgeService(config, plan, name) for name in plan.roles if name in asked}
        for judge in judges.values():
            self.context.at_end(judge.close)
        rewards, waiting = {}, []
        for name, section in config.rewards.items():
            judge = judges.get(judge_role(name, section) or "")
            settings = RewardSettings(**judge.address) if judge is not None else None
            rewards[name] = self.cluster(f"rewards.{name}", REWARD_WORKER, settings)
            waiting.append(rewards[name].call_all(RewardWorker.initialize))
        scorer = None
        if model_inputs(config.rewards):
            scorer = self.cluster(REWARD_MODEL, REWARD_MODEL_WORKER)
            scorer.call_all(ModelWorker.initialize, 0).result()
            self.admit(scorer, WEIGHTS)
        engines = {name: self.cluster(name, GENERATION_WORKER) for name in judges}
        for name, engine in engines.items():
            engine.call_all(GenerationWorker.initialize).result()
            self.admit(engine, GENERATION)
            judges[name].open(engine)
        for line in dict.fromkeys(line for call in waiting for line in call.result() if line):
            logger.info("%s", line)
        self.scorers = Scorers(rewards, scorer, judges, engines)

    def admit(self, cluster: Cluster, states: frozenset[Any]) -> None:
        if self.residency.moves(cluster.name):
            self.residency.admit(cluster, states)

    def reward_client(self) -> RewardClient:
        assert self.scorers is not None
        scorer = None
        if self.scorers.reward_model is not None:
            columns = [one.data_args for one in self.plan.validation_sets]
            scorer = ModelScorer(self.scorers.reward_model, model_inputs(self.config.rewards), columns)
        return RewardClient(self.scorers.rewards, scorer)


class Engines:
    """The engines of ``actor_infer``, and who sends them the weights of other models."""

    def __init__(self, pipeline: EvaluatePipeline, role: RolePlan) -> None:
        config = pipeline.config
        self._pipeline, self._role = pipeline, role
        self._cluster = pipeline.cluster("actor_infer", GENERATION_WORKER, role=role)
        self._cluster.call_all(GenerationWorker.initialize).result()
        pipeline.admit(self._cluster, GENERATION)
        router = build_router(config.router_args.router_name, config.router_args.router_config)
        limit = config.router_args.max_running_requests or config.max_running_requests
        timeout = min(config.actor_infer.engine_timeout, config.rpc_timeout)
        self.client = EngineClient(self._cluster, limit, 0.05, router=router, max_restarts=0, turn_timeout=timeout)
        self._source: Cluster | None = None
        self._sync: WeightSync | None = None

    def exchange(self, model: EvaluatedModel, version: int) -> None:
        """Give the engines the weights of another model, verified tensor by tensor."""
        if self._source is None:
            section = replace(
                self._role.section, device_mapping=None, world_size=1, num_gpus_per_worker=1, worker_cls=None
            )
            self._source = self._pipeline.cluster(
                "stored_weights", STORED_WEIGHTS_WORKER, role=replace(self._role, section=section)
            )
            self._sync = WeightSync(self._source, self._cluster, self._options())
        checkpoint = None if model.checkpoint is None else str(model.checkpoint)
        self._source.call_all(StoredWeightsWorker.open, model.base, checkpoint).result()
        assert self._sync is not None
        self._pipeline.driver.run(self.client.pause())
        self._sync.sync(version)
        self._pipeline.driver.run(self._resume())

    async def _resume(self) -> None:
        self.client.resume()

    def _options(self) -> SyncOptions:
        """Through memory of the host, where the weights are read; whole, since models have nothing in common."""
        config = self._pipeline.config
        keys: WeightSyncConfig = config.weight_sync
        transport = "safetensors" if keys.transport == "safetensors" else "shared_memory"
        return SyncOptions(
            buffer_bytes=config.model_update_buffer_size_mb * MIB,
            deadline=config.rpc_timeout,
            patience=min(config.actor_infer.engine_timeout, config.rpc_timeout),
            transport=transport,
            directory=keys.directory or str(self._pipeline.plan.output_dir / "weight_sync"),
        )

    def close(self, residency: Residency) -> None:
        """End the engines, for those of another architecture."""
        for cluster in (self._source, self._cluster):
            if cluster is not None:
                cluster.shutdown(graceful=True)
        residency.dismiss("actor_infer")
