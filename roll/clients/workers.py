"""The processes of a configuration for the length of a ``with`` block."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future as ThreadFuture
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pkgutil import resolve_name
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from roll.api import Config, Overrides, load_config, obeying_signals, refuse_restarts
from roll.config.loader import LoadedConfig
from roll.config.reading.errors import ConfigError, Problem
from roll.distributed import Cluster, DriverLoop, ResourceManager
from roll.methods.policy_plan import PolicyPlan
from roll.methods.supervised import SupervisedDefinition, SupervisedPlan
from roll.pipelines.clusters import Clusters, ClusterStarter
from roll.pipelines.engine_rollout import engine_client
from roll.pipelines.files import load_tokenizer, pad_token_id
from roll.pipelines.model_calls import Residency
from roll.pipelines.rows import build_models, start_models
from roll.pipelines.run_context import RunContext
from roll.preflight import ready
from roll.rollout.engines import SLICE_SECONDS
from roll.rollout.engines import EngineClient as Engines
from roll.strategies.base import StateKind
from roll.weight_sync.sender import WeightSync, sync_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


R = TypeVar("R")
Needs = Mapping[str, frozenset[StateKind]]  # by role, the states that a call must find on its devices


@dataclass(eq=False)
class Future(Generic[R]):
    """The result of a call that is under way; awaitable in a coroutine, :meth:`result` anywhere else."""

    _future: ThreadFuture[R]

    def result(self, timeout: float | None = None) -> R:
        """Wait for the result.

        Args:
            timeout: seconds; None: as long as the call's own deadline (``rpc_timeout``).

        Raises:
            TimeoutError: not done in time; the call goes on.
            RemoteError: a worker has failed or died.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """True if :meth:`result` returns (or raises) at once."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, R]:
        return asyncio.wrap_future(self._future).__await__()


class CallLoop:
    """An event loop in a thread of its own, which all calls of the clients run on: they go on whatever the program
    does meanwhile, in Jupyter as well."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="calls", daemon=True)
        self._under_way: set[ThreadFuture[Any]] = set()

    def _serve(self) -> None:
        driver = DriverLoop(self._loop)
        self._loop.run_forever()
        driver.close()

    def begin(self, call: Coroutine[Any, Any, R]) -> Future[R]:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return Future(future)

    @contextmanager
    def running(self) -> Iterator[None]:
        """At the end of the block wait for what is under way; where the block fails, cancel it."""
        self._thread.start()
        try:
            yield
            # A copy: calls leave the set as they end.
            for future in list(self._under_way):
                future.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


@dataclass(eq=False)
class Turns:
    """Turns of roles that share devices: a call waits until the calls that need other states there are done."""

    _residency: Residency
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _present: Needs = field(default_factory=dict)
    _users: int = 0

    @asynccontextmanager
    async def needing(self, needs: Needs) -> AsyncIterator[None]:
        """Keep these states on their devices for the length of the block."""
        needs = {role: states for role, states in needs.items() if self._residency.moves(role)}
        if not needs:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._users or self._present == needs)
            if not self._users:
                # Under the lock: no call may start while states are moving.
                await asyncio.to_thread(self._residency.bring, needs)
            self._present, self._users = needs, self._users + 1
        try:
            yield
        finally:
            async with self._changed:
                self._users -= 1
                self._changed.notify_all()


logger = logging.getLogger(__name__)

POLICY, ENGINES = "actor_train", "actor_infer"


class _Context(RunContext):
    """The lifetime of a run whose steps are somebody else's."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._tracker.log(metrics, step)

    def describe_end(self) -> None:
        self._describe(outcome="finished")

    def _account(self) -> str:
        return f"the workers of {self.plan.exp_name} have ended"


class Workers:
    """The models of a configuration, each in its processes, for the length of a ``with`` block.

    Of a pipeline that samples (RLVR, agents, on-policy distillation) these are policy, engines, and what the algorithm
    needs of other models; of one on given rows, the role that learns and the one that does not.
    Rewards and environments are the loop's. The output folder has a run's log, metrics (:meth:`log`) and report.
    """

    def __init__(self, config: Config, overrides: Overrides = ()) -> None:
        """
        Args:
            config, overrides: see :func:`roll.load_config`.

        Raises:
            ConfigError: a configuration that cannot run; nothing has started.
        """
        self.loaded: LoadedConfig[Any] = ready(partial(load_config, config, overrides), logger.warning)
        self.config = self.loaded.config
        self.plan: Any = self.loaded.plan
        """Of the pipeline's own class, such as :class:`roll.pipelines.rlvr.config.RLVRPlan`."""
        refuse_restarts(self.loaded)
        if not isinstance(self.plan, PolicyPlan | SupervisedPlan):
            rule = "trains no model: a loop needs the configuration of a pipeline that does"
            raise ConfigError([Problem("pipeline", self.loaded.pipeline.name, rule, "rlvr")])
        if self.config.resume_from_checkpoint:
            rule = "has no effect on a loop of one's own: call TrainClient.load in it"
            raise ConfigError([Problem("resume_from_checkpoint", self.config.resume_from_checkpoint, rule, False)])
        if self.plan.max_steps is None:
            raise ConfigError([Problem("max_steps", None, "is needed: the learning rate's schedule ends there", 100)])
        self._context = _Context(self.loaded)
        self.calls = CallLoop()
        self._clusters: dict[str, Cluster] = {}
        self._stack = ExitStack()
        self.versions = itertools.count()
        """Of the weights that engines get."""
        self.orders: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By role: calls hold it one after the other, in the order in which they were begun."""

    def __enter__(self) -> Self:
        self._stack.enter_context(self._running())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with obeying_signals(self.loaded), self._context.running() as resources:
            self._residency = Residency(self.plan, self.config.is_offload_states)
            self.turns = Turns(self._residency)
            self._start(resources)
            # Inside the context: calls under way need the workers, which end with it.
            with self.calls.running():
                yield
            self._context.describe_end()

    def _start(self, resources: ResourceManager) -> None:
        if isinstance(self.plan, PolicyPlan):
            starter = ClusterStarter(self.config, self.plan, resources)
            started = Clusters(**starter.start_computing(), **starter.start_engines()).all()
            self._context.watch(started)
            starter.begin(self._residency)
            starter.finish(self._residency)
        else:
            assert isinstance(self.loaded.pipeline, SupervisedDefinition) and self.plan.max_steps is not None
            method = resolve_name(self.loaded.pipeline.method_class)(self.loaded)
            method.open()
            learner, frozen = start_models(self.loaded, method, resources)
            started = [learner] if frozen is None else [learner, frozen]
            self._context.watch(started)
            build_models(learner, frozen, self.plan.max_steps, self._residency)
        self._clusters = {cluster.name: cluster for cluster in started}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model that learns."""
        role = self.plan.roles[self.loaded.pipeline.reading_role()]
        return load_tokenizer(role.model_path, role.section.model_args.trust_remote_code)

    @property
    def pad_token_id(self) -> int:
        """Fills rows up."""
        return pad_token_id(self.tokenizer)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Give a step's metrics to the trackers of the configuration (``track_with``)."""
        self._context.log(metrics, step)

    def cluster(self, role: str, generates: bool) -> Cluster:
        """The processes of a role.

        Raises:
            ValueError: there is no such role among those that generate, or among those that do not.
        """
        names = [name for name in self._clusters if (name == ENGINES) == generates]
        if role not in names:
            known = ", ".join(names) or "none here; they start in the block of `with roll.Workers(...) as workers:`"
            kind = "generates" if generates else "computes or learns"
            raise ValueError(f"role {role!r} must be one that {kind}: {known}")
        return self._clusters[role]

    @cached_property
    def engines(self) -> Engines:
        """The engines of ``actor_infer`` as one, for all clients."""
        role = self.plan.roles[ENGINES]
        return engine_client(self.config, role, self._clusters[ENGINES], SLICE_SECONDS, None)

    @cached_property
    def weight_sync(self) -> WeightSync:
        """Carries the policy's weights to the engines."""
        options = sync_options(self.config, self.config.weight_sync, self.config.actor_infer, self.plan)
        return WeightSync(self._clusters[POLICY], self._clusters[ENGINES], options)
