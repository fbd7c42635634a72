"""A role's workers as one object, whose ranks are called by naming a method of the worker class: arguments are
spread over the ranks, and what comes back is joined."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.config import objects
from roll.config.reading.errors import did_you_mean
from roll.config.roles import WorkerConfig
from roll.distributed import diagnosis
from roll.distributed.actor import WorkerActor, WorkerAddress
from roll.distributed.calls import PendingCall
from roll.distributed.dispatch import Collect, in_rank_order, spread
from roll.distributed.failures import RemoteError
from roll.distributed.ray_node import ray_lost
from roll.distributed.resources import Placement, ResourceManager
from roll.distributed.worker import Dispatch, Registration, Worker, WorkerContext
from roll.protocol.metrics import RankInfo

logger = logging.getLogger(__name__)

_CALL_FOR = {Dispatch.ONE_TO_ALL: "call_all", Dispatch.ALL_TO_ALL: "call_each"}

_ACTOR: Any = ray.remote(WorkerActor)  # one for all workers: each that is made is sent to the cluster anew
_START_SECONDS = 600.0
_FAREWELL_SECONDS = 20.0


P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Any, P], R]
"""A method of a worker class, as ``TrainWorker.step``; the class that a cluster runs may be any that has it."""


class Cluster:
    """The workers of a role.

    ``cluster.call(TrainWorker.step, batch, loss, epochs=2).result()`` calls the ranks that the method's dispatch mode
    addresses; arguments and result have the types that the method declares. :meth:`call` is for methods with a single
    result, :meth:`call_all` for methods with a result from every rank. A method is looked up by name in the class that
    the ranks run, which may be a subclass or any other class with such a method.
    """

    def __init__(
        self,
        name: str,
        worker_cls: str | type[Worker],
        resource_manager: ResourceManager,
        role: WorkerConfig,
        seed: int = 42,
        settings: object = None,
        rpc_timeout: float = 3600.0,
    ) -> None:
        """Start the workers; returns while they start, so that several clusters start concurrently.

        Args:
            worker_cls: Dotted path of the class (imported in the workers only) or the class.
            settings: Values that the workers need besides their role: an instance of the class's ``settings_class``.
            rpc_timeout: Seconds that a call may take unless the call or its registration says otherwise.

        Raises:
            ValueError: a device list that the resource manager refuses.
        """
        self.name = name
        self.role = role
        self.rpc_timeout = rpc_timeout
        self._resources = resource_manager
        self._placements = resource_manager.place(name, role)
        self.world_size = len(self._placements)
        self._seed, self._settings, self._target = seed, settings, _portable(worker_cls)
        self._closed = False
        self._start()

    def _start(self) -> None:
        self.workers = [self._create_actor(placement) for placement in self._placements]
        # Passed on as a reference: Ray resolves it in the workers, so the driver starts all ranks without waiting for
        # rank 0.
        rendezvous = self.workers[0].open_rendezvous.remote()
        started = {r: self._start_worker(r, actor, rendezvous) for r, actor in enumerate(self.workers)}
        self._addresses: list[WorkerAddress] = []
        addresses = {r: actor.address.remote() for r, actor in enumerate(self.workers)}
        self._address_call = self._pending("start", addresses, _START_SECONDS)
        self._start_call = self._pending("start", started, _START_SECONDS)
        self._registrations: dict[str, Registration] | None = None
        self._rank_infos: list[RankInfo] | None = None
        self._left_out: set[int] = set()
        self._replacements: dict[int, tuple[Any, ray.ObjectRef[WorkerAddress]]] = {}

    def start_again(self) -> None:
        """Replace all ranks of a cluster that computes together and has lost one: kill the others, and start new
        processes for all, in a new process group. They must be initialised as at the beginning."""
        for rank in self.live_ranks:
            self.leave_out(rank)
        self._start()

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}, {self.world_size} ranks)"

    def wait_ready(self) -> None:
        """Wait until every worker is built; every call does so implicitly. Raises ``WorkerFailed, WorkerDied,
        DeadlineExceeded``: a worker did not start; the method is named ``start``."""
        if self._registrations is None:
            # In place: calls in flight (the start itself) hold this very list, and name process and log of a failed
            # rank from it. Addresses come first since an actor has them before its worker class is imported.
            self._addresses[:] = self._address_call.result()
            self._registrations = self._start_call.result()[0]

    def leave_out(self, rank: int) -> None:
        """Continue without a rank that has died, failed or hangs: kill its process tree, and address later calls to the
        other ranks only. For workers that are independent of each other, such as engines."""
        if rank in self._left_out:
            return
        self._left_out.add(rank)
        # Before ray.kill(), which ends the actor's process only: an engine's own subprocesses would keep the device's
        # memory.
        diagnosis.on_node(self._addresses[rank], diagnosis.kill_process)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.workers[rank])

    def restart(self, rank: int) -> PendingCall:
        """Start a new process for a rank that was left out; nothing waits for it. It is not in a process group with the
        other ranks.

        Returns:
            The call of its ``initialize``. When that is done, :meth:`rejoin` lets it take part again.
        """
        assert rank in self._left_out, f"rank {rank} of {self.name} has not been left out"
        if rank in self._replacements:  # it could not be initialised, and may hold the memory of the device
            actor, address = self._replacements.pop(rank)
            with contextlib.suppress(ray.exceptions.RayError):  # it may not have come up
                diagnosis.on_node(ray.get(address, timeout=0), diagnosis.kill_process)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
        actor = self._create_actor(self._placements[rank])
        # A rendezvous of its own: the members of the first process group are fixed, and no new process can join it.
        self._start_worker(rank, actor, actor.open_rendezvous.remote())
        self._replacements[rank] = (actor, actor.address.remote())
        ref = actor.call.remote("initialize", ())
        return PendingCall(self.name, "initialize", {rank: ref}, self.rpc_timeout, [], lambda answers: answers[rank])

    def rejoin(self, rank: int) -> None:
        """Replace the rank's old process by the one that :meth:`restart` started, once that is initialised."""
        actor, address = self._replacements.pop(rank)
        self.workers[rank], self._addresses[rank] = actor, ray.get(address)
        self._left_out.remove(rank)

    @property
    def live_ranks(self) -> list[int]:
        """The ranks that have not been left out."""
        return [rank for rank in range(self.world_size) if rank not in self._left_out]

    @property
    def addresses(self) -> Sequence[WorkerAddress]:
        """Process, node and log file of every rank."""
        self.wait_ready()
        return self._addresses

    @property
    def rank_infos(self) -> list[RankInfo]:
        """The place of every rank; fetched from the workers once, on first use (so: after their model is built)."""
        if self._rank_infos is None:
            self.wait_ready()
            refs = {rank: actor.rank_info.remote() for rank, actor in enumerate(self.workers)}
            self._rank_infos = self._pending("rank_info", refs).result()
        return self._rank_infos

    @property
    def dp_size(self) -> int:
        """Data-parallel replicas."""
        return self.rank_infos[0].dp_size

    def call(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> PendingCall[R]:
        """Start a method with one result: of rank 0, or of data-parallel replicas, whose results are joined.

        A deadline other than the one of ``@register``, or the cluster's ``rpc_timeout``, is set by
        :meth:`PendingCall.within`. Raises ``AttributeError``: the worker class registers no such method; ``TypeError``:
        its dispatch mode is one of :meth:`call_all` or :meth:`call_each`.
        """
        modes = (Dispatch.RANK_ZERO, Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST)
        return self._call(method.__name__, modes, args, kwargs)

    def call_all(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> PendingCall[list[R]]:
        """Like :meth:`call`, for ``Dispatch.ONE_TO_ALL``: every rank gets the arguments; one result each, in order."""
        return self._call(method.__name__, (Dispatch.ONE_TO_ALL,), args, kwargs)

    def call_each(self, method: Callable[..., R], /, *args: object, **kwargs: object) -> PendingCall[list[R]]:
        """Like :meth:`call`, for ``Dispatch.ALL_TO_ALL``: arguments and result are lists with one entry a rank."""
        return self._call(method.__name__, (Dispatch.ALL_TO_ALL,), args, kwargs)

    def _call(
        self, method: str, modes: Sequence[Dispatch], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> PendingCall[Any]:
        registration = self._registered(method, modes)
        by_rank, collect = spread(registration, self.world_size, lambda: self.rank_infos, args, kwargs)
        assert not self._left_out or registration.dispatch is Dispatch.ONE_TO_ALL, "other ranks cannot do its part"
        refs = {rank: self._send(rank, method, *own) for rank, own in by_rank.items() if rank not in self._left_out}
        return self._pending(registration.name or method, refs, registration.deadline, collect)

    def _registered(self, method: str, modes: Sequence[Dispatch]) -> Registration:
        self.wait_ready()
        assert self._registrations is not None
        if method not in self._registrations:
            hint = did_you_mean(method, self._registrations, "; did you mean {!r}?")
            raise AttributeError(f"the workers of {self.name!r} register no method {method!r}{hint}")
        registration = self._registrations[method]
        if registration.dispatch not in modes:
            raise TypeError(
                f"{method!r} of {self.name!r} is registered with Dispatch.{registration.dispatch.name}: use "
                f"cluster.{_CALL_FOR.get(registration.dispatch, 'call')}"
            )
        return registration

    def call_once_built(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Callable[[], list[R]]:
        """Like :meth:`call_all`, without waiting until the workers are built: they run the method right afterwards.

        Returns:
            The wait for the results; it raises what :meth:`wait_ready` does. The deadline counts from when all are
            built.
        """
        refs = {rank: self._send(rank, method.__name__, args, kwargs) for rank in self.live_ranks}

        def results() -> list[R]:
            registration = self._registered(method.__name__, (Dispatch.ONE_TO_ALL,))
            return self._pending(registration.name or method.__name__, refs, registration.deadline).result()

        return results

    def submit(self, rank: int, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> PendingCall[R]:
        """Start any public method, registered or not, on one rank; arguments go as they are."""
        name = method.__name__
        assert not name.startswith("_"), f"{name} is not public"
        self.wait_ready()
        return self._pending(name, {rank: self._send(rank, name, args, kwargs)}, None, lambda answers: answers[rank])

    def ping(self, rank: int) -> PendingCall[WorkerAddress]:
        """An answer shows that the rank's worker is alive and idle."""
        self.wait_ready()
        ref = self.workers[rank].address.remote()
        return self._pending("ping", {rank: ref}, None, lambda answers: answers[rank])

    def shutdown(self, graceful: bool = True) -> None:
        """End the workers; a second call does nothing. ``graceful``: let them free what they hold and leave their
        process group first (for a bounded time). After a failure use False: a rank that hangs would not take part."""
        if self._closed:
            return
        self._closed = True
        # Every call to a Ray whose daemon is gone would look for it for a minute.
        if ray_lost() is not None:
            return
        if graceful:
            refs = {r: self._send(r, "shutdown", (), {}) for r in self.live_ranks}
            try:
                self._pending("shutdown", refs, _FAREWELL_SECONDS).result()
            except RemoteError as error:
                logger.warning("%s did not end in good order: %s", self.name, error)
        for actor in [*self.workers, *(actor for actor, _ in self._replacements.values())]:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _send(self, rank: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ray.ObjectRef[Any]:
        return self.workers[rank].call.remote(method, tuple(kwargs), *args, *kwargs.values())

    def _pending(
        self,
        method: str,
        refs: Mapping[int, ray.ObjectRef[Any]],
        deadline: float | None = None,
        collect: Collect | None = None,
    ) -> PendingCall:
        limit = deadline or self.rpc_timeout
        return PendingCall(self.name, method, refs, limit, self._addresses, collect or in_rank_order)

    def _start_worker(self, rank: int, actor: Any, rendezvous: object) -> Any:
        place = self.name, self.role, rank, self.world_size, self._placements[rank].device_ids
        context = WorkerContext(*place, seed=self._seed, settings=self._settings)
        return actor.start.remote(self._target, context, rendezvous, objects.pickles())

    def _create_actor(self, placement: Placement) -> Any:
        worker_name = f"{self.name}-{placement.rank}"
        environment = {
            "RANK": str(placement.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": "0",
            "CLUSTER_NAME": self.name,
            "WORKER_NAME": worker_name,
        }
        options: dict[str, Any] = {
            # Devices are given out by this project (lists may overlap), so the actor itself asks Ray for nothing.
            "num_cpus": 0,
            "num_gpus": 0,
            # An actor that Ray restarted by itself would have neither its model nor its place in the process group.
            "max_restarts": 0,
            "max_concurrency": self.role.max_concurrency or 1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._resources.placement_group, placement_group_bundle_index=placement.bundle
            ),
        }
        if variables := {**self._resources.system_envs, **self.role.system_envs}:
            options["runtime_env"] = {"env_vars": variables}
        return _ACTOR.options(**options).remote(worker_name, environment, placement.local_devices)


def _portable(worker_cls: str | type[Worker]) -> str | bytes:
    """A class as its dotted path, so that it is imported under the worker's environment; by value where the class is
    not importable (a notebook's or script's own)."""
    if isinstance(worker_cls, str):
        return worker_cls
    if worker_cls.__module__ == "__main__" or "<locals>" in worker_cls.__qualname__:
        return bytes(ray.cloudpickle.dumps(worker_cls))
    return f"{worker_cls.__module__}.{worker_cls.__qualname__}"
