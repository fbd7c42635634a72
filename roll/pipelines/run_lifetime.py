"""The start and the end of a run: logs, Ray, trackers and the guard; what a signal that asks it to end saves, within a
bounded time; an account of how far it got, however it ends; and the files that it leaves."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from roll.config.checks.base import unwritable
from roll.config.loader import LoadedConfig
from roll.config.plan.render import effective_yaml
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.masking import masked, masked_text
from roll.config.reading.yaml_files import shown
from roll.config.run import RESOLVED_CONFIG
from roll.distributed import Cluster, Interrupted, ResourceManager, ray_runtime
from roll.distributed.actor import Profiling
from roll.distributed.failures import naming
from roll.distributed.guard import Guard
from roll.distributed.restarts import supervised
from roll.distributed.signals import ending
from roll.pipelines.run_checkpoints import RunCheckpoints
from roll.pipelines.sample_records import SampleRecorder
from roll.protocol.metrics import Metrics
from roll.report.page import report_command, write_report
from roll.report.run_files import describe_run
from roll.tracking import ENDING_LOGGER, LOG_NAME, TrackedRun, build_trackers, setup_logging
from roll.tracking.callbacks import Callbacks
from roll.tracking.run_record import MAX_BYTES, RECORD_FOLDER, SAMPLES_NAME, TIMELINE_NAME, SampleLog, TimelineLog

logger = logging.getLogger(__name__)

LOCK = ".lock"


@contextmanager
def sole_writer(folder: Path, source: Path) -> Iterator[None]:
    """Hold the lock of an output folder, which ends with this process however it ends; ConfigError: another run holds
    it, or nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not "w", which would empty the file that names the holder before the lock is known to be free.
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error.strerror, source) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            rule = f"another run is writing there ({file.read().strip()}): let it end, or give this one another folder"
            problem = Problem("output_dir", str(folder), rule, f"{folder}_2", shown(source))
            raise ConfigError([problem]) from None
        except OSError as error:  # A file system without locks.
            logger.warning("%s cannot be locked (%s): two runs there would write over each other", folder, error)
        with naming(folder / LOCK):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


class RunLifetime:
    """Services of a run from its first moment to its last, whatever its steps are; ``record`` takes metrics of a
    step."""

    def __init__(self, loaded: LoadedConfig[Any], record: Callable[[Metrics], None]) -> None:
        self.config, self.plan = loaded.config, loaded.plan
        self._loaded = loaded
        self._clusters: list[Cluster] = []
        self._shutdown_hooks: list[Callable[[], None]] = []
        self._interruption = Interruption(self.config.interrupt_timeout)
        self._guard: Guard | None = None
        self._total_steps = 0
        self._checkpoints = RunCheckpoints(self.config, self.plan, record, self._published)
        self._resume = self._checkpoints.resume
        # Says where the files are, and with `outcome` how the run has ended.
        self._describe = partial(describe_run, loaded, time.time(), self._resume is not None)
        self._reported = False
        self._callbacks = Callbacks(loaded.callbacks)

    @contextmanager
    def running(self) -> Iterator[ResourceManager]:
        """Logs, trackers and Ray for the length of a run; whatever was started is stopped again, however it ends."""
        log_dir, config = self.plan.log_dir, self.config
        profiles = Path(config.profiler_output_dir or log_dir / "profiler").resolve()
        profiling = Profiling(str(profiles), config.profiler_timeline, config.profiler_memory)
        with ExitStack() as stack:
            # Prompts, responses and configurations are private, on the disk of a shared host too.
            stack.callback(os.umask, os.umask(0o077))
            is_first_node = os.environ.get("RANK", "0") == "0"
            if is_first_node:
                # Before the log is opened: a second run must not write into the log of the first.
                stack.enter_context(sole_writer(self.plan.output_dir, self._loaded.source))
            setup_logging(log_dir)
            stack.callback(self._report_at_end)
            if is_first_node:
                self._open_files(stack)
            shape, envs = (self.plan.num_devices_per_node, self.plan.num_nodes), profiling.environment()
            # On the further nodes of a run this does not return.
            runtime = stack.enter_context(ray_runtime(*shape, envs | config.system_envs, log_dir / "workers"))
            self._guard = runtime.guard
            supervised.tell(mark=runtime.mark)
            ending.on_first = self._interruption.begin
            stack.callback(self._checkpoints.manager.close)
            resources = ResourceManager(*shape, system_envs=runtime.actor_envs)
            stack.callback(resources.close)
            self._leave_account()
            try:
                yield resources
                with ending.holding():
                    self._checkpoints.publish()
            except BaseException as caught:
                ending.release()
                with ending.holding(then_raise=False):
                    # Ray's calls turn what a signal handler raises into an exception of their own.
                    error = self._end_early(ending.meant(caught))
                if error is caught:
                    raise
                raise error from None
            self._interruption.end()
            self._shut_down(graceful=True)

    def _open_files(self, stack: ExitStack) -> None:
        """Write the configuration, and open trackers and the files that reports are made from. Before Ray starts, so
        that what a full disk refuses is said at once."""
        for warning in self._loaded.warnings:
            logger.warning("%s", warning)
        self.plan.output_dir.mkdir(parents=True, exist_ok=True)
        path = self.plan.output_dir / RESOLVED_CONFIG
        with naming(path):
            path.write_text(effective_yaml(self._loaded), encoding="utf-8")
        # Checkpoint n is the state after n steps, which are counted from 0.
        last_step = None if self._resume is None else self._resume.step - 1
        tracked = TrackedRun(self.plan.log_dir, self.plan.exp_name, masked(self._loaded.resolved), last_step)
        with naming(self.plan.log_dir):
            self._tracker = build_trackers(self.config.track_with, self.config.tracker_kwargs, tracked)
        stack.callback(self._tracker.close)
        folder, settings = self.plan.output_dir / RECORD_FOLDER, self.config.sample_log
        self._timeline = TimelineLog(folder / TIMELINE_NAME, resumed=last_step is not None)
        log = SampleLog(folder / SAMPLES_NAME, MAX_BYTES, last_step) if settings.enabled else None
        seen = partial(self._callbacks.call, "on_samples") if self._callbacks.has("on_samples") else None
        self.samples = SampleRecorder(log, settings, seen)
        stack.callback(self._timeline.close)
        stack.callback(self.samples.close)
        self._describe()

    def _end_early(self, error: BaseException) -> BaseException:
        """Save what can be saved, and end the clusters; return ``error`` with an account of the run's progress."""
        # First, while the workers that write the checkpoint are alive.
        if isinstance(error, Interrupted):
            self._interruption.save(self._checkpoints.publish)
        self._interruption.end()
        try:
            self._shut_down(graceful=False)  # a rank that hangs would not take part in an orderly end
        except Exception:
            logger.exception("while the run was ended:")
        # After the clusters, whose ranks may have been writing into it.
        if self._checkpoints.pending is not None:
            self._checkpoints.pending.discard()
        self._describe(outcome=f"{type(error).__name__}: {error}")
        error.add_note(self._account())
        logging.getLogger(ENDING_LOGGER).error("%s: %s\n%s", type(error).__name__, error, self._account())
        return error

    def _report_at_end(self) -> None:
        """Write the report, however the run has ended: not before Ray has started, and once."""
        if self._guard is not None and not self._reported:
            with ending.holding(then_raise=False):
                self._report()

    def _report(self) -> None:
        self._reported = True
        write_report(self.plan.output_dir)

    def _account(self) -> str:
        reached, newest = self._interruption.steps_done, self._newest_checkpoint()
        steps = "training had not begun" if reached is None else f"{reached} of {self._total_steps} steps are done"
        if newest is None:
            return f"{steps}; there is no checkpoint of this run"
        words = [str(self.plan.output_dir / RESOLVED_CONFIG)]
        if self._loaded.written is None:  # else of a dictionary, which no command line names
            kept = [one for one in self._loaded.overrides if not one.lstrip("+").startswith("resume_from_checkpoint=")]
            words = [str(self._loaded.source), *kept]
        command = masked_text(shlex.join(["roll", "run", *words, "resume_from_checkpoint=true"]))
        return f"{steps}; newest checkpoint: {newest}\nto go on: {command}"

    def _newest_checkpoint(self) -> Path | None:
        places = self._checkpoints.places(self._interruption.saved_steps)
        return next((folder for folder in places if folder.is_dir()), places[0]) if places else None

    def _leave_account(self) -> None:
        """Give the guard what it reports should this process be killed."""
        assert self._guard is not None
        supervised.tell(reached=self._interruption.steps_done)
        if places := self._checkpoints.places(self._interruption.saved_steps):
            store = self._checkpoints.manager.store
            copies = [] if store is None else [f"{store}/{places[0].name}"]
            supervised.tell(checkpoint=[*map(str, places), *copies])
        log = str((self.plan.log_dir / LOG_NAME).resolve())
        # Writes the report in another process, should this process be killed.
        command = report_command(self.plan.output_dir)
        self._guard.tell({"account": self._account(), "log": log, "command": command})

    def at_end(self, hook: Callable[[], None]) -> None:
        """Add a shutdown hook, called before the clusters end, however the run ends."""
        self._shutdown_hooks.append(hook)

    def _shut_down(self, graceful: bool) -> None:
        """Call the hooks, then end the clusters: all of them, whichever raises."""
        with ExitStack() as stack:
            # The stack unwinds from its end: hooks before clusters, each in the order of registration.
            for cluster in reversed(self._clusters):
                stack.callback(cluster.shutdown, graceful=graceful)
            for hook in reversed(self._shutdown_hooks):
                stack.callback(hook)

    def watch(self, clusters: Sequence[Cluster]) -> None:
        """Add clusters, which are shut down at the end and whose peak memory is measured."""
        self._clusters += clusters

    def _published(self, steps_done: int) -> None:
        self._interruption.saved_steps = steps_done
        self._leave_account()
        self._callbacks.call("on_checkpoint", steps_done, self._newest_checkpoint())


class Interruption:
    """Progress of the run, the part of it that is saved, and how to save the rest.

    Args:
        seconds: from the first signal, for a step that must not be torn apart to end and for a checkpoint to be
            written; 0: none is written.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # See RunContext.save_when_interrupted.
        self.state: Callable[[], dict[str, Any] | None] = lambda: None
        self.write: Callable[[int, dict[str, Any]], None] | None = None
        self._point: tuple[int, dict[str, Any]] | None = None
        self._timer: threading.Timer | None = None
        self._is_over = False
        self.steps_done: int | None = None  # None: training has not begun
        self.saved_steps: int | None = None  # steps done by the newest checkpoint; None: there is none

    def reach(self, steps_done: int) -> None:
        """Note that ``steps_done`` steps are done, and the next has not begun; Interrupted: a signal has come, and this
        is a point that can be saved."""
        self.steps_done = steps_done
        state = self.state()
        self._point = None if state is None else (steps_done, state)
        if self._point is not None:
            ending.check()

    @property
    def can_end(self) -> bool:
        """False while models have begun a step after those that are done."""
        return self.write is None or self._point is not None

    def begin(self, number: signal.Signals) -> None:
        """React to the first signal. Called in a signal handler, where nothing may be logged."""
        can_save = self._seconds > 0 and self.write is not None
        plan = f"what is done is saved first (at most {self._seconds:g} s); " if can_save else ""
        os.write(2, f"\n{number.name}: the run ends; {plan}once more ends it at once\n".encode())
        self._timer = threading.Timer(self._seconds, self._give_up, [number])
        # Else a run that ends before the limit would wait for it.
        self._timer.daemon = True
        self._timer.start()

    def save(self, publish: Callable[[], None]) -> None:
        """Write what :meth:`reach` has noted, unless it is saved already; ``publish`` completes a checkpoint that is
        being written. Logs the result, raises nothing."""
        limit, has_time = f"interrupt_timeout: {self._seconds:g}", self._seconds > 0 and not self._is_over
        try:
            if has_time and self.write is not None and self._point is not None and self.steps_done:
                (steps_done, state), began = self._point, time.monotonic()
                publish()
                # The checkpoint that was just published may be the one that is wanted.
                if self.saved_steps != steps_done:
                    self.write(steps_done, state)
                    publish()
                    logger.info("saved after %d steps, in %.1f s", steps_done, time.monotonic() - began)
            elif self._is_over:
                logger.error("nothing was saved: the step in flight was not done within %s", limit)
        # The limit in time comes as a SystemExit; Ray's calls may make a KeyboardInterrupt of it.
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            late = self._is_over or isinstance(error, SystemExit | KeyboardInterrupt)
            reason = f"it took longer than {limit}" if late else str(error)
            logger.error("no checkpoint was saved: %s", reason)
        finally:
            self.end()

    def end(self) -> None:
        """Lift the limit in time."""
        if self._timer is not None:
            self._timer.cancel()
        ending.forget_pending()

    def _give_up(self, number: signal.Signals) -> None:
        self._is_over = True
        ending.raise_in_main(Interrupted(number))
