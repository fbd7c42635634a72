"""A role's workers as one object: calling a registered method of it calls the ranks."""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.config.roles import WorkerConfig
from roll.distributed import diagnosis
from roll.distributed.actor import WorkerActor, WorkerAddress
from roll.distributed.calls import PendingCall
from roll.distributed.dispatch import RankArguments, spread
from roll.distributed.failures import RemoteError
from roll.distributed.ray_node import ray_lost
from roll.distributed.resources import Placement, ResourceManager
from roll.distributed.worker import Dispatch, Registration, Worker, WorkerContext
from roll.protocol.rank import RankInfo

logger = logging.getLogger(__name__)

_START_SECONDS = 600.0
_FAREWELL_SECONDS = 20.0


class RemoteMethod:
    """A registered method of a cluster's workers."""

    def __init__(self, cluster: Cluster, method: str) -> None:
        self._cluster = cluster
        self._method = method

    def __call__(self, *args: Any, blocking: bool = True, deadline: float | None = None, **kwargs: Any) -> Any:
        """Call the ranks.

        Args:
            blocking: False returns a :class:`PendingCall` at once.
            deadline: Seconds for this call; None: what ``@register`` says, else the cluster's ``rpc_timeout``.

        Raises:
            AttributeError: the worker class registers no such method.
            WorkerFailed, WorkerDied, DeadlineExceeded: see :class:`PendingCall` (blocking calls).
        """
        call = self._cluster.call(self._method, args, kwargs, deadline)
        if not blocking:
            return call
        if self._cluster.meanwhile is not None:
            self._cluster.meanwhile(call)
        return call.result()


class Cluster:
    """The workers of a role. Registered methods of the worker class are methods of the cluster."""

    def __init__(
        self,
        name: str,
        worker_cls: str | type[Worker],
        resource_manager: ResourceManager,
        role: WorkerConfig,
        seed: int = 42,
        extra: Mapping[str, Any] | None = None,
        rpc_timeout: float = 3600.0,
    ) -> None:
        """Start the workers; returns while they start, so that several clusters start side by side.

        Args:
            worker_cls: Dotted path of the class (imported in the workers only) or the class.
            extra: Handed to every worker in its context; must be picklable.
            rpc_timeout: Seconds that a call may take unless the call or its registration says otherwise.

        Raises:
            ValueError: a device list that the resource manager refuses.
        """
        self.name = name
        self.meanwhile: Callable[[PendingCall], None] | None = None
        """What the caller does until a blocking call is answered, in place of waiting idly."""
        self.role = role
        self.rpc_timeout = rpc_timeout
        self._resources = resource_manager
        self._placements = resource_manager.place(name, role)
        self.world_size = len(self._placements)
        self._seed, self._extra, self._target = seed, dict(extra or {}), _portable(worker_cls)
        self.workers = [self._create_actor(placement) for placement in self._placements]
        rendezvous = self.workers[0].open_rendezvous.remote()
        started = {r: self._start_worker(r, actor, rendezvous) for r, actor in enumerate(self.workers)}
        self._addresses: list[WorkerAddress] = []
        self._address_call = self._pending("start", {r: a.address.remote() for r, a in enumerate(self.workers)})
        self._start_call = self._pending("start", started)
        self._registrations: dict[str, Registration] | None = None
        self._rank_infos: list[RankInfo] | None = None
        self._closed = False
        self._left_out: set[int] = set()
        self._replacements: dict[int, tuple[Any, ray.ObjectRef[WorkerAddress]]] = {}

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}, {self.world_size} ranks)"

    def __getattr__(self, method: str) -> RemoteMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return RemoteMethod(self, method)

    def wait_ready(self) -> None:
        """Wait until every worker is built; every call does so by itself.

        Raises:
            WorkerFailed, WorkerDied, DeadlineExceeded: a worker did not start; the method is named ``start``.
        """
        if self._registrations is None:
            self._addresses[:] = self._address_call.result()
            self._registrations = self._start_call.result()[0]

    def leave_out(self, rank: int) -> None:
        """Go on without a rank that has died, failed or hangs: its process is killed with all that it started, calls to
        all ranks go to the others. For workers that have nothing to do with one another, such as engines."""
        if rank in self._left_out:
            return
        self._left_out.add(rank)
        diagnosis.kill_process(self._addresses[rank])
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.workers[rank])

    def restart(self, rank: int) -> PendingCall:
        """Start a new process for a rank that was left out; nothing waits for it. It is not in a process group with the
        other ranks.

        Returns:
            The call of its ``initialize``. When that is done, :meth:`rejoin` lets it take part again.
        """
        assert rank in self._left_out, f"rank {rank} of {self.name} has not been left out"
        actor = self._create_actor(self._placements[rank])
        self._start_worker(rank, actor, actor.open_rendezvous.remote())
        self._replacements[rank] = (actor, actor.address.remote())
        ref = actor.call.remote("initialize", ())
        return PendingCall(self.name, "initialize", {rank: ref}, self.rpc_timeout, [], lambda answers: answers[rank])

    def rejoin(self, rank: int) -> None:
        """Let the process that :meth:`restart` started, and that is ready, take the place of the old one."""
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
        """Where every rank stands; asked of the workers once, on first use (so: after their model is built)."""
        if self._rank_infos is None:
            self.wait_ready()
            refs = {rank: actor.rank_info.remote() for rank, actor in enumerate(self.workers)}
            self._rank_infos = self._pending("rank_info", refs).result()
        return self._rank_infos

    @property
    def dp_size(self) -> int:
        """Data-parallel replicas."""
        return self.rank_infos[0].dp_size

    def call(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], deadline: float | None = None
    ) -> PendingCall:
        """Start a registered method on the ranks that its dispatch mode addresses."""
        registration = self._registration(method)
        call = spread(registration, self.world_size, lambda: self.rank_infos, args, kwargs)
        assert not self._left_out or registration.dispatch is Dispatch.ONE_TO_ALL, "other ranks cannot do its part"
        present = {rank: arguments for rank, arguments in call.arguments.items() if rank not in self._left_out}
        refs = {rank: self._send(rank, method, arguments) for rank, arguments in present.items()}
        limit = deadline or registration.deadline or self.rpc_timeout
        return self._pending(registration.name or method, refs, limit, call.collect)

    def submit(self, rank: int, method: str, *args: Any, deadline: float | None = None, **kwargs: Any) -> PendingCall:
        """Start any public method, registered or not, on one rank; arguments go as they are."""
        assert not method.startswith("_"), f"{method} is not public"
        self.wait_ready()
        ref = self._send(rank, method, RankArguments(args, kwargs))
        return self._pending(method, {rank: ref}, deadline, lambda answers: answers[rank])

    def shutdown(self, graceful: bool = True) -> None:
        """End the workers; a second call does nothing.

        Args:
            graceful: Let them free what they hold and leave their process group first (for a bounded time). After a
                failure use False: a rank that hangs would not take part.
        """
        if self._closed:
            return
        self._closed = True
        if ray_lost() is not None:
            return
        if graceful:
            refs = {r: self._send(r, "shutdown", RankArguments((), {})) for r in self.live_ranks}
            try:
                self._pending("shutdown", refs, _FAREWELL_SECONDS).result()
            except RemoteError as error:
                logger.warning("%s did not end in good order: %s", self.name, error)
        for actor in [*self.workers, *(actor for actor, _ in self._replacements.values())]:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _registration(self, method: str) -> Registration:
        self.wait_ready()
        assert self._registrations is not None
        if method not in self._registrations:
            near = difflib.get_close_matches(method, self._registrations, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"the workers of {self.name!r} register no method {method!r}{hint}")
        return self._registrations[method]

    def _send(self, rank: int, method: str, arguments: RankArguments) -> ray.ObjectRef[Any]:
        names = tuple(arguments.kwargs)
        return self.workers[rank].call.remote(method, names, *arguments.args, *arguments.kwargs.values())

    def _pending(
        self,
        method: str,
        refs: Mapping[int, ray.ObjectRef[Any]],
        deadline: float | None = None,
        collect: Any = None,
    ) -> PendingCall:
        limit = deadline or (_START_SECONDS if method == "start" else self.rpc_timeout)
        in_order = collect or (lambda answers: [answers[rank] for rank in sorted(answers)])
        return PendingCall(self.name, method, refs, limit, self._addresses, in_order)

    def _start_worker(self, rank: int, actor: Any, rendezvous: Any) -> Any:
        context = WorkerContext(
            cluster_name=self.name,
            role=self.role,
            rank=rank,
            world_size=self.world_size,
            device_ids=self._placements[rank].device_ids,
            seed=self._seed,
            extra=self._extra,
        )
        return actor.start.remote(self._target, context, rendezvous)

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
            "max_restarts": 0,
            "max_concurrency": self.role.max_concurrency or 1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._resources.placement_group, placement_group_bundle_index=placement.bundle
            ),
        }
        if self.role.system_envs:
            options["runtime_env"] = {"env_vars": dict(self.role.system_envs)}
        actor_class = ray.remote(WorkerActor).options(**options)
        return actor_class.remote(worker_name, environment, placement.local_devices)


def _portable(worker_cls: str | type[Worker]) -> str | bytes:
    """A class as its dotted path, so that it is imported under the worker's environment; by value where the class is
    not importable (a notebook's or script's own)."""
    if isinstance(worker_cls, str):
        return worker_cls
    if worker_cls.__module__ == "__main__" or "<locals>" in worker_cls.__qualname__:
        return bytes(ray.cloudpickle.dumps(worker_cls))
    return f"{worker_cls.__module__}.{worker_cls.__qualname__}"
