"""The rollout phase of every pipeline whose policy learns from its own samples, synchronous or ahead of training."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from asyncio import Task
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.checkpoint.contents import CheckpointMismatchError
from roll.config.plan.plan import RolePlan, RunAhead
from roll.config.run import PolicyRunConfig
from roll.distributed import Cluster, DriverLoop
from roll.methods.policy_plan import PolicyPlan
from roll.pipelines.sample_records import Notes
from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean, Metrics
from roll.rollout.engines import EngineClient
from roll.rollout.flow import GroupFlow, collected
from roll.rollout.routing import build_router
from roll.rollout.scheduling import AsyncScheduler, GroupCodec
from roll.tracking import SampleTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Validation:
    """Results of a validation."""

    metrics: dict[str, float]
    groups: dict[str, list[Any]]  # groups of each set's first pass, by the set's name
    seconds: float  # from the first prompt to the last score


def engine_client(
    config: PolicyRunConfig,
    role: RolePlan,
    cluster: Cluster,
    slice_seconds: float,
    router: str | None,
    fixed_weights: bool = False,
) -> EngineClient:
    """The client of the engines of ``actor_infer``; ``router``: its name where the configuration leaves it open."""
    keys, engines = config.router_args, config.actor_infer
    # A new process would load its model while others have the device, and threads would not wait for it.
    may_restart = not role.colocated_with and (engines.max_concurrency or 1) == 1
    return EngineClient(
        cluster,
        config.max_running_requests,
        slice_seconds,
        router=build_router(keys.router_name or router, keys.router_config),
        max_restarts=engines.max_restarts if may_restart else 0,
        turn_timeout=min(engines.engine_timeout, config.rpc_timeout),
        fixed_weights=fixed_weights,
    )


def between_turns(driver: DriverLoop, engines: EngineClient, transfer: Callable[[], Metrics]) -> Metrics:
    """Have ``transfer`` give the engines other weights while none of them has a turn in flight; lost engines that are
    back take part."""
    driver.run(engines.pause())
    engines.readmit()
    metrics = transfer()
    driver.run(engines.resume())
    return metrics


class RolloutSource(ABC):
    """Origin of a pipeline's groups, and what is made of them: all that differs between rollouts."""

    flow: GroupFlow
    codec: GroupCodec
    tokenizer: PreTrainedTokenizerBase
    filtered_metric = "scheduler/filtered_query_count"  # metric of groups that filters rejected

    @abstractmethod
    def connect(self, engines: EngineClient) -> None:
        """Make the flow on the engines, on top of data and clusters."""

    @abstractmethod
    def batch(self, groups: list[Any], driver: DriverLoop) -> tuple[DataProto, Metrics]:
        """The samples of a step as a batch, and their metrics; ``driver`` runs whatever has to be generated besides."""

    @abstractmethod
    def table(self, groups: Sequence[Any]) -> SampleTable:
        """Samples for people."""

    @abstractmethod
    def notes(self, groups: Sequence[Any]) -> Notes:
        """Values of samples that their batch does not hold."""

    @abstractmethod
    def validation(self) -> Coroutine[Any, Any, Validation]:
        """Answer and score everything that a validation asks."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values beyond the number of draws."""
        return {}

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken; it holds ``num_drawn``, too."""

    def close(self, driver: DriverLoop) -> None:
        """End whatever it has started, and the loop; a second call does nothing."""
        driver.close()


class EngineRollout:
    """Has the policy's engines make the samples of a step.

    Everything that generates or scores is a coroutine on the event loop of the driver, which runs whenever the driver
    waits: for the samples of a step here, or for other roles. With ``async_generation_ratio`` above 0 a scheduler
    makes groups of later steps there while models learn; else a step's groups are begun in :meth:`collect`.
    """

    def __init__(self, config: PolicyRunConfig, plan: PolicyPlan, engines: EngineClient, source: RolloutSource) -> None:
        self._config, self._plan, self._engines, self._source = config, plan, engines, source
        self._busy_before = 0.0
        self._counts_before: Counter[str] = Counter()
        self._validation: Task[Validation] | None = None
        # Values of the last samples that their batch does not hold; none of a batch that was recorded.
        self.notes: Callable[[], Notes] = list
        self.driver = DriverLoop()
        self._ahead: AsyncScheduler | None = None
        if plan.is_async:
            ahead = RunAhead.of(plan.async_generation_ratio, plan.prompts_per_step, plan.num_additional_prompts)
            self._ahead = AsyncScheduler(
                source.flow,
                ahead,
                source.codec,
                config.max_steps,
                config.rpc_timeout,
                in_flight=config.partial_rollout,
                takes_turns=plan.engines_take_turns,
            )
            self._ledger_before = self._ahead.counts()
            self.driver.spawn(self._ahead.keep_going())
        gc.freeze()  # modules, data and plans live as long as the run: no collection has to look through them

    def collect(self, step: int) -> tuple[DataProto, Callable[[], SampleTable], Metrics]:
        """A step's samples as a batch, a function that tabulates them for people, and the metrics of the rollout."""
        groups, metrics = self._collected() if self._ahead is None else self._collected_ahead(self._ahead, step)
        busy = self._engines.busy_seconds - self._busy_before
        self._busy_before = self._engines.busy_seconds
        counts, self._counts_before = self._engines.counts - self._counts_before, Counter(self._engines.counts)
        if drafts := counts["drafts"]:
            accepted = float(counts["accepted_tokens"])
            metrics["engine/draft_acceptance_rate"] = Mean(accepted, counts["drafted_tokens"])
            metrics["engine/accepted_per_draft"] = Mean(accepted, drafts)
        batch, more = self._source.batch(groups, self.driver)
        tokens, sampled = (float(batch.batch[name].sum()) for name in ("attention_mask", "response_mask"))
        metrics |= {
            "system/samples": Mean(len(batch)),
            "system/tokens": Mean(tokens),
            "system/actor_infer/response/tps_dp": Mean(sampled / busy if busy else 0.0),
            # Engines that were lost, and requests that others took over, since the run began (or was continued).
            "scheduler/engines": Mean(self._engines.num_engines),
            "scheduler/engine_deaths": Mean(self._engines.num_deaths),
            "scheduler/reissued": Mean(self._engines.num_reissued),
        }
        self.notes = partial(self._source.notes, groups)
        return batch, partial(self._source.table, groups), metrics | more

    def _collected(self) -> tuple[list[Any], Metrics]:
        """Groups that are begun for this step; the engines have nothing left to do afterwards."""
        # Set again: a validation since the last step kept the engines busy, which is not time of this step's tokens.
        self._busy_before = self._engines.busy_seconds
        plan, source = self._plan, self._source
        count, additional, deadline = plan.prompts_per_step, plan.num_additional_prompts, self._config.rpc_timeout
        result = self.driver.run(collected(source.flow, count, additional, deadline))
        # Engines drop aborted requests at their next turn: without one these would stay in their KV caches.
        self.driver.run(self._engines.drain())
        return result.groups, {
            "scheduler/collect_query_count": Mean(result.num_drawn),
            "scheduler/query_use_count": Mean(len(result.groups)),
            source.filtered_metric: Mean(result.num_filtered),
            "scheduler/aborted_query_count": Mean(result.num_aborted),
        }

    def _collected_ahead(self, scheduler: AsyncScheduler, step: int) -> tuple[list[Any], Metrics]:
        """Groups that were begun up to some steps ago, and metrics of those drawn since the last step."""
        groups = self.driver.run(scheduler.collect(step))
        before, now = self._ledger_before, scheduler.counts()
        self._ledger_before = now
        counts: Metrics = {
            "scheduler/collect_query_count": Mean(now["drawn"] - before["drawn"]),
            "scheduler/query_use_count": Mean(len(groups)),
            self._source.filtered_metric: Mean(now["filtered"] - before["filtered"]),
            "scheduler/stale_query_count": Mean(now["stale"] - before["stale"]),
            "scheduler/generating_query_count": Mean(now["generating"]),
            "scheduler/waiting_query_count": Mean(now["scoring"] + now["ready"]),
        }
        samples = [one.version_counts() for group in groups for one in group.members]
        return groups, counts | staleness_metrics(samples, step)

    def exchange(self, version: int, transfer: Callable[[], Metrics]) -> Metrics:
        """Bring the engines to ``version`` of the weights by ``transfer``, which needs them between two turns."""
        if self._ahead is None:
            self._source.flow.version = version
            return between_turns(self.driver, self._engines, transfer)
        self.driver.run(self._ahead.pause())
        metrics = transfer()
        self._ahead.exchanged(version)
        return metrics

    def validate(self) -> Validation:
        """Answer and score the prompts of every set, before anything else: what the engines have in flight continues
        afterwards."""
        if self._ahead is not None:
            self.driver.run(self._ahead.free_engines())
        self.begin_validation()
        return self.finish_validation()

    def begin_validation(self) -> None:
        """Queue the prompts of every set after what the engines have to do. Call :meth:`finish_validation`
        before the next exchange of weights."""
        assert self._validation is None, "one validation at a time"
        self._validation = self.driver.spawn(self._source.validation())

    def finish_validation(self) -> Validation:
        """Wait for what :meth:`begin_validation` began."""
        assert self._validation is not None, "none was begun"
        validation, self._validation = self.driver.run(self._validation), None
        return validation

    def close(self) -> None:
        """Cancel what is in flight; before the clusters end."""
        self._source.close(self.driver)

    def state_dict(self, interrupt: bool = True) -> dict[str, Any]:
        """Plain values and arrays. Engines that run ahead are interrupted for it, and continue at once; without
        ``interrupt`` samples are as an engine last reported them."""
        state = {"num_drawn": self._source.flow.next_order, **self._source.state_dict()}
        if self._ahead is None:
            return state
        ahead = self.driver.run(self._ahead.state_dict()) if interrupt else self._ahead.state_between_steps()
        return {**state, "ahead": ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken; the checkpoint of a synchronous run has nothing in flight. Raises
        ``CheckpointMismatchError``: another version of this package wrote the groups that were in flight."""
        self._source.flow.next_order = int(state["num_drawn"])
        self._source.load_state_dict(state)
        if self._ahead is not None:
            if "ahead" in state:
                try:
                    self.driver.run(self._ahead.load_state_dict(state["ahead"]))
                except (KeyError, TypeError) as error:
                    raise CheckpointMismatchError(
                        f"the groups in flight of this checkpoint have a form that is not known here ({error!r}): "
                        "go on with the version of roll that wrote it, or start a new run from the model that it "
                        "exported (pretrain)"
                    ) from error
            self._ledger_before = self._ahead.counts()


def staleness_metrics(samples: Sequence[Sequence[tuple[int, int]]], step: int) -> Metrics:
    """Steps by which the weights that sampled are older than those that are trained, by sample and by token, from the
    versions of each sample (or episode), each with its number of tokens."""
    sampled = [versions for versions in samples if versions]  # a sample without tokens has none
    oldest = np.array([step - min(version for version, _ in versions) for versions in sampled])
    lags = np.array([(step - version, count) for versions in sampled for version, count in versions])
    return {
        "scheduler/version_lag/mean": Mean(float((lags[:, 0] * lags[:, 1]).sum()), float(lags[:, 1].sum())),
        "scheduler/version_lag/max": Max(float(oldest.max())),
        "scheduler/off_policy_ratio": Mean(float((oldest > 0).sum()), len(oldest)),
        "scheduler/partial_ratio": Mean(float(sum(len(versions) > 1 for versions in sampled)), len(sampled)),
    }
