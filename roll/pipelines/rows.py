"""The run of every method that learns from given rows (SFT, preferences, reward models, distillation).

One training step: rows are drawn and become a batch; the method adds columns of other models, such as a reference's
log-probs; the learner takes an optimizer step. Evaluations on held-out rows and checkpoints come between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from roll.config.loader import LoadedConfig
from roll.config.roles import WorkerConfig
from roll.datasets import ShuffledEpochs
from roll.datasets.preparation import StreamedEpochs
from roll.distributed import Cluster, PendingCall, ResourceManager
from roll.distributed.signals import ending
from roll.methods.base import LOG_PROBS, Ask, Loss
from roll.methods.rows import Completion, RowMethod
from roll.methods.supervised import SupervisedDefinition, SupervisedPlan
from roll.pipelines.batches import RecordedBatch
from roll.pipelines.files import export_model, load_tokenizer, pad_token_id
from roll.pipelines.model_calls import TRAINING, WEIGHTS, Computation, Residency, balanced_order, start_cluster
from roll.pipelines.run_context import RunContext
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import TensorBatch
from roll.workers import TRAIN_WORKER, frozen_worker
from roll.workers.model import ModelSettings, ModelWorker, TrainWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class DrawnRows:
    """The rows of a step whose columns the frozen model computes."""

    drawn: Sequence[Any]  # in the order of the data
    dealt: Sequence[Any]  # in the order of the batch, which gives ranks equal work
    batch: DataProto
    complete: Completion | None
    state: dict[str, Any]  # of the data before the rows were drawn


class RowsPipeline:
    """A run, from start to summary. A step is one optimizer step. Its method sees it as
    :class:`roll.methods.rows.Models`."""

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    rows: ShuffledEpochs[Any] | StreamedEpochs
    num_steps: int
    learner: Cluster
    frozen: Cluster | None = None  # None: the run does not start the role

    def __init__(self, loaded: LoadedConfig[Any]) -> None:
        self.loaded = loaded
        self.config = loaded.config
        assert isinstance(loaded.plan, SupervisedPlan) and isinstance(loaded.pipeline, SupervisedDefinition)
        self.plan = loaded.plan
        self.method: RowMethod[Any, Any] = resolve_name(loaded.pipeline.method_class)(loaded)
        self.role = self.method.role
        self.section: WorkerConfig = getattr(loaded.config, self.role)
        self.context = RunContext(loaded)
        self.phase, self.record = self.context.phase, self.context.record
        self.training: Sequence[Any] = ()  # the rows to learn from, where they are all prepared at the start
        self.held_out: Sequence[Any] = ()
        self.ahead: deque[DrawnRows] = deque()  # rows that the frozen model computes ahead of their step
        # The next steps' batches, and their updates to be waited for; None: the batch is left out.
        self.in_flight: deque[tuple[DataProto, Callable[[], None] | None]] = deque()

    def run(self) -> None:
        """Train for all steps; everything that was started is stopped again, however it ends."""
        with self.context.running() as resources:
            first_step = self.start(resources)
            self.context.save_when_interrupted(self.state_between_steps, self.save)
            if first_step and self.is_evaluation_due(first_step):
                # Its metrics were cut off with all that is newer than the checkpoint, or a signal ended it.
                self.evaluate(first_step)
            for step in self.context.steps(first_step, self.num_steps):
                self.train_one_step(step)
                self.pause(step + 1)
            self.finish()

    def replay(self, recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        """Repeat the step of a recorded batch; return the steps that the model had done before, and the metrics."""
        with self.context.running() as resources:
            steps = self.start(resources)
            # Taken out and dropped: metrics of the start (dropped rows) are not the step's.
            self.context.recorded()
            self.method.add_own_columns(recorded.batch, self)
            self.update(recorded.batch)
            return steps, self.context.recorded()

    # The models, without gradient

    def forward(self, batch: DataProto, ask: Ask = LOG_PROBS) -> TensorBatch:
        return self._begin(self.learner, batch, ask)()

    def measure(self, batch: DataProto, loss: Loss) -> Metrics:
        self.residency.bring({self.role: WEIGHTS})
        return self.learner.call(TrainWorker.measure, batch, loss).result()

    def begin_frozen(self, batch: DataProto, ask: Ask = LOG_PROBS) -> Callable[[], TensorBatch]:
        frozen = self.frozen
        if frozen is None:
            return partial(self.forward, batch, replace(ask, without_adapters=True))
        work = Computation(partial(self._begin, frozen, batch, ask))
        build = lambda: frozen.call_all(ModelWorker.initialize, 0).result()  # noqa: E731
        return partial(self.context.replacing, frozen, build, work)

    def _begin(self, cluster: Cluster, batch: DataProto, ask: Ask) -> Callable[[], TensorBatch]:
        self.residency.bring({cluster.name: WEIGHTS})
        call = cluster.call(ModelWorker.forward, batch, ask)
        return lambda: TensorBatch(call.result().batch)

    def parts(self, rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
        size = self.section.infer_batch_size * self.learner.world_size
        return (rows[begin : begin + size] for begin in range(0, len(rows), size))

    # Start

    def start(self, resources: ResourceManager) -> int:
        """Start the clusters, read the data, continue from a checkpoint if there is one; return the steps done."""
        self.method.open()
        self.residency = Residency(self.plan, self.config.is_offload_states)
        self.learner, self.frozen = start_models(self.loaded, self.method, resources)
        self.context.watch([cluster for cluster in (self.learner, self.frozen) if cluster is not None])
        self.load_data()
        build_models(self.learner, self.frozen, self.num_steps, self.residency)
        checkpoint = self.context.resume_models([self.learner], self.residency)
        if checkpoint is None:
            return 0
        self.rows.load_state_dict(self.context.load_state(checkpoint)[self.method.state_key])
        return checkpoint.step

    def load_data(self) -> None:
        """Read the rows; the number of steps follows from them where the file does not say it."""
        config, plan, method = self.config, self.plan, self.method
        path = plan.roles[self.role].model_path
        self.tokenizer = load_tokenizer(path, self.section.model_args.trust_remote_code)
        self.pad_token_id = pad_token_id(self.tokenizer)
        if plan.val_data_args is not None:
            self.held_out = method.read(config, plan, plan.val_data_args, self.tokenizer)
        stream = method.stream_of_rows(self.tokenizer)
        if stream is not None:
            assert config.max_steps is not None, "the checks ask for it"
            self.context.at_end(stream.close)
            self.rows, self.num_steps = stream, config.max_steps
            return
        self.training = training = method.read(config, plan, plan.data_args, self.tokenizer)
        if method.dropped_metric is not None:
            counts = training.counts
            self.context.record({method.dropped_metric: Mean(sum(counts.too_long.values()) + counts.bad)})
        self.rows = ShuffledEpochs(training, config.seed, method.stream, plan.data_args)
        epochs = self.section.training_args.num_train_epochs
        self.num_steps = plan.max_steps or ceil(len(training) * epochs / plan.global_batch_size)

    # A step

    def train_one_step(self, step: int) -> None:
        """One optimizer step on the next rows. Until the model learns, a signal may end it."""
        # None beyond a save or evaluation, so that the data state saved is that of the steps done; and workers that are
        # measured before and after a step are given no other.
        pauses = (self.plan.save_steps, self.plan.eval_steps, self.config.memory_steps)
        room = (every - step % every for every in pauses if every)
        ahead = min(self.method.steps_in_flight, self.num_steps - step, *room)
        # Before a stop no further step is begun: it would have to be waited for, within `interrupt_timeout`.
        ahead = 1 if self.context.stopping or self.context.measures_workers else ahead
        while len(self.in_flight) < ahead:
            later = step + len(self.in_flight)
            with nullcontext() if self.in_flight else ending.interruptible():
                batch = self.next_batch(later)
            learns = not self.context.is_left_out(later)
            begun = self.begin_update(batch) if learns and ahead > 1 else None
            self.in_flight.append((batch, partial(self.update, batch, begun) if learns else None))
        batch, update = self.in_flight.popleft()
        self.context.batches.hold(step, batch, {})
        if update is not None:
            update()
        self.context.record(self.residency.metrics())
        self.context.end_step(step)

    def next_batch(self, step: int) -> DataProto:
        """The batch of a step; a frozen model with devices of its own continues with the rows of the step after."""
        if not self.ahead:
            self.ahead.append(self.draw())
        rows = self.ahead[0]
        if rows.complete is not None:
            self.context.record(rows.complete())
        # Only now: a signal during the wait above leaves the rows here, and `state_dict` draws them again.
        self.ahead.popleft()
        self.method.add_own_columns(rows.batch, self)
        self.method.add_estimates(rows.drawn, rows.batch, self)
        if self.plan.frozen_runs_ahead and step + 1 < self.num_steps:
            self.ahead.append(self.draw())
        if step % self.config.logging_steps == 0 and self.method.samples == "demonstrations":
            self.context.samples.demonstrations(step, rows.drawn, self.tokenizer)
        elif step % self.config.logging_steps == 0 and self.method.samples == "pairs":
            self.context.samples.pairs(step, rows.dealt, rows.batch, self.tokenizer)
        return rows.batch

    def draw(self) -> DrawnRows:
        """Draw the rows of a step, and let the frozen model begin with them."""
        state = self.rows.state_dict()
        dealt = drawn = self.rows.next_batch(self.plan.global_batch_size)
        lengths = self.method.lengths(drawn)
        if lengths is not None:
            dealt = [drawn[index] for index in balanced_order(lengths, self.learner.dp_size).tolist()]
        batch = self.method.batch(dealt, self.pad_token_id, self.learner.dp_size)
        return DrawnRows(drawn, dealt, batch, self.method.request(dealt, batch, self, "train"), state)

    def update(self, batch: DataProto, begun: PendingCall[Metrics] | None = None) -> None:
        """Let the model learn from a batch, unless that has ``begun``, and wait for it."""
        # In one phase, which asks the workers for their measurements first: they answer when they are done.
        with self.context.phase("step_train"):
            begun = begun or self.begin_update(batch)
            self.context.record(begun.result())

    def begin_update(self, batch: DataProto) -> PendingCall[Metrics]:
        self.residency.bring({self.role: TRAINING})
        return self.learner.call(TrainWorker.step, batch, self.method.loss)

    # Between steps

    def pause(self, steps_done: int) -> None:
        """Evaluate and save where that is due after ``steps_done`` steps."""
        if self.is_evaluation_due(steps_done):
            self.evaluate(steps_done)
        if self.context.is_save_due(steps_done - 1):
            self.save(steps_done, self.state_dict())

    def is_evaluation_due(self, steps_done: int) -> bool:
        return bool(self.held_out) and bool(self.plan.eval_steps) and steps_done % self.plan.eval_steps == 0

    def evaluate(self, steps_done: int) -> None:
        """Report the metrics of the held-out rows. A signal may end this too: the steps done are saved."""
        self.context.reach(steps_done)
        with self.context.phase("val_step"), ending.interruptible():
            metrics = self.method.measure(self.held_out, self)
        self.context.record_validation(metrics, steps_done)

    def save(self, steps_done: int, state: dict[str, Any]) -> None:
        self.method.flush()
        self.context.save_models(steps_done, state, [self.learner], self.residency)

    def state_dict(self) -> dict[str, Any]:
        """State of the driver: plain JSON values."""
        # Rows that only the frozen model has seen are drawn again.
        rows = self.ahead[0].state if self.ahead else self.rows.state_dict()
        return {self.method.state_key: rows}

    def state_between_steps(self) -> dict[str, Any] | None:
        """Like :meth:`state_dict`; None while a step is in flight, whose rows have been drawn."""
        return None if self.in_flight else self.state_dict()

    def finish(self) -> None:
        """A last evaluation, the trained model in Hugging Face format, and the summary."""
        last, steps = self.method.evaluates_at_end and self.held_out and self.plan.eval_steps, self.context.steps_done
        if last and steps % self.plan.eval_steps:
            self.evaluate(steps)
        with self.context.finishing(steps):
            self.method.flush()
            if self.section.training_args.save_hf_model:
                self.residency.bring({self.role: WEIGHTS})
                facts = self.method.facts(self.training, self.held_out, self)
                export_model(self.learner, self.tokenizer, self.plan.output_dir / "model", facts)


def start_models(
    loaded: LoadedConfig[Any], method: RowMethod[Any, Any], resources: ResourceManager
) -> tuple[Cluster, Cluster | None]:
    """Start the processes of the learner and of the frozen model (None: the run does not start the role)."""
    config, plan = loaded.config, loaded.plan
    offloads = config.is_offload_optimizer_states_in_train_step
    settings = ModelSettings(config.max_grad_norm, offload_optimizer_in_steps=offloads, head=method.head)
    role = plan.roles[method.role].section
    learner = start_cluster(config, method.role, role.worker_cls or TRAIN_WORKER, resources, role, settings)
    if method.frozen_role is None or method.frozen_role not in plan.roles:
        return learner, None
    role = plan.roles[method.frozen_role].section
    return learner, start_cluster(config, method.frozen_role, role.worker_cls or frozen_worker(role), resources, role)


def build_models(learner: Cluster, frozen: Cluster | None, num_steps: int, residency: Residency) -> None:
    """Load the models, one after the other where they share devices; the learning rate's schedule extends over
    ``num_steps``."""
    for cluster, steps, states in ((learner, num_steps, TRAINING), (frozen, 0, WEIGHTS)):
        if cluster is not None:
            cluster.call_all(ModelWorker.initialize, steps).result()
            residency.admit(cluster, states)
