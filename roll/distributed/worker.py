"""The base class of everything that runs in a cluster's processes, and how its methods are called through a cluster."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from roll.config.roles import WorkerConfig
from roll.platforms import current_platform

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from roll.protocol.metrics import RankInfo


logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "_roll_registration"
_FAREWELL_SECONDS = 10.0


class Dispatch(StrEnum):
    """Distribution of a call's arguments to the ranks of a cluster, and collection of their results."""

    ONE_TO_ALL = "one_to_all"  # every rank gets the same arguments; a list with one result a rank
    ALL_TO_ALL = "all_to_all"  # every argument is a list with one entry a rank; a list with one result a rank
    RANK_ZERO = "rank_zero"  # only rank 0 is called; its result
    DP_MP_COMPUTE = "dp_mp_compute"
    """Every DataProto is divided into a chunk for each data-parallel replica, which all its ranks get; other
    arguments go to all. The results of each replica's data-source rank, in order, become one
    (:func:`roll.distributed.cluster.joined`)."""
    DP_MP_DISPATCH_FIRST = "dp_mp_dispatch_first"
    """Like DP_MP_COMPUTE, but only the first rank of a replica gets the chunk; the others get a DataProto without
    columns (``meta_info`` only), for methods that pass the data on themselves."""


Columns = tuple[str, ...] | Callable[..., tuple[str, ...]]


@dataclass(frozen=True)
class Registration:
    """Decorator of a worker method: makes it callable on its cluster, with its arguments spread and its results joined
    as ``dispatch`` says. Raises ``ValueError``: ``columns`` given to a mode that ships arguments as they are, or a
    deadline that is not positive."""

    dispatch: Dispatch
    columns: Columns | None = None
    """The columns of DataProto arguments that the method reads; nothing else is shipped. A column that the batch lacks
    is skipped without an error. A function receives the call's arguments and returns the names. None ships all."""
    deadline: float | None = None  # seconds that a call may take; None: the cluster's `rpc_timeout`
    name: str | None = None  # the method's name in error messages; None: its own

    def __post_init__(self) -> None:
        if self.columns is not None and self.dispatch not in (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST):
            raise ValueError(f"columns go with a data-parallel dispatch, not with {self.dispatch.name}: leave them out")
        if self.deadline is not None and self.deadline <= 0:
            raise ValueError(f"deadline must be positive seconds, got {self.deadline}")

    def __call__(self, method: F) -> F:
        setattr(method, _ATTRIBUTE, self)
        return method


register = Registration


def registrations(cls: type) -> dict[str, Registration]:
    """The registered methods of a worker class by name; an override without ``@register`` keeps its base's mark."""
    found = {}
    for attribute, _ in inspect.getmembers(cls, callable):
        for owner in cls.__mro__:
            registration = getattr(owner.__dict__.get(attribute), _ATTRIBUTE, None)
            if registration is not None:
                found[attribute] = registration
                break
    return found


BEAT_SECONDS = 0.05
_TASKS = Path("/proc/self/task")


class Effort:
    """Time that a process needs for its own part of work in which ranks wait for each other.

    By the wall clock all of them are equally slow. Processor time tells them apart where one computes more than the
    others. Where one is slowed down it says nothing: whose processor others use, who is throttled by a container's
    quota or stopped (SIGSTOP, a frozen container, a paused virtual machine) computes as much as its peers. So three
    times are added up: that of the processor, that of waiting for one (Linux counts it by thread, in
    ``/proc/<pid>/schedstat``), and that in which even a thread with nothing to do did not wake up. Waiting for a peer
    is none of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delays = self._run_queue_seconds()
        self._stalled = self._held_up = 0.0
        self._beat_at = time.monotonic(), time.process_time()
        threading.Thread(target=self._beat, daemon=True, name="effort").start()

    def seconds(self) -> float:
        """Processor time of all threads, and what held the process up besides."""
        with self._lock:
            delays = self._run_queue_seconds()
            # Threads that wait for processors at the same time wait once.
            waited = max((own - self._delays.get(task, 0.0) for task, own in delays.items()), default=0.0)
            self._delays = delays
            self._note_beat()
            self._held_up += max(waited, self._stalled)
            self._stalled = 0.0
            return time.process_time() + self._held_up

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with self._lock:
                self._note_beat()

    def _note_beat(self) -> None:
        before, worked_before = self._beat_at
        now, worked = self._beat_at = time.monotonic(), time.process_time()
        # A call that keeps Python's lock keeps the thread from waking up too, but computes.
        lost = now - before - BEAT_SECONDS - (worked - worked_before)
        if lost > BEAT_SECONDS:
            self._stalled += lost

    def _run_queue_seconds(self) -> dict[str, float]:
        """Seconds that each thread was runnable without a processor; empty where the kernel does not count them."""
        found = {}
        for entry in _TASKS.glob("*/schedstat"):
            with suppress(OSError, IndexError):  # the thread has ended, or the kernel counts nothing
                found[entry.parent.name] = int(entry.read_text().split()[1]) / 1e9
        return found


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in its cluster, and its configuration."""

    cluster_name: str
    role: WorkerConfig
    rank: int
    world_size: int
    device_ids: tuple[int, ...] = ()
    """Logical ids of this worker's devices, as written in ``device_mapping``; empty for a CPU-only role."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # the port at which rank 0 serves the rendezvous of the process group
    listen_fd: int | None = None
    """On rank 0: the listening socket of ``master_port``, taken when the actor started so that nobody else can."""
    seed: int = 42
    settings: Any = None  # values from the pipeline besides the role (:attr:`Worker.settings_class`)

    @property
    def worker_name(self) -> str:
        return f"{self.cluster_name}-{self.rank}"


class Worker:
    """One process of a cluster. Subclasses add registered methods; heavy imports belong into those."""

    settings_class: ClassVar[type | None] = None
    """A frozen dataclass; a class that has one declares the type of ``settings`` as well."""
    settings: Any  # those of the context, or the defaults of :attr:`settings_class`

    def __init__(self, context: WorkerContext) -> None:
        kind = self.settings_class
        if context.settings is not None and not (kind is not None and isinstance(context.settings, kind)):
            takes = "none" if kind is None else kind.__name__
            raise TypeError(
                f"{context.cluster_name}: {type(self).__name__} was started with settings of the type "
                f"{type(context.settings).__name__}; it takes {takes}"
            )
        self.context = context
        self.settings = kind() if context.settings is None and kind is not None else context.settings
        self._store: Store | None = None
        self._effort: Effort | None = None

    @property
    def rank_info(self) -> RankInfo:
        """The place of this rank; plain data parallelism unless a subclass's strategy knows better."""
        from roll.protocol.metrics import RankInfo

        rank, world_size = self.context.rank, self.context.world_size
        return RankInfo(rank=rank, world_size=world_size, dp_rank=rank, dp_size=world_size)

    def init_process_group(self) -> None:
        """Collective. Join the cluster's ``torch.distributed`` group; a second call does nothing.

        The backend is the platform's; a collective that takes longer than the role's ``backend_timeout`` (minutes)
        raises.
        """
        if self._store is not None:
            return
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore

        context, platform = self.context, current_platform()
        timeout = timedelta(minutes=context.role.backend_timeout)
        place = context.master_addr, context.master_port, context.world_size, context.rank == 0, timeout
        # A store of our own instead of init_method="env://": rank 0 hands over the socket that it has listened on since
        # the actor's start, so no other process can take the port in between.
        self._store = TCPStore(*place, master_listen_fd=context.listen_fd)
        if platform.device_type != "cpu":
            # 0 is the first of this worker's own devices: the actor has hidden all others (CUDA_VISIBLE_DEVICES).
            platform.set_device(0)
        dist.init_process_group(
            platform.process_group_backend,
            # A prefix keeps torch's keys apart from those that shutdown() counts with.
            store=PrefixStore("default", self._store),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timeout,
        )
        logger.info("process group of %d ranks on %s", context.world_size, platform.collective_backend)

    @register(Dispatch.ONE_TO_ALL)
    def peak_memory(self) -> int:
        """Peak bytes since the last call of this method (or the start of the process)."""
        platform = current_platform()
        peak = platform.memory_stats()["peak"]
        platform.reset_peak_memory()
        return peak

    @register(Dispatch.ONE_TO_ALL)
    def effort_seconds(self) -> float:
        """Seconds that this process has worked, or was kept from working (:class:`Effort`)."""
        if self._effort is None:
            self._effort = Effort()
        return self._effort.seconds()

    def close(self) -> None:
        """Hook: free what the worker holds; called once, before its process ends in good order."""

    def shutdown(self) -> None:
        """Collective. End in good order: :meth:`close`, then leave the process group together with the other ranks."""
        self.close()
        if self._store is None:
            return
        import torch.distributed as dist

        # All ranks arrive before any leaves, else gloo's threads may abort a peer that is still in the group; and
        # rank 0, which serves the store, leaves last. A count in the store works on every backend.
        self._count_in("leaving")
        dist.destroy_process_group()
        if self.context.rank == 0:
            self._count_in("left")
        else:
            self._store.add("left", 1)
        self._store = None

    def _count_in(self, key: str) -> None:
        assert self._store is not None
        # Bounded: a rank that has died never arrives, and the end of a run must not hang for it.
        give_up = time.monotonic() + _FAREWELL_SECONDS
        arrived = self._store.add(key, 1)
        while arrived < self.context.world_size and time.monotonic() < give_up:
            time.sleep(0.01)
            arrived = self._store.add(key, 0)
