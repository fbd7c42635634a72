"""The context that every pipeline runs in: Ray, logs, trackers, phases, checkpoints, summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from roll.checkpoint import Checkpoint
from roll.checkpoint.state import load_state
from roll.config.loader import LoadedConfig
from roll.distributed import (
    Cluster,
    Interrupted,
    PendingCall,
    RemoteError,
    ResourceManager,
    Worker,
    WorkerDied,
    ray_runtime,
)
from roll.distributed.guard import Guard
from roll.distributed.restarts import supervised
from roll.distributed.signals import ending
from roll.pipelines.batches import FOLDER as BATCHES
from roll.pipelines.batches import BatchRecorder
from roll.pipelines.interruption import Interruption, command_to_go_on
from roll.pipelines.run_checkpoints import STATE_FOLDER, RunCheckpoints
from roll.pipelines.run_outputs import RunOutputs, whole_sets
from roll.pipelines.sample_records import SampleRecorder
from roll.pipelines.stragglers import StragglerWatch
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, Sum, merge_metrics, to_floats
from roll.tracking import (
    ENDING_LOGGER,
    PhaseTimer,
    ProgressReporter,
    SampleTable,
    build_trackers,
    setup_logging,
)
from roll.tracking.sample_log import RECORD_FOLDER, SAMPLES_NAME, SampleLog
from roll.tracking.timeline import REQUESTS_NAME, TIMELINE_NAME, TimelineLog, span_log

logger = logging.getLogger(__name__)

RESOLVED_CONFIG = "config.yaml"
PLOT = "curves.png"
SHOWN_SAMPLES = 8
R = TypeVar("R")
MEMORY_SECONDS = 30.0
"""For a worker to say how much memory it has used."""


class RunContext:
    """Everything that a run needs besides its algorithm.

    The metrics of a step are collected by :meth:`record` and written by :meth:`end_step`; phases are timed by
    :meth:`phase`.  Steps are counted from 0; "after n steps" is checkpoint n and validation n.
    """

    def __init__(self, loaded: LoadedConfig[Any]) -> None:
        self.config, self.plan = loaded.config, loaded.plan
        self._loaded = loaded
        self._clusters: list[Cluster] = []
        self._shutdown_hooks: list[Callable[[], None]] = []
        self._recorded: list[Metrics] = []
        self._validations: dict[int, dict[str, float]] = {}
        self._began = time.perf_counter()
        self._timer = PhaseTimer(self._peak_memory if self.config.memory_steps else None)
        self._stragglers = StragglerWatch(lambda: self._clusters)
        self._measures_memory = False
        self._interruption = Interruption(self.config.interrupt_timeout)
        config = self.config
        self._batches = BatchRecorder(
            self.plan.output_dir / BATCHES, loaded.pipeline.name, config.dump_batches, config.on_nonfinite
        )
        self._guard: Guard | None = None
        self._total_steps = 0
        self._checkpoints = RunCheckpoints(config, self.plan, self.record, self._published)
        self._resume = self._checkpoints.resume
        self._outputs = RunOutputs(loaded, resumed=self._resume is not None)

    # Start and end

    @contextmanager
    def running(self) -> Iterator[ResourceManager]:
        """Logs, trackers and Ray for the length of a run; whatever was started is stopped again, however it ends."""
        log_dir = self.plan.log_dir
        setup_logging(log_dir)
        with self._curves_at_end(), ExitStack() as stack:
            # Before any other file: on the further nodes of a run this does not return.
            runtime = stack.enter_context(
                ray_runtime(
                    self.plan.num_devices_per_node,
                    self.plan.num_nodes,
                    self._outputs.profiling().environment() | self.config.system_envs,
                    log_dir / "workers",
                    saves_on_usr1=self.config.on_usr1 == "save",
                )
            )
            self._guard = runtime.guard
            supervised.tell(mark=runtime.mark)
            ending.on_first = self._interruption.begin
            self._outputs.write_config()
            last_step = None if self._resume is None else self._resume.step - 1
            tracked = self._outputs.tracked_run(last_step)
            self._tracker = build_trackers(self.config.track_with, self.config.tracker_kwargs, tracked)
            stack.callback(self._tracker.close)
            stack.callback(self._checkpoints.manager.close)
            self._begin_record(stack)
            resources = ResourceManager(self.plan.num_devices_per_node, self.plan.num_nodes)
            stack.callback(resources.close)
            self._leave_account()
            try:
                yield resources
                with ending.holding():
                    self._checkpoints.publish()
            except BaseException as caught:
                ending.release()
                with ending.holding(then_raise=False):
                    error = self._end_early(ending.meant(caught))
                if error is caught:
                    raise
                raise error from None
            self._interruption.end()
            self._shut_down(graceful=True)

    def _begin_record(self, stack: ExitStack) -> None:
        """Open what reports are made of."""
        folder, settings = self.plan.output_dir / RECORD_FOLDER, self.config.sample_log
        last_step = None if self._resume is None else self._resume.step - 1
        self._timeline = TimelineLog(folder / TIMELINE_NAME, resumed=last_step is not None)
        log = SampleLog(folder / SAMPLES_NAME, settings.max_megabytes << 20, last_step) if settings.enabled else None
        self.samples = SampleRecorder(log, settings)
        if self.config.otlp_output_dir is not None:
            span_log.open(folder / REQUESTS_NAME, resumed=last_step is not None)
            stack.callback(span_log.close)
        stack.callback(self._timeline.close)
        stack.callback(self.samples.close)
        self._outputs.describe()

    def _end_early(self, error: BaseException) -> BaseException:
        """Save what there is to save, and end the clusters; ``error`` with an account of where the run stands."""
        if isinstance(error, Interrupted):
            self._interruption.save(self._checkpoints.publish)
        self._interruption.end()
        # A rank that hangs would not take part in an orderly end.
        self._shut_down(graceful=False)
        if self._checkpoints.pending is not None:
            self._checkpoints.pending.discard()
        self._outputs.describe(outcome=f"{type(error).__name__}: {error}")
        error.add_note(self._account())
        logging.getLogger(ENDING_LOGGER).error("%s: %s\n%s", type(error).__name__, error, self._account())
        return error

    @contextmanager
    def _curves_at_end(self) -> Iterator[None]:
        """However the block ends, the curves are drawn of what was logged."""
        try:
            yield
        finally:
            if self._guard is not None and not self._outputs.drawn:
                with ending.holding(then_raise=False):
                    if self._outputs.metrics.exists():
                        self._outputs.draw_curves()
                    self._outputs.write_report()

    def _account(self) -> str:
        """The progress of the run, and how to go on."""
        reached, newest = self._interruption.steps_done, self._newest_checkpoint()
        steps = "training had not begun" if reached is None else f"{reached} of {self._total_steps} steps are done"
        if newest is None:
            return f"{steps}; there is no checkpoint of this run"
        return f"{steps}; newest checkpoint: {newest}\nto go on: {command_to_go_on(self._loaded)}"

    def _newest_checkpoint(self) -> Path | None:
        places = self._checkpoints.places(self._interruption.saved_steps)
        return next((folder for folder in places if folder.is_dir()), places[0]) if places else None

    def _leave_account(self) -> None:
        """Have the guard speak for this process, should that end hard."""
        assert self._guard is not None
        supervised.tell(reached=self._interruption.steps_done)
        if places := self._checkpoints.places(self._interruption.saved_steps):
            if self._checkpoints.manager.store is not None:
                copies = [f"{self._checkpoints.manager.store}/{places[0].name}"]
            else:
                copies = []
            supervised.tell(checkpoint=[*map(str, places), *copies])
        self._guard.tell(
            {
                "account": self._account(),
                "log": str(self._outputs.log.resolve()),
                "command": self._outputs.ending_command(),
            }
        )

    def at_end(self, hook: Callable[[], None]) -> None:
        """Add a shutdown hook, called before the clusters end, however the run ends."""
        self._shutdown_hooks.append(hook)

    def _shut_down(self, graceful: bool) -> None:
        for hook in self._shutdown_hooks:
            hook()
        for cluster in self._clusters:
            cluster.shutdown(graceful=graceful)

    def watch(self, clusters: Sequence[Cluster]) -> None:
        """Clusters to shut down at the end, and to ask for their peak memory."""
        self._clusters += clusters

    def finish(self, steps: int) -> None:
        """Draw the curves, write the report and show what came of the run."""
        self._record_phases(steps)
        self._outputs.describe(outcome="finished")
        self.samples.flush()
        self._outputs.draw_curves()
        self._outputs.write_report()
        seconds = time.perf_counter() - self._began
        self._outputs.summary(self._validations, seconds, steps, self._tracker.files()).show()

    # Steps, phases, metrics

    def steps(self, first: int, end: int) -> Iterator[int]:
        """The steps still to be done, with progress shown.

        A signal that asks the run to end is obeyed between two steps, or wherever the caller says that a step may be
        abandoned (:meth:`interruptible`).
        """
        self._total_steps = end
        with (
            ending.holding(),
            ProgressReporter(end, self._loaded.pipeline.headlines, first_step=first) as self._progress,
        ):
            for step in range(first, end + 1):
                self.reach(step)
                if step == end:
                    break
                self._step_began = time.perf_counter()
                self._record_phases(step - 1)
                self._measures_memory = bool(self.config.memory_steps) and step % self.config.memory_steps == 0
                yield step

    def reach(self, steps_done: int) -> None:
        """So many steps are done: this is what a signal saves from here on.

        Raises:
            Interrupted: a signal has come.
        """
        self._interruption.reach(steps_done)
        self._leave_account()

    def save_when_interrupted(
        self, state: Callable[[], dict[str, Any] | None], save: Callable[[int, dict[str, Any]], None]
    ) -> None:
        """Say what is saved on a signal that asks the run to end.

        Args:
            state: between two steps, the driver's state; None: it does not belong to the steps that are done.
            save: writes a checkpoint after so many steps with such a state, in a step that was abandoned before it had
                changed a model.
        """
        self._interruption.saves(state, save)

    @property
    def stopping(self) -> bool:
        """A signal has asked the run to end, or for a checkpoint: nothing new is to be begun before that."""
        return ending.received is not None or ending.save_requested

    def interruptible(self) -> AbstractContextManager[None]:
        """The block changes no model: a signal may end it at any point, and what was before it is saved."""
        return ending.interruptible()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the block as ``time/<name>``."""
        if self._checkpoints.pending is not None:
            self._checkpoints.publish_if_written()
        return self._measured(name) if self._measures_memory else self._timer.phase(name)

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        """As :meth:`phase`, in steps in which all workers are asked for their memory anyway."""
        with self._stragglers.phase(name), self._timer.phase(name):
            yield

    def record(self, metrics: Metrics) -> None:
        """Metrics of the current step."""
        self._recorded.append(metrics)

    def recorded(self) -> dict[str, float]:
        """The metrics of the current step so far, which become those of no step."""
        metrics, self._recorded = to_floats(merge_metrics(self._recorded)), []
        return metrics

    def hold_batch(self, step: int, batch: DataProto, state: Mapping[str, Any] | None = None) -> None:
        """Keep the batch of the current step, to be written with its metrics where that is asked for.

        Args:
            state: of the driver before the step.
        """
        self._batches.hold(step, batch, state or {})

    def end_step(self, step: int) -> None:
        """Write what was recorded since the last step.

        Raises:
            NotFinite: a loss or gradient was not finite, and ``on_nonfinite`` says that this ends the run.
        """
        self._checkpoints.publish_if_written()
        seconds = time.perf_counter() - self._step_began
        metrics = to_floats(merge_metrics(self._recorded)) | self._timer.pop() | self._stragglers.pop()
        metrics |= {"time/step_total": seconds, "system/global_step": float(step)}
        if "system/tokens" in metrics:
            metrics["system/tps"] = metrics["system/tokens"] / seconds
        self._recorded = []
        self._checkpoints.manager.measured(step, metrics)
        self._record_phases(step)
        if step % self.config.logging_steps == 0:
            self._tracker.log(metrics, step)
            self._progress.update(metrics, done=step + 1)
        self._batches.end_step(step, metrics)

    def _record_phases(self, step: int) -> None:
        """Phases since the last call, as those of ``step``."""
        spans = self._timer.pop_spans()
        if spans:
            self._timeline.append(step, min(begin for _, begin, _ in spans), time.time(), spans)

    def record_validation(self, metrics: Mapping[str, float], steps_done: int) -> None:
        """Metrics of a validation after ``steps_done`` steps."""
        self._validations[steps_done] = dict(metrics)
        self._tracker.log(metrics, steps_done)
        self._checkpoints.manager.measured(steps_done, metrics)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in whole_sets(metrics).items())
        logger.info("validation after %d steps: %s", steps_done, shown)

    def dump_samples(self, kind: str, step: int, table: Callable[[], SampleTable], part: str = "") -> None:
        """Write a step's samples where ``rollout_dump_dir`` says; a few of each validation go to the trackers.

        Args:
            kind: ``train`` or ``validation``.
            part: the name of a validation set, if it has one.
        """
        name = f"{kind}-{part}" if part else kind
        self._outputs.dump(name, step, table)
        if kind == "validation":
            rows = list(table())
            self._tracker.log_samples(name, rows[:SHOWN_SAMPLES], step)
            self.samples.texts(kind, step, rows, part)

    def replacing(self, cluster: Cluster, initialize: Callable[[], PendingCall], work: Callable[[], R]) -> R:
        """Have work done by a role that never learns: when one of its workers dies, they are all started again, and
        the work is done again.

        Args:
            initialize: starts to build the role's model.

        Raises:
            WorkerDied: it died again at the same work.
        """
        try:
            return work()
        except WorkerDied as death:
            logger.warning("the workers of %s are replaced, and their work done again:\n%s", cluster.name, death)
        cluster.start_again()
        initialize().result()
        self.record({f"system/{cluster.name}_deaths": Sum(1.0)})
        return work()

    def _peak_memory(self) -> dict[str, float]:
        """Peak bytes of the worker that used most, by role, since the last call; nothing in steps that do not measure,
        since asking every worker at every phase would cost more than a small step."""
        if not self._measures_memory:
            return {}
        calls = [
            (cluster.name, cluster.call_all(Worker.peak_memory).within(MEMORY_SECONDS))
            for cluster in self._clusters
            if cluster.live_ranks
        ]
        peaks = {}
        for name, call in calls:
            try:
                peaks[name] = float(max(call.result()))
            except RemoteError as error:  # an engine may be lost and the run go on: its next call decides
                logger.debug("no measurement of memory: %s", error)
        return peaks

    # Checkpoints

    def is_save_due(self, step: int, can_save: bool = True) -> bool:
        """True when a checkpoint follows step ``step``: it is its turn, or a signal has asked for one.

        Args:
            can_save: the driver's state is that of the steps done; a checkpoint that was asked for waits for that.
        """
        is_turn = bool(self.plan.save_steps) and (step + 1) % self.plan.save_steps == 0
        return is_turn or (can_save and ending.save_requested)

    @contextmanager
    def writing_checkpoint(
        self, steps_done: int, state: Mapping[str, Any], writers: Sequence[Cluster]
    ) -> Iterator[Path]:
        """A folder for the roles to write into; with ``state`` it becomes a checkpoint.

        It appears when ``writers`` have all of it on disk: at the end of the block, else at the beginning of a later
        phase, at the latest before the next checkpoint or the end of the run.
        """
        ending.save_requested = False
        validations = {str(steps): metrics for steps, metrics in self._validations.items()}
        whole = dict(state) | {"validations": validations}
        with self._timer.phase("save"), self._checkpoints.writing(steps_done, whole, writers) as path:
            yield path

    def _published(self, steps_done: int) -> None:
        self._interruption.saved_steps = steps_done
        self._leave_account()

    def checkpoint_to_resume(self) -> Checkpoint | None:
        """The checkpoint that ``resume_from_checkpoint`` asks for, if there is one."""
        found = self._checkpoints.take_up()
        if found is not None:
            self._interruption.saved_steps = found.step
        return found

    def load_state(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The state that :meth:`writing_checkpoint` was given."""
        state = load_state(checkpoint.role(STATE_FOLDER))
        self._validations = {int(steps): metrics for steps, metrics in state["validations"].items()}
        return state
