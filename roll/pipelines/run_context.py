"""The context that every pipeline runs in: steps, phases, the ranks that are late in them, metrics, checkpoints."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from roll.checkpoint import Checkpoint
from roll.checkpoint.folders import PIPELINE_FOLDER
from roll.checkpoint.state import load_state
from roll.config.loader import LoadedConfig
from roll.distributed import Cluster, RemoteError, Worker, WorkerDied
from roll.distributed.failures import OutputRefused
from roll.distributed.restarts import supervised
from roll.distributed.signals import ending
from roll.pipelines.batches import FOLDER as BATCHES
from roll.pipelines.batches import BatchRecorder
from roll.pipelines.model_calls import TRAINING, Residency
from roll.pipelines.run_lifetime import RunLifetime
from roll.protocol.metrics import Metrics, Sum, merge_metrics, to_floats
from roll.report.run_files import REPORT_NAME
from roll.tracking import LOG_NAME, ProgressReporter, RunSummary, SampleTable
from roll.tracking.console import INTERVAL_ENDS
from roll.tracking.records import strip_reducer_tags
from roll.workers.model import TrainWorker

logger = logging.getLogger(__name__)

R = TypeVar("R")
SHOWN_SAMPLES = 8
ASK_SECONDS = 30.0  # time for a worker to report its memory, or how long it has worked
SLOW = 2.0  # times the median
LEAST_SECONDS = 1.0  # shortest phase that is compared: in shorter ones a busy host makes such differences now and then
MOST_RANKS = 16  # ranks of a role whose seconds are each a metric; of more, the median and the slowest

PeakMemory = Callable[[], Mapping[str, float]]
"""Peak bytes since the last call, by a name such as a role's; a call starts a new measurement."""


class PhaseTimer:
    """Wall-clock seconds per named phase. Phases nest; an outer one's time and memory include the inner ones'.

        timer = PhaseTimer()
        with timer.phase("step_generate"):
            ...
        metrics |= timer.pop()          # {"time/step_generate": 0.87}

    Args:
        peak_memory: called at both ends of every phase if given; its values come out as
            ``memory/<phase>/<name>`` (bytes).
    """

    def __init__(self, peak_memory: PeakMemory | None = None) -> None:
        self._peak_memory = peak_memory
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, float] = {}
        self._open: list[str] = []
        # Name, begin and end (seconds since the epoch) of every phase that has ended, until they are taken out.
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block; a name used several times before :meth:`pop` is summed. Counts also when the block raises."""
        # Two clocks: durations must not jump with the wall clock, spans are compared with those of other processes.
        # Begun before the measurement, which workers answer when they have done what was begun before the phase.
        start, began = time.perf_counter(), time.time()
        self._credit_memory()
        self._open.append(name)
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self.spans.append((name, began, time.time()))
            self._credit_memory()
            self._open.pop()

    def pop(self) -> dict[str, float]:
        """``time/<phase>`` in seconds and ``memory/<phase>/<name>`` in bytes since the last call; starts again at 0."""
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()} | self._bytes
        self._seconds, self._bytes = {}, {}
        return metrics

    def _credit_memory(self) -> None:
        """The peak since the last reading belongs to every phase open since then."""
        peak: Mapping[str, float] = {} if self._peak_memory is None else self._peak_memory()
        for name, value in peak.items():
            for phase in self._open:
                key = f"memory/{phase}/{name}"
                self._bytes[key] = max(self._bytes.get(key, 0.0), float(value))


class RunContext(RunLifetime):
    """Everything that a run needs besides its algorithm. Steps are counted from 0; "after n steps" is checkpoint n and
    validation n."""

    def __init__(self, loaded: LoadedConfig[Any]) -> None:
        self._recorded: list[Metrics] = []
        super().__init__(loaded, self.record)
        self._validations: dict[int, dict[str, float]] = {}
        self._began = time.perf_counter()
        self._timer = PhaseTimer(self._peak_memory if self.config.memory_steps else None)
        self._rank_seconds: dict[str, float] = {}  # metrics of the current step
        self.measures_workers = False
        """In this step, before and after each phase: memory, and the work of each rank."""
        config = self.config
        self.batches = BatchRecorder(
            self.plan.output_dir / BATCHES, loaded.pipeline.name, config.dump_batches, config.on_nonfinite
        )

    def steps(self, first: int, end: int) -> Iterator[int]:
        """The steps still to be done, with progress shown.

        A signal that asks the run to end is obeyed between two steps, or wherever the caller says that a step may be
        abandoned (``ending.interruptible``): there a block changes no model, and what was before it is saved.
        """
        self._total_steps = end
        with (
            ending.holding(),
            ProgressReporter(end, self._loaded.pipeline.headlines, first_step=first) as self._progress,
        ):
            # One iteration more than there are steps: the last one only notes that all of them are done.
            for step in range(first, end + 1):
                self.reach(step)
                if step == end:
                    break
                if self._callbacks.stopping and self._interruption.can_end:
                    logger.info("a callback has ended the run after %d of %d steps", step, end)
                    break
                self._step_began = time.perf_counter()
                # Validations and checkpoints between two steps belong to the step before them.
                self._record_phases(step - 1)
                self.measures_workers = bool(self.config.memory_steps) and step % self.config.memory_steps == 0
                yield step

    def reach(self, steps_done: int) -> None:
        """Note that ``steps_done`` steps are done, which a signal saves from here on; Interrupted: one has come."""
        self._interruption.reach(steps_done)
        self._leave_account()

    @property
    def steps_done(self) -> int:
        """The steps that the models have done: all of them at the end, unless a callback ended the run."""
        return self._interruption.steps_done or 0

    def is_left_out(self, step: int) -> bool:
        """True if the run was rewound because of this step's batch: no model learns from it."""
        if step in supervised.left_out:
            logger.warning("step %d: its batch is left out (on_nonfinite: rewind)", step)
        return step in supervised.left_out

    def save_when_interrupted(
        self, state: Callable[[], dict[str, Any] | None], save: Callable[[int, dict[str, Any]], None]
    ) -> None:
        """Register what is saved on a signal that asks the run to end.

        Args:
            state: between two steps, the driver's state; None: it does not belong to the steps that are done.
            save: writes a checkpoint after so many steps with such a state, in a step that was abandoned before it had
                changed a model.
        """
        self._interruption.state, self._interruption.write = state, save

    @property
    def stopping(self) -> bool:
        """True if a signal or a callback has asked the run to end: nothing new may begin before that."""
        return ending.received is not None or self._callbacks.stopping

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as ``time/<name>``; in steps that measure the memory of all workers, their work as well."""
        # Polled at phases: no thread of the driver waits until the ranks have written a checkpoint.
        self._checkpoints.publish_if_written()
        compares = self.measures_workers
        with self._timer.phase(name):
            before = self._ask_workers(Worker.effort_seconds, 2) if compares else {}
            yield
        after = self._ask_workers(Worker.effort_seconds, 2) if compares else {}
        for cluster in self._clusters if compares else ():
            early, late = before.get(cluster.name, ()), after.get(cluster.name, ())
            if len(early) == len(late) > 1:  # else a rank was lost during the phase
                self._compare_ranks(name, cluster, [end - begin for begin, end in zip(early, late, strict=True)])

    def _compare_ranks(self, phase: str, cluster: Cluster, seconds: Sequence[float]) -> None:
        """Note what each rank needed as ``time/<phase>/<role>/rank_<n>``, ``median`` and ``slowest``.

        Ranks that compute together wait for each other, so the wall-clock time of a phase says nothing about who is
        late. What says it is the time in which each has worked or was kept from working
        (:class:`roll.distributed.worker.Effort`): who waits for a peer does neither. On accelerators that is the host's
        part of the work (launching kernels, preparing data): a device that is throttled does not show in it.
        """
        prefix, median = f"time/{phase}/{cluster.name}", statistics.median(seconds)
        if len(seconds) <= MOST_RANKS:
            self._rank_seconds |= {f"{prefix}/rank_{rank}": own for rank, own in enumerate(seconds)}
        self._rank_seconds |= {f"{prefix}/median": median, f"{prefix}/slowest": max(seconds)}
        for rank in stragglers(seconds):
            where = cluster.addresses[rank]
            logger.warning(
                "%s rank %d (pid %d on %s) is slow: it needed %.2f s in %s, the median of %d ranks is %.2f s",
                *(cluster.name, rank, where.pid, where.node_ip, seconds[rank], phase, len(seconds), median),
            )

    def record(self, metrics: Metrics) -> None:
        """Metrics of the current step."""
        self._recorded.append(metrics)

    def recorded(self) -> dict[str, float]:
        """The metrics of the current step so far, taken out: they are written with no step."""
        metrics, self._recorded = to_floats(merge_metrics(self._recorded)), []
        return metrics

    def end_step(self, step: int) -> None:
        """Write what was recorded since the last step. Raises ``NotFinite``: a loss or gradient was not finite, and
        ``on_nonfinite`` says that this ends the run."""
        self._checkpoints.publish_if_written()
        seconds = time.perf_counter() - self._step_began
        metrics = self.recorded() | self._timer.pop() | self._rank_seconds
        self._rank_seconds = {}
        metrics |= {"time/step_total": seconds, "system/global_step": float(step)}
        if "system/tokens" in metrics:
            metrics["system/tps"] = metrics["system/tokens"] / seconds
        self._checkpoints.manager.measured(step, metrics)
        self._record_phases(step)
        if step % self.config.logging_steps == 0:
            self._tracker.log(metrics, step)
            self._progress.update(metrics, done=step + 1)
        self.batches.end_step(step, metrics)
        seen = strip_reducer_tags(metrics | self._validations.get(step, {}))
        self._callbacks.call("on_step", step, seen)

    def _record_phases(self, step: int) -> None:
        spans, self._timer.spans = self._timer.spans, []
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
        """Write a step's samples where ``rollout_dump_dir`` says; of each ``kind`` ``validation``, or of its set
        ``part``, a few go to the trackers."""
        name = f"{kind}-{part}" if part else kind
        if self.plan.dump_dir is not None:
            file = self.plan.dump_dir / f"{name}-{step:06d}.jsonl"
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("w", encoding="utf-8") as out:
                    out.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in table())
            except OSError as error:
                logger.error("%s was not written: %s", file, error)
        if kind == "validation":
            rows = list(table())
            self._tracker.log_samples(name, rows[:SHOWN_SAMPLES], step)
            self.samples.texts(kind, step, rows, part)

    def replacing(self, cluster: Cluster, build: Callable[[], object], work: Callable[[], R]) -> R:
        """Run ``work`` of a role that never learns; when a worker dies, start all of them again, ``build`` its model
        and repeat it. Raises ``WorkerDied``: one died again at the same work, or one of another role did."""
        try:
            return work()
        except WorkerDied as death:
            if death.cluster != cluster.name:
                raise
            logger.warning("the workers of %s are replaced, and their work done again:\n%s", cluster.name, death)
        cluster.start_again()
        build()
        self.record({f"system/{cluster.name}_deaths": Sum(1.0)})
        return work()

    def _peak_memory(self) -> dict[str, float]:
        """Peak bytes of the worker that used most, by role, since the last call."""
        # Asking every worker at every phase would cost more than a small step.
        if not self.measures_workers:
            return {}
        return {name: float(max(peaks)) for name, peaks in self._ask_workers(Worker.peak_memory, 1).items()}

    def _ask_workers(self, method: Callable[..., float], least_ranks: int) -> dict[str, list[float]]:
        """The answers of all live ranks, by role with so many of them."""
        asked = [cluster for cluster in self._clusters if len(cluster.live_ranks) >= least_ranks]
        # All of them are asked before the first answer is waited for.
        calls = [(one.name, one.call_all(method).within(ASK_SECONDS)) for one in asked]
        answers = {}
        for name, call in calls:
            try:
                answers[name] = call.result()
            except RemoteError as error:  # an engine may be lost and the run go on: its next call decides
                logger.debug("no measurement of %s: %s", name, error)
        return answers

    @contextmanager
    def finishing(self, steps: int) -> Iterator[None]:
        """Write the trained model in the block; then write the report and show the summary. Raises ``OutputRefused``:
        the disk did not take the model. The rest of the run's end comes all the same."""
        refused: OutputRefused | None = None
        try:
            yield
        except (OSError, RemoteError) as error:
            refused = OutputRefused.of(error)
            if refused is None:
                raise
        try:
            self.finish(steps)
        finally:
            if refused is not None:
                raise refused

    def finish(self, steps: int) -> None:
        self._record_phases(steps)
        self._describe(outcome="finished")
        self.samples.flush()
        self._report()
        files = {"log": self.plan.log_dir / LOG_NAME, **self._tracker.files()}
        files["report"] = self.plan.output_dir / REPORT_NAME
        done = [whole_sets(self._validations[after], True) for after in sorted(self._validations)]
        RunSummary(
            title=self.plan.exp_name,
            before=done[0] if len(done) > 1 else {},
            after=done[-1] if done else {},
            seconds=time.perf_counter() - self._began,
            steps=steps,
            files=files,
        ).show()

    # Checkpoints

    def is_save_due(self, step: int) -> bool:
        """True when a checkpoint follows step ``step``."""
        return bool(self.plan.save_steps) and (step + 1) % self.plan.save_steps == 0

    def save_models(
        self, steps_done: int, state: Mapping[str, Any], learners: Sequence[Cluster], residency: Residency
    ) -> None:
        """Write a checkpoint after ``steps_done`` steps: the models that learn, and ``state``, what the driver must
        remember.

        It appears when all ranks have their part on disk: at the end of the call, else at the beginning of a later
        phase, at the latest before the next checkpoint or the end of the run.
        """
        validations = {str(steps): metrics for steps, metrics in self._validations.items()}
        whole = dict(state) | {"validations": validations}
        with self._timer.phase("save"), self._checkpoints.writing(steps_done, whole, learners) as path:
            for cluster in learners:
                # One after the other: they may share devices.
                residency.bring({cluster.name: TRAINING})
                cluster.call_all(TrainWorker.save_checkpoint, str(path / cluster.name)).result()

    def resume_models(self, learners: Sequence[Cluster], residency: Residency) -> Checkpoint | None:
        """Load the models that learn from the checkpoint that ``resume_from_checkpoint`` names, if there is one."""
        if (found := self._checkpoints.take_up()) is not None:
            self._interruption.saved_steps = found.step
            for cluster in learners:
                residency.bring({cluster.name: TRAINING})
                cluster.call_all(TrainWorker.load_checkpoint, str(found.role(cluster.name))).result()
        return found

    def load_state(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The state that was passed to :meth:`save_models`."""
        state = load_state(checkpoint.role(PIPELINE_FOLDER))
        self._validations = {int(steps): metrics for steps, metrics in state["validations"].items()}
        return state


def stragglers(seconds: Sequence[float]) -> list[int]:
    """The ranks that needed twice as long as the median (of two: as the other)."""
    median = statistics.median_low(seconds)
    return [rank for rank, own in enumerate(seconds) if own >= max(SLOW * median, LEAST_SECONDS)]


def whole_sets(metrics: Mapping[str, float], intervals: bool = False) -> dict[str, float]:
    """Metrics of whole validation sets: none by tag or under a second name, ends only with ``intervals``."""
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("val/")
        and (name.count("/") <= 2 or "/reward/" in name)
        and (intervals or not name.endswith(INTERVAL_ENDS))
    }
