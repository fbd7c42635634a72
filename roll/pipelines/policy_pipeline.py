"""The steps of every pipeline whose policy learns from its own samples.

One training step: the engines take over the newest weights and generate samples, which are scored; every model
computes the columns that something needs of it; scores become advantages; actor and critic learn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, TypeVar

from roll.config.loader import LoadedConfig
from roll.config.rewards import REWARD_MODEL
from roll.config.roles import GeneratingArguments
from roll.config.run import PolicyRunConfig
from roll.distributed import Cluster, ResourceManager
from roll.distributed.signals import ending
from roll.methods.base import Ask
from roll.methods.policy import PolicyMethod
from roll.methods.policy_plan import PolicyPlan
from roll.pipelines.batches import RecordedBatch, RecordedRollouts
from roll.pipelines.clusters import Clusters, ClusterStarter
from roll.pipelines.engine_rollout import EngineRollout, RolloutSource, Validation, engine_client
from roll.pipelines.files import export_model
from roll.pipelines.model_calls import (
    GENERATION,
    TRAINING,
    WEIGHTS,
    Residency,
    answers,
    num_samples,
    start_computing,
    update_model,
)
from roll.pipelines.run_context import RunContext
from roll.pipelines.strict import Certificate
from roll.protocol import DataProto
from roll.protocol.metrics import Mean
from roll.rollout.engines import SLICE_SECONDS
from roll.strategies.base import Output
from roll.weight_sync.sender import WeightSync, sync_options

ConfigT = TypeVar("ConfigT", bound=PolicyRunConfig)
PlanT = TypeVar("PlanT", bound=PolicyPlan)
R = TypeVar("R")


def temperature_of(sampling: GeneratingArguments) -> float:
    return sampling.temperature if sampling.do_sample else 1.0


class PolicyPipeline(ABC, Generic[ConfigT, PlanT]):
    """A run, from start to summary."""

    source: RolloutSource
    rollout: EngineRollout
    clusters: Clusters
    slice_seconds = SLICE_SECONDS  # see :class:`~roll.rollout.engines.EngineClient`
    certificate: Certificate | None = None
    validates_first = True  # validate before the first step
    router: str | None = None  # name of the router where the configuration leaves it open

    rows_per_step: int | None = None  # rows of a step's batch; None: it varies

    def __init__(self, loaded: LoadedConfig[ConfigT]) -> None:
        self.loaded = loaded
        self.config = loaded.config
        plan: Any = loaded.plan
        self.plan: PlanT = plan
        # Models compute log-probs at the temperature of sampling.
        self.temperature = temperature_of(self.config.actor_infer.generating_args)
        self.recorded = RecordedRollouts(self.config, self.plan.output_dir)
        # Metrics of `validation.harness`, which are reported with the next validation.
        self.by_harness: dict[str, float] = {}
        self.context = RunContext(loaded)

    def run(self) -> None:
        """Train until ``max_steps``; everything that was started is stopped again, however it ends."""
        with self.context.running() as resources:
            self.start(resources)
            first_step = self.restore()
            self.context.save_when_interrupted(partial(self.state_dict, interrupt=False), self.save_abandoned)
            for step in self.context.steps(first_step, self.config.max_steps):
                self.train_one_step(step)
            self.finish()

    def start(self, resources: ResourceManager) -> None:
        """Start all clusters; the data is read while their workers load their models."""
        starter = ClusterStarter(self.config, self.plan, resources)
        # Processes start in the order of this dictionary's parts.
        roles = starter.start_computing() | self.start_scorers(starter) | starter.start_engines()
        self.clusters = Clusters(**roles)
        self.begin_loading(starter, self.clusters.all())
        self.source = self.load_data()
        starter.finish(self.residency)
        self.connect()

    def begin_loading(self, starter: ClusterStarter, started: list[Cluster]) -> None:
        """Let the models load; ``started`` ends with the run."""
        self.residency = Residency(self.plan, self.config.is_offload_states)
        # Their models are in checkpoints.
        self.learners = [one for one in (self.clusters.actor_train, self.clusters.critic) if one is not None]
        # Before anything loads: a start that fails half-way must still end these processes.
        self.context.watch(started)
        for judge in self.clusters.judges.values():
            self.context.at_end(judge.close)
        self.models = starter.models
        starter.begin(self.residency)

    @abstractmethod
    def start_scorers(self, starter: ClusterStarter) -> dict[str, Any]:
        """Start the processes that score, by field of :class:`~roll.pipelines.clusters.Scorers`."""

    @abstractmethod
    def load_data(self) -> RolloutSource:
        """Read the prompts or tasks; the rollout's source, which is yet to be connected."""

    @abstractmethod
    def build_method(self) -> PolicyMethod:
        """The algorithm."""

    def connect(self) -> None:
        config, plan = self.config, self.plan
        role, cluster = plan.roles["actor_infer"], self.clusters.actor_infer
        engines = engine_client(config, role, cluster, self.slice_seconds, self.router)
        self.source.connect(engines)
        self.rollout = EngineRollout(config, plan, engines, self.source)
        self.context.at_end(self.rollout.close)
        self.method = self.build_method()
        self.certificate = Certificate(config, plan) if config.strict_on_policy else None
        options = sync_options(config, config.weight_sync, config.actor_infer, plan)
        self.weight_sync = WeightSync(self.clusters.actor_train, self.clusters.actor_infer, options)

    def train_one_step(self, step: int) -> None:
        """The algorithm. Until the models learn, a signal may end it, except during the exchange of weights, whose two
        sides wait for each other; a resumed run repeats the step."""
        concurrent = self.plan.validates_concurrently and self.is_validation_due(step)
        # Before the first step too: engines start from the model's folder, a resumed trainer from its checkpoint.
        self.update_engines(step)
        with ending.interruptible():
            if self.is_validation_due(step) and not concurrent:
                self.validate(step)
            batch = self.generate(step)
        # The state before `credit`, which moves running moments and coefficients: `roll replay` begins with it.
        self.context.batches.hold(step, batch, self.method.state_dict())
        with self.validating(step) if concurrent else nullcontext():
            with ending.interruptible():
                self.add_model_columns(batch)
                with self.context.phase("adv"):
                    self.context.record(self.method.credit(batch))
                self.record_samples(batch, step)
            if not self.context.is_left_out(step):
                self.learn(batch, step)
        self.context.record(self.residency.metrics())
        self.context.end_step(step)
        if self.context.is_save_due(step):
            self.save(step + 1, self.state_dict())

    def update_engines(self, version: int) -> None:
        with self.context.phase("step_model_update"):
            self.residency.bring({"actor_train": WEIGHTS, "actor_infer": WEIGHTS})
            self.context.record(self.rollout.exchange(version, lambda: self.weight_sync.sync(version)))

    def generate(self, step: int) -> DataProto:
        if self.recorded.replays:
            with self.context.phase("step_generate"):
                batch, metrics = self.recorded.read(step, self.rows_per_step)
            self.context.record(metrics)
            return batch
        with self.context.phase("step_generate"), self.generating():
            batch, table, metrics = self.rollout.collect(step)
        if self.recorded.writes:
            self.recorded.write(step, batch)
        self.context.record(metrics)
        self.context.dump_samples("train", step, table)
        return batch

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Keep the engines of policy and judges, or a reward model, on their devices for the length of the block."""
        judges = self.clusters.judges
        # Nothing is undone after an exception: it ends the run, and with it judges and engines.
        self.residency.bring({REWARD_MODEL: WEIGHTS, **dict.fromkeys(("actor_infer", *judges), GENERATION)})
        for judge in judges.values():
            judge.resume()
        yield
        for name, judge in judges.items():
            judge.check()
            if self.residency.moves(name):
                judge.pause()

    def add_model_columns(self, batch: DataProto) -> None:
        """Columns that the models compute of the samples, where something consumes them."""
        if self.plan.engine_log_probs_as_old:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        # groupby joins neighbours only: a method lists the asks of one phase together.
        for phase, asks in groupby(self.method.asks(self.plan, self.temperature), key=attrgetter("phase")):
            with self.context.phase(phase):
                found = answers(batch, list(asks), self.clusters.computing, self.residency, self.replacing)
                self.context.record(self.method.receive(batch, found, phase))

    def replacing(self, cluster: Cluster, work: Callable[[], R]) -> R:
        """See :meth:`roll.pipelines.run_context.RunContext.replacing`; a model that learns is not replaced."""
        if cluster.name in self.plan.training:
            return work()
        return self.context.replacing(cluster, self.models[cluster.name].build, work)

    def record_samples(self, batch: DataProto, step: int) -> None:
        """Keep samples for reports; before the models learn, so that a step that fails has them too."""
        trainer = batch.batch["old_log_probs"] if self.plan.needs_old_log_probs else None
        # With a certificate the trainer's log-probs are the engine's.
        every = self.config.sample_log.mismatch_steps if self.certificate is None else 0
        if trainer is None and every and step % every == 0 and not self.recorded.replays:
            with self.context.phase("sample_log"):
                ask = Ask(temperature=self.temperature)
                trainer = start_computing(batch, self.clusters.actor_train, ask, self.residency)()[Output.LOG_PROBS]
        self.context.samples.policy(step, batch, self.rollout.notes, self.source.tokenizer, trainer)

    def learn(self, batch: DataProto, step: int) -> None:
        """All optimizer steps of actor and critic on this batch."""
        seed = (self.config.seed, step) if self.config.shuffle_mini_batches else None
        warms_up = self.plan.needs_critic and step < self.config.critic_warmup
        with self.context.phase("step_train"):
            for role, loss in self.method.losses(self.plan, self.temperature).items():
                # The advantages of an untrained critic are noise.
                if role == "actor_train" and warms_up:
                    continue
                self.residency.bring({role: TRAINING})
                training, cluster = self.plan.training[role], self.clusters.computing[role]
                # The last mini-batch may be smaller: rows of episodes need not divide.
                num_mini_batches = -(-num_samples(batch) // training.mini_batch_size)
                compared = self.certificate if role == "actor_train" else None
                with nullcontext() if compared is None else compared.judging(self.loaded, batch, step):
                    metrics = update_model(batch, cluster, loss, num_mini_batches, training.epochs, seed)
                self.context.record(metrics)
                if compared is not None:
                    compared.add(metrics)

    def replay(self, recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        """Repeat the step of a recorded batch, without engines and rewards.

        Returns:
            The steps that the models had done before, and the metrics of the step.
        """
        with self.context.running() as resources:
            starter = ClusterStarter(self.config, self.plan, resources)
            computing = starter.start_computing()
            # Nothing generates: actor_train is named for the engines as well.
            self.clusters = Clusters(**computing, actor_infer=computing["actor_train"])
            self.begin_loading(starter, list(self.clusters.computing.values()))
            starter.finish(self.residency)
            checkpoint = self.context.resume_models(self.learners, self.residency)
            self.method = self.build_method()
            self.method.load_state_dict(recorded.state)
            self.add_model_columns(recorded.batch)
            self.context.record(self.method.credit(recorded.batch))
            self.learn(recorded.batch, recorded.step)
            return checkpoint.step if checkpoint is not None else 0, self.context.recorded()

    def is_validation_due(self, step: int) -> bool:
        """True every ``eval_steps`` steps; before the first one unless ``before_train`` is false."""
        every = self.plan.eval_steps
        return bool(every) and step % every == 0 and (step > 0 or self.validates_first)

    def validate(self, step: int) -> None:
        """Answer the validation prompts and report accuracies, while everything else waits."""
        with self.context.phase("val_step"), self.generating():
            validation = self.rollout.validate()
        self.report(validation, step)

    @contextmanager
    def validating(self, step: int) -> Iterator[None]:
        """Answer the validation prompts concurrently with the block."""
        with self.generating():
            self.rollout.begin_validation()
            yield
            with self.context.phase("val_step"):
                validation = self.rollout.finish_validation()
        self.report(validation, step)

    def report(self, validation: Validation, step: int) -> None:
        self.context.record({"time/val_step_total": Mean(validation.seconds)})
        self.context.record_validation(validation.metrics | self.by_harness, step)
        for name, groups in validation.groups.items():
            self.context.dump_samples("validation", step, partial(self.source.table, groups), name)

    def finish(self) -> None:
        """A last validation of the final weights, the last checkpoint, and the summary."""
        steps = self.context.steps_done
        self.update_engines(steps)
        if self.plan.eval_steps:
            self.validate(steps)
        with self.context.finishing(steps):
            if self.config.actor_train.training_args.save_hf_model:
                self.residency.bring({"actor_train": WEIGHTS})
                export_model(self.clusters.actor_train, self.source.tokenizer, self.plan.output_dir / "model")

    def save_abandoned(self, step: int, state: dict[str, Any]) -> None:
        """A checkpoint after ``step`` steps, written in the next one, which was abandoned before it changed a model.
        What the engines have begun is lost; they end, and their devices are free."""
        self.rollout.close()
        clusters = self.clusters
        for cluster in (clusters.actor_infer, *clusters.judge_engines.values(), clusters.reward_model):
            if cluster is not None:
                cluster.shutdown(graceful=False)
                # Else the save would ask an engine that has ended to leave its devices.
                self.residency.dismiss(cluster.name)
        self.save(step, state)

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.context.save_models(step, state, self.learners, self.residency)

    def restore(self) -> int:
        """Continue from a checkpoint if the configuration names one; the number of steps done."""
        checkpoint = self.context.resume_models(self.learners, self.residency)
        if checkpoint is None:
            return 0
        self.load_state_dict(self.context.load_state(checkpoint))
        if self.certificate is not None:
            self.certificate.go_on()
        return checkpoint.step

    def state_dict(self, interrupt: bool = True) -> dict[str, Any]:
        """State of the driver: plain JSON values. Without ``interrupt`` engines go on, and what they have begun is
        sampled again."""
        return {"rollout": self.rollout.state_dict(interrupt), "scoring": self.method.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollout.load_state_dict(state["rollout"])
        self.method.load_state_dict(state["scoring"])
