"""The steps of every pipeline whose policy learns from its own samples.

One training step: the engines take over the newest weights and generate samples, which are scored; reference, actor,
teachers and critic compute the columns that something needs; scores become advantages; actor and critic learn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from roll.checkpoint import Checkpoint
from roll.config.loader import LoadedConfig
from roll.config.model_files import model_number
from roll.config.policy import PolicyRunConfig
from roll.config.rewards import REWARD_MODEL
from roll.distributed import Cluster, ResourceManager
from roll.methods.base import Ask
from roll.models.layouts import TopTokens
from roll.pipelines.batches import RecordedBatch
from roll.pipelines.engine_rollout import EngineRollout
from roll.pipelines.files import export_model
from roll.pipelines.policy import PolicyPlan, taught_by_advantage
from roll.pipelines.rlvr.clusters import Clusters, ClusterStarter, StartingClusters
from roll.pipelines.rlvr.data import RecordedRollouts
from roll.pipelines.rlvr.distillation import add_teacher_divergence, add_teacher_targets
from roll.pipelines.rlvr.phases import (
    AdvantageComputer,
    add_old_log_probs,
    add_reference_log_probs,
    add_values,
    computed_by_policy,
    critic_loss,
    policy_loss,
    update_model,
)
from roll.pipelines.rlvr.teachers import opd_divergence
from roll.pipelines.run_context import GENERATION, TRAINING, WEIGHTS, Residency, RunContext, moves_states
from roll.protocol import DataProto
from roll.strategies.base import Output
from roll.weight_sync.sender import WeightSync, sync_options
from roll.workers.training import TrainWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ConfigT = TypeVar("ConfigT", bound=PolicyRunConfig)
PlanT = TypeVar("PlanT", bound=PolicyPlan)
ValidationT = TypeVar("ValidationT")
R = TypeVar("R")


class PolicyPipeline(ABC, Generic[ConfigT, PlanT, ValidationT]):
    """A run, from start to summary."""

    rollout: EngineRollout[ValidationT]
    tokenizer: PreTrainedTokenizerBase
    clusters: Clusters

    def __init__(self, loaded: LoadedConfig[ConfigT], plan: PlanT, recorded: RecordedRollouts) -> None:
        self.loaded = loaded
        self.config = loaded.config
        self.plan = plan
        self.recorded = recorded
        self.context = RunContext(loaded)
        generating = loaded.config.actor_infer.generating_args
        self.temperature = generating.temperature if generating.do_sample else 1.0
        self.loss = policy_loss(loaded.config, plan, self.temperature)

    def run(self) -> None:
        """Train until ``max_steps``; everything that was started is stopped again, however it ends."""
        with self.context.running() as resources:
            self.start(resources)
            first_step = self.restore()
            self.context.save_when_interrupted(self.state_between_steps, self.save_abandoned)
            for step in self.context.steps(first_step, self.config.max_steps):
                self.train_one_step(step)
            self.finish()

    def start(self, resources: ResourceManager) -> None:
        """Start all clusters; the data is read while their workers load their models."""
        starting = self.start_clusters(resources)
        self.begin_loading(starting, starting.clusters.all())
        self.load_data()
        self.clusters = starting.finish(self.residency)
        self.connect()

    def begin_loading(self, starting: StartingClusters[Clusters], started: list[Cluster]) -> None:
        """Let the models load; ``started`` ends with the run."""
        self.residency = Residency(self.plan, moves_states(self.config.is_offload_states))
        self.context.watch(started)
        for judge in starting.clusters.judges.values():
            self.context.at_end(judge.close)
        self.models = {model.cluster.name: model for model in starting.models}
        starting.begin(self.residency)

    @abstractmethod
    def start_clusters(self, resources: ResourceManager) -> StartingClusters[Clusters]:
        """Start the processes of every cluster."""

    @abstractmethod
    def load_data(self) -> None:
        """Read the prompts or tasks, and set ``tokenizer``."""

    @abstractmethod
    def build_rollout(self) -> EngineRollout[ValidationT]:
        """The rollout, on top of clusters and data."""

    @abstractmethod
    def build_scoring(self) -> AdvantageComputer:
        """The phase that turns scores into advantages."""

    def connect(self) -> None:
        """Build the phases on top of clusters and data."""
        self.rollout = self.build_rollout()
        self.context.at_end(self.rollout.close)
        self.scoring = self.build_scoring()
        options = sync_options(self.config, self.config.weight_sync, self.config.actor_infer, self.plan)
        self.weight_sync = WeightSync(self.clusters.actor_train, self.clusters.actor_infer, options)

    def train_one_step(self, step: int) -> None:
        """The algorithm. Until the models learn, a signal may end it, except during the exchange of weights, whose two
        sides wait for each other; a resumed run repeats the step."""
        concurrent = self.plan.validates_concurrently and self.is_validation_due(step)
        self.update_engines(step)
        with self.context.interruptible():
            if self.is_validation_due(step) and not concurrent:
                self.validate(step)
            batch = self.generate(step)
        self.context.hold_batch(step, batch, self.scoring.state_dict())
        with self.validating(step) if concurrent else nullcontext():
            with self.context.interruptible():
                self.add_model_columns(batch)
                with self.context.phase("adv"):
                    self.context.record(self.scoring(batch))
                self.record_samples(batch, step)
            if not self.context.is_left_out(step):
                self.learn(batch, step)
        self.context.record(self.residency.metrics())
        self.context.end_step(step)
        if self.context.is_save_due(step):
            self.save(step + 1, self.state_dict())

    def update_engines(self, version: int) -> None:
        """Give the engines the trainer's weights."""
        with self.context.phase("step_model_update"):
            self.residency.bring({"actor_train": WEIGHTS, "actor_infer": WEIGHTS})
            self.context.record(self.rollout.exchange(version, lambda: self.weight_sync.sync(version)))

    def generate(self, step: int) -> DataProto:
        """The step's samples with their scores."""
        if self.recorded.replays:
            with self.context.phase("step_generate"):
                batch, metrics = self.recorded.read(step)
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
        generating = dict.fromkeys(("actor_infer", *judges), GENERATION)
        self.residency.bring({REWARD_MODEL: WEIGHTS, **generating})
        for judge in judges.values():
            judge.resume()
        yield
        for name, judge in judges.items():
            judge.check()
            if self.residency.moves(name):
                judge.pause()

    def add_model_columns(self, batch: DataProto) -> None:
        """Log-probs by reference, actor and teachers, and values by the critic, where something consumes them."""
        if self.plan.needs_reference:
            reference = self.clusters.reference or self.clusters.actor_train
            without_adapters = reference is self.clusters.actor_train

            def work() -> None:
                self.residency.bring({reference.name: WEIGHTS})
                add_reference_log_probs(batch, reference, self.temperature, without_adapters)

            with self.context.phase("ref_log_probs_values"):
                if without_adapters:
                    work()
                else:
                    self.replacing(reference, work)
        if self.plan.needs_old_log_probs:
            with self.context.phase("old_log_probs"):
                self.residency.bring({"actor_train": WEIGHTS})
                wanted = {
                    Output.ENTROPY: self.plan.needs_old_entropy,
                    Output.SUM_OF_SQUARES: self.plan.needs_sum_of_squares,
                    Output.ROUTES: self.config.actor_train.router_replay.mode == "R2",
                }
                more = tuple(name for name, needed in wanted.items() if needed)
                add_old_log_probs(batch, self.clusters.actor_train, self.temperature, more)
        elif self.plan.engine_log_probs_as_old:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        if self.clusters.teachers:
            with self.context.phase("teachers"):
                self.add_teacher_columns(batch)
        if self.clusters.critic is not None:
            with self.context.phase("values"):
                self.residency.bring({"critic": WEIGHTS})
                add_values(batch, self.clusters.critic)

    def add_teacher_columns(self, batch: DataProto) -> None:
        """Teachers' columns for the samples, as ``opd_form`` needs them."""
        teachers = self.clusters.teachers

        def bring(cluster: Cluster) -> None:
            self.residency.bring({cluster.name: WEIGHTS})

        if taught_by_advantage(self.config):
            metrics = add_teacher_divergence(batch, teachers, self.config, self.temperature, bring, self.replacing)
            self.context.record(metrics)
            return
        paths = [
            self.plan.roles[cluster.name].model_path for cluster in (self.clusters.actor_train, *teachers.values())
        ]
        limit = min(model_number(path, "vocab_size") or 2**31 - 1 for path in paths)
        count = opd_divergence(self.config).logits_topk
        top = TopTokens(count, limit)
        add_teacher_targets(batch, teachers, self.config, self.temperature, top, bring, self.replacing)

    def replacing(self, cluster: Cluster, work: Callable[[], R]) -> R:
        """See :meth:`roll.pipelines.run_context.RunContext.replacing`."""
        return self.context.replacing(cluster, self.models[cluster.name].initialize, work)

    def record_samples(self, batch: DataProto, step: int) -> None:
        """Keep samples for reports; before the models learn, so that a step that fails has them too."""
        notes = list if self.recorded.replays else self.rollout.notes
        trainer = batch.batch["old_log_probs"] if self.plan.needs_old_log_probs else None
        every = self.config.sample_log.mismatch_steps
        if trainer is None and every and step % every == 0 and not self.recorded.replays:
            with self.context.phase("sample_log"):
                self.residency.bring({"actor_train": WEIGHTS})
                columns = computed_by_policy(batch, self.clusters.actor_train, Ask(temperature=self.temperature))
                trainer = columns[Output.LOG_PROBS]
        self.context.samples.policy(step, batch, notes, self.tokenizer, trainer)

    def learn(self, batch: DataProto, step: int) -> None:
        """All optimizer steps of actor and critic on this batch."""
        seed = (self.config.seed, step) if self.config.shuffle_mini_batches else None
        with self.context.phase("step_train"):
            if self.clusters.critic is not None:
                self.residency.bring({"critic": TRAINING})
                values = critic_loss(self.config, self.plan)
                training = self.plan.training["critic"]
                self.context.record(update_model(batch, self.clusters.critic, values, training, seed))
            if step >= self.config.critic_warmup or self.clusters.critic is None:
                self.residency.bring({"actor_train": TRAINING})
                options = replace(self.loss.options, entropy_loss_coef=self.scoring.entropy_coef)
                loss, training = replace(self.loss, options=options), self.plan.training["actor_train"]
                self.context.record(update_model(batch, self.clusters.actor_train, loss, training, seed))

    def replay(self, recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        """Repeat the step of a recorded batch, without engines and rewards.

        Returns:
            The steps that the models had done before, and the metrics of the step.
        """
        with self.context.running() as resources:
            starter = ClusterStarter(self.config, self.plan, resources)
            computing = starter.start_computing()
            # Nothing generates: actor_train is named for the engines as well.
            clusters = Clusters(**computing, actor_infer=computing["actor_train"])
            starting = StartingClusters(clusters, starter.models, starter.pending)
            self.begin_loading(starting, clusters.computing())
            self.clusters = starting.finish(self.residency)
            checkpoint = self.restore_models()
            self.scoring = self.build_scoring()
            self.scoring.load_state_dict(recorded.state)
            self.add_model_columns(recorded.batch)
            self.context.record(self.scoring(recorded.batch))
            self.learn(recorded.batch, recorded.step)
            return checkpoint.step if checkpoint is not None else 0, self.context.recorded()

    @abstractmethod
    def is_validation_due(self, step: int) -> bool:
        """True where a validation comes before step ``step``."""

    @property
    @abstractmethod
    def validates(self) -> bool:
        """True where the run validates at all."""

    def validate(self, step: int) -> None:
        """Answer the validation prompts and report accuracies, while everything else waits."""
        with self.context.phase("val_step"), self.generating():
            validation = self.rollout.validate()
        self.report(validation, step)

    @contextmanager
    def validating(self, step: int) -> Iterator[None]:
        """Answer the validation prompts concurrently with the block, and report accuracies."""
        with self.generating():
            self.rollout.begin_validation()
            yield
            with self.context.phase("val_step"):
                validation = self.rollout.finish_validation()
        self.report(validation, step)

    @abstractmethod
    def report(self, validation: ValidationT, step: int) -> None:
        """Record the results of a validation after ``step`` steps."""

    def finish(self) -> None:
        """A last validation of the final weights, the last checkpoint, and the summary."""
        self.update_engines(self.config.max_steps)
        if self.validates:
            self.validate(self.config.max_steps)
        with self.context.finishing(self.config.max_steps):
            if self.config.actor_train.training_args.save_hf_model:
                self.residency.bring({"actor_train": WEIGHTS})
                export_model(self.clusters.actor_train, self.tokenizer, self.plan.output_dir / "model")

    def save_abandoned(self, step: int, state: dict[str, Any]) -> None:
        """A checkpoint after ``step`` steps, written in the next one, which was abandoned before it changed a model.
        What the engines have begun is lost; they end, and their devices are free."""
        self.rollout.close()
        engines = [self.clusters.actor_infer, *self.clusters.judge_engines.values()]
        engines += [self.clusters.reward_model] if self.clusters.reward_model is not None else []
        for cluster in engines:
            cluster.shutdown(graceful=False)
            self.residency.dismiss(cluster.name)
        self.save(step, state)

    def learners(self) -> list[Cluster]:
        """The clusters whose models train, and are in checkpoints."""
        return [cluster for cluster in (self.clusters.actor_train, self.clusters.critic) if cluster is not None]

    def save(self, step: int, state: dict[str, Any]) -> None:
        """A checkpoint after ``step`` steps, with what the driver must remember."""
        with self.context.writing_checkpoint(step, state, self.learners()) as path:
            for cluster in self.learners():
                self.residency.bring({cluster.name: TRAINING})
                cluster.call_all(TrainWorker.save_checkpoint, str(path / cluster.name)).result()

    def restore(self) -> int:
        """Continue from a checkpoint if the configuration asks for it; the number of steps already done."""
        checkpoint = self.restore_models()
        if checkpoint is None:
            return 0
        self.load_state_dict(self.context.load_state(checkpoint))
        return checkpoint.step

    def restore_models(self) -> Checkpoint | None:
        """Load the models that learn from the checkpoint that the configuration asks for, if it does."""
        checkpoint = self.context.checkpoint_to_resume()
        if checkpoint is not None:
            for cluster in self.learners():
                self.residency.bring({cluster.name: TRAINING})
                cluster.call_all(TrainWorker.load_checkpoint, str(checkpoint.role(cluster.name))).result()
        return checkpoint

    def state_dict(self) -> dict[str, Any]:
        """State of the driver: plain JSON values."""
        return {"rollout": self.rollout.state_dict(), "scoring": self.scoring.state_dict()}

    def state_between_steps(self) -> dict[str, Any]:
        """As :meth:`state_dict`, without interrupting the engines: what they have begun is sampled again."""
        return {"rollout": self.rollout.state_between_steps(), "scoring": self.scoring.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollout.load_state_dict(state["rollout"])
        self.scoring.load_state_dict(state["scoring"])
