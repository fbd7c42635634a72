"""The run of every pipeline that learns from given rows (SFT, preferences, reward models, distillation).

One training step: rows are drawn and become a batch; columns of other models are added, such as a reference's
log-probs; the learner takes an optimizer step. Evaluations on held-out rows and checkpoints come between steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from roll.config.loader import LoadedConfig
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.run import RunConfig
from roll.datasets import EpochOrder, ShuffledEpochs
from roll.datasets.preparation import PreparedRows
from roll.datasets.streaming import Drawn
from roll.datasets.vision_model import VisionModel
from roll.distributed import Cluster, ResourceManager
from roll.methods.base import Loss
from roll.methods.teachers import teacher_worker
from roll.pipelines.batches import RecordedBatch
from roll.pipelines.files import export_model, load_tokenizer, pad_token_id
from roll.pipelines.run_context import TRAINING, WEIGHTS, Residency, RunContext, moves_states, start_cluster
from roll.pipelines.supervised import SupervisedPlan
from roll.protocol import DataProto
from roll.protocol.metrics import Mean
from roll.protocol.vision import IMAGES, VisionInputs
from roll.strategies.base import ModelHead
from roll.workers import TRAIN_WORKER
from roll.workers.model import ModelSettings, ModelWorker
from roll.workers.training import TrainWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ConfigT = TypeVar("ConfigT", bound=RunConfig)
RowT = TypeVar("RowT")


class SupervisedPipeline(ABC, Generic[ConfigT, RowT]):
    """A run, from start to summary. A step is one optimizer step."""

    role: ClassVar[str]
    """The role that learns."""
    head: ClassVar[ModelHead] = ModelHead.CAUSAL_LM
    """Of its model."""
    frozen_role: ClassVar[str | None] = None
    """The role whose model never learns, where the pipeline has one."""
    stream: ClassVar[str]
    """Name of the order in which rows are drawn, part of its seeds."""
    state_key: ClassVar[str]
    """Name of the rows' state in checkpoints."""
    dropped_metric: ClassVar[str | None] = None
    """Counts the rows that were too long or bad."""
    evaluates_at_end: ClassVar[bool] = True
    """Evaluate the final weights, unless an evaluation follows the last step anyway."""

    tokenizer: PreTrainedTokenizerBase
    rows: Drawn[RowT]
    num_steps: int
    learner: Cluster
    frozen: Cluster | None = None
    """None: the run does not start the role."""

    def __init__(self, loaded: LoadedConfig[ConfigT]) -> None:
        self.loaded = loaded
        self.config = loaded.config
        assert isinstance(loaded.plan, SupervisedPlan)
        self.plan = loaded.plan
        self.section: WorkerConfig = getattr(loaded.config, self.role)
        self.context = RunContext(loaded)
        self.training: Sequence[RowT] = ()
        """The rows to learn from, where they are all prepared at the start."""
        self.held_out: Sequence[RowT] = ()
        self.evaluated = 0
        """Steps done at the last evaluation: one that a signal ended is made up for by the resumed run."""

    def run(self) -> None:
        """Train for all steps; everything that was started is stopped again, however it ends."""
        with self.context.running() as resources:
            first_step = self.start(resources)
            self.context.save_when_interrupted(self.state_between_steps, self.save)
            if first_step and self.is_evaluation_due(first_step) and self.evaluated != first_step:
                self.evaluate(first_step)
            for step in self.context.steps(first_step, self.num_steps):
                self.train_one_step(step)
                self.pause(step + 1)
            self.finish()

    def replay(self, recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        """Repeat the step of a recorded batch; return the steps that the model had done before, and the metrics."""
        with self.context.running() as resources:
            steps = self.start(resources)
            self.context.recorded()
            self.add_own_columns(recorded.batch)
            self.update(recorded.batch)
            return steps, self.context.recorded()

    # Start

    def start(self, resources: ResourceManager) -> int:
        """Start the clusters, read the data, continue from a checkpoint if there is one; return the steps done."""
        self.residency = Residency(self.plan, moves_states(self.config.is_offload_states))
        offloads = self.config.is_offload_optimizer_states_in_train_step
        settings = ModelSettings(self.config.max_grad_norm, offload_optimizer_in_steps=offloads, head=self.head)
        role = self.plan.roles[self.role].section
        worker = role.worker_cls or TRAIN_WORKER
        self.learner = start_cluster(self.config, self.role, worker, resources, role, settings)
        if self.frozen_role is not None and self.frozen_role in self.plan.roles:
            role = self.plan.roles[self.frozen_role].section
            worker = role.worker_cls or teacher_worker(role)
            self.frozen = start_cluster(self.config, self.frozen_role, worker, resources, role)
        self.context.watch([one for one in (self.learner, self.frozen) if one is not None])
        self.load_data()
        for cluster, steps, states in ((self.learner, self.num_steps, TRAINING), (self.frozen, 0, WEIGHTS)):
            if cluster is not None:
                cluster.call_all(ModelWorker.initialize, steps).result()
                self.residency.admit(cluster, states)
        checkpoint = self.context.checkpoint_to_resume()
        if checkpoint is None:
            return 0
        self.residency.bring({self.role: TRAINING})
        self.learner.call_all(TrainWorker.load_checkpoint, str(checkpoint.role(self.role))).result()
        state = self.context.load_state(checkpoint)
        self.rows.load_state_dict(state[self.state_key])
        self.evaluated = state["evaluated"]
        return checkpoint.step

    @property
    @abstractmethod
    def loss(self) -> Loss:
        """Minimised by the learner."""

    def load_data(self) -> None:
        """Read the rows; the number of steps follows from them where the file does not say it."""
        path = self.plan.roles[self.role].model_path
        self.tokenizer = load_tokenizer(path, self.section.model_args.trust_remote_code)
        if self.plan.val_data_args is not None:
            self.held_out = self.read(self.config, self.plan, self.plan.val_data_args, self.tokenizer)
        self.rows, self.num_steps = self.rows_to_learn()
        self.pad_token_id = pad_token_id(self.tokenizer)

    def rows_to_learn(self) -> tuple[Drawn[RowT], int]:
        """The rows to learn from, and the number of steps."""
        config, plan = self.config, self.plan
        self.training = training = self.read(config, plan, plan.data_args, self.tokenizer)
        order = EpochOrder.of(plan.data_args, len(training), config.seed, self.stream, training.difficulties)
        if self.dropped_metric is not None:
            counts = training.counts
            self.context.record({self.dropped_metric: Mean(sum(counts.too_long.values()) + counts.bad)})
        epochs = self.section.training_args.num_train_epochs
        num_steps = plan.max_steps or ceil(len(training) * epochs / plan.global_batch_size)
        return ShuffledEpochs(training, config.seed, self.stream, order=order), num_steps

    @classmethod
    @abstractmethod
    def build(cls, config: ConfigT) -> Callable[..., PreparedRows[RowT]]:
        """The ``build`` of the data set class, with the settings that only this pipeline has."""

    @classmethod
    def read(
        cls, config: Any, plan: SupervisedPlan, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase
    ) -> PreparedRows[RowT]:
        """One set, rendered as the configuration says."""
        role = plan.roles[cls.role]
        return cls.build(config)(
            data_args,
            tokenizer,
            config.sequence_length,
            global_template=config.global_template,
            vision=VisionModel.load(str(role.model_path), tokenizer, role.section.model_args.trust_remote_code),
        )

    # A step

    def train_one_step(self, step: int) -> None:
        """One optimizer step on the next rows. Until the model learns, a signal may end it; a resumed run repeats the
        step."""
        with self.context.interruptible():
            batch = self.next_batch(step)
        self.context.hold_batch(step, batch)
        if not self.context.is_left_out(step):
            self.update(batch)
        self.context.record(self.residency.metrics())
        self.context.end_step(step)

    @abstractmethod
    def next_batch(self, step: int) -> DataProto:
        """The batch of a step, with all that its update needs."""

    def add_own_columns(self, batch: DataProto) -> None:
        """Add the columns of the update that depend on the learner's present weights."""

    def update(self, batch: DataProto) -> None:
        """One optimizer step."""
        with self.context.phase("step_train"):
            self.residency.bring({self.role: TRAINING})
            self.context.record(self.learner.call(TrainWorker.step, batch, self.loss).result())

    # Between steps

    def pause(self, steps_done: int) -> None:
        """Evaluate and save where that is due after ``steps_done`` steps."""
        if self.is_evaluation_due(steps_done):
            self.evaluate(steps_done)
        if self.context.is_save_due(steps_done - 1, can_save=self.state_between_steps() is not None):
            self.save(steps_done, self.state_dict())

    def is_evaluation_due(self, steps_done: int) -> bool:
        return bool(self.held_out) and bool(self.plan.eval_steps) and steps_done % self.plan.eval_steps == 0

    def evaluate(self, steps_done: int) -> None:
        """Report the metrics of the held-out rows. A signal may end this too: the steps done are saved."""
        self.context.reach(steps_done)
        with self.context.phase("val_step"), self.context.interruptible():
            metrics = self.measure()
        self.context.record_validation(metrics, steps_done)
        self.evaluated = steps_done

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """The metrics of all held-out rows under the present weights."""

    def parts(self, rows: Sequence[RowT]) -> Iterator[Sequence[RowT]]:
        """Consecutive slices of as many rows as the learner's ranks compute together without gradient."""
        size = self.section.infer_batch_size * self.learner.world_size
        return (rows[begin : begin + size] for begin in range(0, len(rows), size))

    def save(self, steps_done: int, state: dict[str, Any]) -> None:
        """A checkpoint after ``steps_done`` steps, with what the driver must remember."""
        with self.context.writing_checkpoint(steps_done, state, [self.learner]) as path:
            self.residency.bring({self.role: TRAINING})
            self.learner.call_all(TrainWorker.save_checkpoint, str(path / self.role)).result()

    def state_dict(self) -> dict[str, Any]:
        """State of the driver: plain JSON values."""
        return {self.state_key: self.rows.state_dict(), "evaluated": self.evaluated}

    def state_between_steps(self) -> dict[str, Any] | None:
        """As :meth:`state_dict`; None while it does not belong to the steps done."""
        return self.state_dict()

    def finish(self) -> None:
        """A last evaluation, the trained model in Hugging Face format, and the summary."""
        last = self.evaluates_at_end and self.held_out and self.plan.eval_steps
        if last and self.num_steps % self.plan.eval_steps:
            self.evaluate(self.num_steps)
        with self.context.finishing(self.num_steps):
            self.export()

    def export(self) -> None:
        """Write the trained model in Hugging Face format, where that is asked for."""
        if self.section.training_args.save_hf_model:
            self.residency.bring({self.role: WEIGHTS})
            export_model(self.learner, self.tokenizer, self.plan.output_dir / "model", self.facts())

    def facts(self) -> dict[str, Any] | None:
        """Further entries of the trained model's ``config.json``."""
        return None


def right_padded(sequences: Sequence[Sequence[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """``input_ids`` int64 and ``attention_mask`` bool, both (B, L), of sequences of token ids."""
    lengths = np.array([len(sequence) for sequence in sequences])
    attention_mask = np.arange(int(lengths.max())) < lengths[:, None]
    input_ids = np.full(attention_mask.shape, pad, dtype=np.int64)
    input_ids[attention_mask] = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    return input_ids, attention_mask


def image_column(images: Sequence[VisionInputs | None]) -> dict[str, Any]:
    """The column ``images`` of a batch, one entry a row; none where no row has some."""
    return {} if all(one is None for one in images) else {IMAGES: images}
