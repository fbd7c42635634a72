"""Base of every pipeline's rollout: the client of the policy's engines, the event loop, validation."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from asyncio import Task
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from roll.config.plan.plan import RolePlan
from roll.config.policy import PolicyRunConfig
from roll.distributed import Cluster, DriverLoop
from roll.methods.policy_plan import PolicyPlan
from roll.pipelines.sample_records import Notes
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.rollout.engines import SLICE_SECONDS, EngineClient
from roll.rollout.groups import GroupT
from roll.rollout.routing import build_router
from roll.rollout.scheduling import AsyncScheduler
from roll.tracking import SampleTable

ValidationT = TypeVar("ValidationT")


def engine_client(
    config: PolicyRunConfig,
    role: RolePlan,
    cluster: Cluster,
    slice_seconds: float,
    router: str | None,
    fixed_weights: bool = False,
) -> EngineClient:
    """The client of the engines of ``actor_infer``.

    Args:
        slice_seconds, fixed_weights: see :class:`~roll.rollout.engines.EngineClient`.
        router: name of the router where the configuration leaves it open.
    """
    keys, engines = config.router_args, config.actor_infer
    # A new process would load its model while others have the device, and threads would not wait for it.
    may_restart = not role.colocated_with and (engines.max_concurrency or 1) == 1
    return EngineClient(
        cluster,
        keys.max_running_requests or config.max_running_requests,
        slice_seconds,
        router=build_router(keys.router_name or router, keys.router_config),
        max_restarts=engines.max_restarts if may_restart else 0,
        turn_timeout=min(engines.engine_timeout, config.rpc_timeout),
        fixed_weights=fixed_weights,
    )


def between_turns(driver: DriverLoop, engines: EngineClient, transfer: Callable[[], Metrics]) -> Metrics:
    """Have ``transfer`` give the engines other weights while none of them has a turn in flight; lost engines that are
    back take part."""

    async def resume() -> None:
        engines.resume()

    driver.run(engines.pause())
    engines.readmit()
    metrics = transfer()
    driver.run(resume())
    return metrics


class EngineRollout(ABC, Generic[ValidationT]):
    """Has the policy's engines make the samples of a step.

    Everything that generates or scores is a coroutine on the event loop of the driver, which runs whenever the driver
    waits: for the samples of a step here, or for other roles.

    Args:
        slice_seconds: see :class:`~roll.rollout.engines.EngineClient`.
        router: name of the router where the configuration leaves it open.
    """

    def __init__(
        self,
        config: PolicyRunConfig,
        plan: PolicyPlan,
        actor_infer: Cluster,
        slice_seconds: float = SLICE_SECONDS,
        router: str | None = None,
    ) -> None:
        role = plan.roles["actor_infer"]
        self._engines = engine_client(config, role, actor_infer, slice_seconds, router)
        self._busy_before = 0.0
        self._validation: Task[ValidationT] | None = None
        self.notes: Callable[[], Notes] = list
        """Values of the last :meth:`collect`'s samples that its batch does not hold."""
        self.driver = DriverLoop()
        gc.freeze()  # modules, data and plans live as long as the run: no collection has to look through them

    @abstractmethod
    def collect(self, step: int) -> tuple[DataProto, Callable[[], SampleTable], Metrics]:
        """A step's samples as a batch, a function that tabulates them for people, and the metrics of the rollout."""

    @abstractmethod
    def validation(self) -> Coroutine[Any, Any, ValidationT]:
        """Answer and score everything that a validation asks."""

    def exchange(self, version: int, transfer: Callable[[], Metrics]) -> Metrics:
        """Bring the engines to ``version`` of the weights by ``transfer``, which needs them between two turns."""
        return between_turns(self.driver, self._engines, transfer)

    def validate(self) -> ValidationT:
        """Answer and score the prompts of every set, before anything else."""
        self.begin_validation()
        return self.finish_validation()

    def begin_validation(self) -> None:
        """Queue the prompts of every set after what the engines have to do. Call :meth:`finish_validation`
        before the next exchange of weights."""
        assert self._validation is None, "one validation at a time"
        self._validation = self.driver.spawn(self.validation())

    def finish_validation(self) -> ValidationT:
        """Wait for what :meth:`begin_validation` began."""
        assert self._validation is not None, "none was begun"
        validation = self.driver.run(self._validation)
        self._validation = None
        return validation

    def close(self) -> None:
        """Cancel what is in flight; before the clusters end."""
        self.driver.close()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain values and arrays."""

    def state_between_steps(self) -> dict[str, Any]:
        """Like :meth:`state_dict`, without interrupting the engines."""
        return self.state_dict()

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""

    def _size_metrics(self, samples: int, sampled: float, others: float) -> Metrics:
        """Samples and tokens of the step, and what the engines did since the last one."""
        busy = self._engines.busy_seconds - self._busy_before
        self._busy_before = self._engines.busy_seconds
        return {
            "system/samples": Mean(samples),
            "system/tokens": Mean(sampled + others),
            "system/actor_infer/response/tps_dp": Mean(sampled / busy if busy else 0.0),
        }

    def _loss_metrics(self) -> Metrics:
        """Engines that were lost, and requests that others took over, since the run began (or was continued)."""
        return {
            "scheduler/engines": Mean(self._engines.num_engines),
            "scheduler/engine_deaths": Mean(self._engines.num_deaths),
            "scheduler/reissued": Mean(self._engines.num_reissued),
        }


class RunsAhead(EngineRollout[ValidationT], Generic[ValidationT, GroupT]):
    """Asynchronous rollout, mixed into a pipeline's rollout phase: a scheduler makes groups while models learn."""

    _ahead: AsyncScheduler[GroupT]
    _filtered_key = "scheduler/filtered_query_count"
    """Metric of groups that filters rejected."""

    def _run_ahead(self, scheduler: AsyncScheduler[GroupT]) -> None:
        """Start ``scheduler``, which works whenever the driver waits."""
        self._ahead = scheduler
        self._ledger_before = scheduler.buffer.counts()
        self.driver.spawn(scheduler.keep_going())

    def exchange(self, version: int, transfer: Callable[[], Metrics]) -> Metrics:
        self.driver.run(self._ahead.pause())
        result = transfer()
        self._ahead.exchanged(version)
        return result

    def validate(self) -> ValidationT:
        """Like the base class, after the engines have been freed: what they have in flight continues afterwards."""
        self.driver.run(self._ahead.free_engines())
        return super().validate()

    def _collected_ahead(self, step: int) -> tuple[list[GroupT], Metrics]:
        """The step's groups, and metrics of the prompts drawn since the last step."""
        groups = self.driver.run(self._ahead.collect(step))
        before, now = self._ledger_before, self._ahead.buffer.counts()
        self._ledger_before = now
        return groups, {
            "scheduler/collect_query_count": Mean(now["drawn"] - before["drawn"]),
            "scheduler/query_use_count": Mean(len(groups)),
            self._filtered_key: Mean(now["filtered"] - before["filtered"]),
            "scheduler/stale_query_count": Mean(now["stale"] - before["stale"]),
            "scheduler/generating_query_count": Mean(now["generating"]),
            "scheduler/waiting_query_count": Mean(now["scoring"] + now["ready"]),
        }

    def _take_up(self, state: dict[str, Any]) -> None:
        """Continue with what was in flight; the checkpoint of a synchronous run has nothing in flight."""
        if "ahead" in state:
            self.driver.run(self._ahead.load_state_dict(state["ahead"]))
        self._ledger_before = self._ahead.buffer.counts()
