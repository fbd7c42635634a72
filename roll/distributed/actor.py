"""The Ray actor around a worker: it sets up the process and its log before the worker's class is imported, reports
errors, and runs calls under PyTorch's profiler on request."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import importlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from roll.config import objects
from roll.config.reading.masking import MaskingFormatter, masked_text, register_secrets
from roll.distributed.nodes import LOG_DIR_ENV, interface_of
from roll.distributed.worker import Dispatch, Registration, Worker, WorkerContext, registrations
from roll.platforms import VISIBLE_DEVICES

logger = logging.getLogger(__name__)


PROFILER_ENV = "ROLL_PROFILER"
"""Environment variable with the recording settings of a run's workers: :class:`Profiling` as JSON."""
_TABLE_ROWS = 40


@dataclass(frozen=True)
class Profiling:
    """Settings of recording."""

    folder: str
    """For ``<worker>-<method>-<call>.trace.json.gz`` (Chrome's trace format, which Perfetto and TensorBoard read),
    ``....memory.txt`` (operators by bytes) and ``....memory.pickle`` (snapshots of an accelerator's allocator, for
    pytorch.org/memory_viz)."""
    timeline: bool  # write timelines
    memory: bool  # write what allocates memory

    def environment(self) -> dict[str, str]:
        """The variables of the workers; none where nothing is recorded."""
        return {PROFILER_ENV: json.dumps(asdict(self))} if self.timeline or self.memory else {}


RECORDED_CALL = 1
"""Of each method, from 0: most are called once a step, and the first call allocates and compiles what others find."""


class Profiler:
    """Records a worker's calls according to :data:`PROFILER_ENV`."""

    def __init__(self, worker_name: str) -> None:
        text = os.environ.get(PROFILER_ENV)
        self._profiling = None if text is None else Profiling(**json.loads(text))
        self._worker_name = worker_name
        self._calls: Counter[str] = Counter()

    @contextmanager
    def around(self, method: str) -> Iterator[None]:
        """Record the block if the settings name this call; nothing is written for a call that raises."""
        call, profiling = self._calls[method], self._profiling
        self._calls[method] += 1
        if profiling is None or call != RECORDED_CALL:
            yield
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        snapshots = profiling.memory and on_cuda
        if snapshots:
            torch.cuda.memory._record_memory_history()
        with profile(activities=activities, profile_memory=profiling.memory) as recorded:
            yield
        name = f"{self._worker_name}-{method}-{call}".replace("/", "-")
        folder = Path(profiling.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if profiling.timeline:
                recorded.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
            if profiling.memory:
                order = "self_cuda_memory_usage" if on_cuda else "self_cpu_memory_usage"
                table = recorded.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS)
                (folder / f"{name}.memory.txt").write_text(table, encoding="utf-8")
            if snapshots:
                torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
        except (OSError, RuntimeError) as error:  # the profiler's own writer knows no OSError
            logger.error("the profile of %s was not written to %s; the run goes on: %s", name, folder, error)
            return
        finally:
            if snapshots:
                torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("profile of %s written to %s", name, folder)


STACK_SIGNAL = signal.SIGUSR2
"""Signal that makes a worker write the Python stacks of its threads to its log, even when stuck in a C call."""

_COMPUTING = (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST)
"""Modes of the methods that a profiler records: those that compute a batch."""


def open_worker_log(worker_name: str, log_dir: Path | None) -> Path | None:
    """Send the process's standard output and error to ``<log_dir>/<worker_name>.log`` and set logging up.

    The file descriptors themselves are redirected, so that what C++ libraries and crash handlers write is in it too.
    Returns the file, or None where the streams stay where Ray put them.
    """
    path = None
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        path = log_dir / f"{worker_name}.log"
        sys.stdout.flush()
        sys.stderr.flush()
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(
        MaskingFormatter(f"%(asctime)s %(levelname)s [{worker_name}] %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    return path


def tail(path: Path, lines: int = 20, begin: int = 0) -> list[str]:
    """The last ``lines`` lines of the file after byte ``begin``; empty when it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - 65536))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [masked_text(line) for line in [line for line in text.splitlines() if line.strip()][-lines:]]


CALLS_SUFFIX = ".calls.jsonl"
_JOINED_GAP, _JOINED_SECONDS = 0.01, 0.5
_SHORTEST = 0.0005


class CallTimes:
    """Writes when the calls of a worker began and ended, next to its log; :mod:`roll.tracking.run_record` reads it.

    Calls of the same method in quick succession, such as the turns of an engine, are merged into spans of up to half a
    second; calls shorter than half a millisecond are left out. ``path``: the file, which is appended to.
    """

    def __init__(self, path: Path, context: WorkerContext) -> None:
        # Line by line: workers are ended by ray.kill(), which leaves no time to write out a buffer.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        self._open: tuple[str, float, float] | None = None
        who = {"role": context.cluster_name, "rank": context.rank, "devices": list(context.device_ids)}
        self._write({**who, "host": socket.gethostname()})

    def add(self, method: str, began: float, ended: float) -> None:
        """Seconds since the epoch."""
        if ended - began < _SHORTEST:
            return
        with self._lock:
            last = self._open
            if last is not None:
                if last[0] == method and 0 <= began - last[2] < _JOINED_GAP and ended - last[1] < _JOINED_SECONDS:
                    self._open = (method, last[1], ended)
                    return
                self._write(last)
            self._open = (method, began, ended)
            if ended - began >= _JOINED_SECONDS or method == "shutdown":
                self._write(self._open)
                self._open = None

    def _write(self, row: object) -> None:
        with suppress(OSError):  # a full disk ends no call
            self._file.write(json.dumps(row) + "\n")


_STACK_FRAMES = 6
_DRIVERS_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class WorkerRaised(Exception):
    """An exception of a worker's method, in words; it carries no object that the driver might fail to unpickle."""

    def __init__(self, error: str, stack: str, when: float) -> None:
        super().__init__(error, stack, when)
        self.error = error
        self.stack = stack
        self.when = when
        """Seconds since the epoch on the worker's clock: the earliest of several is the most probable cause."""


@dataclass(frozen=True)
class WorkerAddress:
    """The process of a worker, and its host."""

    pid: int
    node_id: str
    node_ip: str
    hostname: str
    log_file: str | None


class WorkerActor:
    """Holds one :class:`Worker`. Deliberately light: heavy imports happen in :meth:`start`, under the right
    environment."""

    def __init__(self, worker_name: str, environment: dict[str, str], local_devices: tuple[int, ...] | None) -> None:
        self._listener: socket.socket | None = None
        self._worker: Worker | None = None
        self._has_started = threading.Event()
        self._times: CallTimes | None = None
        self._profiled: set[str] = set()
        os.environ.update(environment)
        if threading.current_thread() is threading.main_thread():
            # SIGTERM and SIGHUP to a whole process group or job are the driver's, which ends this process when it has
            # saved what there is to save. Handlers, unlike blocked or ignored signals, are not inherited by programs
            # that are started from here.
            for number in _DRIVERS_SIGNALS:
                signal.signal(number, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _DRIVERS_SIGNALS)
        if local_devices is not None:
            _show_devices(local_devices)
        self._profiler = Profiler(worker_name)
        os.umask(0o077)  # As the driver's: also on a Ray that was there before.
        log_dir = os.environ.get(LOG_DIR_ENV)
        self._calls_file = Path(log_dir) / f"{worker_name}{CALLS_SUFFIX}" if log_dir else None
        log_file = open_worker_log(worker_name, Path(log_dir) if log_dir else None)
        if log_file is None:
            with suppress(OSError):  # the file of Ray's to which standard error goes
                log_file = Path(os.readlink("/proc/self/fd/2"))
        node_ip = ray.util.get_node_ip_address()
        interface = interface_of(node_ip)
        if interface is not None:
            # Without this gloo resolves the host's name, which an offline machine may not know, and which
            # on a host with several networks may belong to another one than the nodes meet on.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._address = WorkerAddress(
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=node_ip,
            hostname=socket.gethostname(),
            log_file=None if log_file is None else str(log_file),
        )

    def address(self) -> WorkerAddress:
        return self._address

    def open_rendezvous(self) -> tuple[str, int]:
        """Take a free port on this node and keep it: called on rank 0, whose process group store will listen there.

        Returns:
            Host and port.
        """
        self._listener = socket.create_server((self._address.node_ip, 0), backlog=1024)
        return self._address.node_ip, self._listener.getsockname()[1]

    def start(
        self,
        worker_class: str | bytes,
        context: WorkerContext,
        rendezvous: tuple[str, int],
        own_objects: Mapping[str, bytes],
    ) -> dict[str, Registration]:
        """Import the class and build the worker; the methods it registers. ``own_objects``: the driver's
        :func:`roll.config.objects.pickles`."""
        # Until the end of the first call, which loads the model: imports make a million objects that stay, and looking
        # for garbage among them again and again is a quarter of the time that they take.
        gc.disable()
        try:
            host, port = rendezvous
            # Detached: the TCPStore owns the descriptor from here on, and the Python socket must not close it as well.
            listen_fd = self._listener.detach() if self._listener is not None else None
            context = dataclasses.replace(context, master_addr=host, master_port=port, listen_fd=listen_fd)
            os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
            # Before anything of the role is imported or logged, so that its keys never reach the worker's log.
            register_secrets(dataclasses.asdict(context.role))
            # Before the class is imported, which may look up objects that exist in the driver only (a notebook's own
            # reward).
            objects.adopt(own_objects)
            if self._calls_file is not None:
                self._times = CallTimes(self._calls_file, context)
            cls = load_worker_class(worker_class)
            self._worker = cls(context)
            registered = registrations(cls)
            if PROFILER_ENV in os.environ:
                self._profiled = {name for name, one in registered.items() if one.dispatch in _COMPUTING}
            return registered
        except Exception as error:
            raise _worker_raised(error) from None
        finally:
            self._has_started.set()

    def call(self, method: str, names: tuple[str, ...], *values: object) -> Any:
        """Run a method of the worker; the last ``len(names)`` values are its keyword arguments.

        Values are arguments of the call itself, not of a list, because Ray resolves top-level references only.
        """
        self._has_started.wait()  # another thread may still build the worker, where a role has several
        began = time.time()
        try:
            assert self._worker is not None, "the worker was not built: its log says why"
            positional = len(values) - len(names)
            kwargs = dict(zip(names, values[positional:], strict=True))
            with self._profiler.around(method) if method in self._profiled else nullcontext():
                return getattr(self._worker, method)(*values[:positional], **kwargs)
        except Exception as error:
            raise _worker_raised(error) from None
        finally:
            gc.enable()
            if self._times is not None:
                self._times.add(method, began, time.time())

    def rank_info(self) -> Any:
        assert self._worker is not None
        return self._worker.rank_info


def load_worker_class(worker_class: str | bytes) -> type[Worker]:
    """The class of a dotted path (``package.module.Class``) or a pickle of it. Raises ``ValueError``: the path leads to
    no subclass of :class:`Worker`."""
    if isinstance(worker_class, bytes):
        found = pickle.loads(worker_class)
    else:
        module, _, name = worker_class.rpartition(".")
        found = getattr(importlib.import_module(module), name, None) if module else None
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ValueError(
            f"worker class {worker_class!r}: must be the dotted path of a subclass of roll.distributed.Worker, "
            "for example roll.rollout.rewarding.RewardWorker"
        )
    return found


def _worker_raised(error: Exception) -> WorkerRaised:
    logger.error("a call failed", exc_info=error)
    text = ": ".join(filter(None, (type(error).__name__, str(error))))
    # Without the frames of this module, which are the same in each stack and say nothing about the failure.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    stack = "".join(traceback.format_list(frames[-_STACK_FRAMES:])).rstrip()
    return WorkerRaised(masked_text(text), masked_text(stack), time.time())


def _show_devices(local_devices: tuple[int, ...]) -> None:
    """Let this process see only these devices of its node; ids count the devices that the node itself may see."""
    for variable in VISIBLE_DEVICES:
        inherited = os.environ.get(variable)
        names = [part.strip() for part in inherited.split(",")] if inherited else None
        if names is not None and any(device >= len(names) for device in local_devices):
            raise ValueError(f"{variable}={inherited} on this node hides device {max(local_devices)}")
        os.environ[variable] = ",".join(names[device] if names else str(device) for device in local_devices)
