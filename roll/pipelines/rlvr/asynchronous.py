"""The rollout phase of a run whose engines generate while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from roll.config.plan.plan import RunAhead
from roll.distributed import PendingCall
from roll.pipelines.rlvr.clusters import Clusters
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.data import RunData
from roll.pipelines.rlvr.plan import RLVRPlan
from roll.pipelines.rlvr.rollout import RolloutPhase
from roll.pipelines.rlvr.validation import Validation
from roll.protocol.metrics import Max, Mean, Metrics
from roll.rollout.asynchronous import AsyncScheduler
from roll.rollout.flow import GroupSettings
from roll.rollout.groups import SampleGroup
from roll.rollout.loops import make_flow
from roll.rollout.replay import ReplayBuffer


class AsyncRolloutPhase(RolloutPhase):
    """As :class:`RolloutPhase`, ahead of training by up to ``async_generation_ratio`` steps."""

    def __init__(self, config: RLVRConfig, plan: RLVRPlan, clusters: Clusters, data: RunData) -> None:
        super().__init__(config, plan, clusters, data)
        settings = GroupSettings(plan.group_size, self._params, config.seed, self._filters)
        ahead = RunAhead.of(plan.async_generation_ratio, plan.prompts_per_step, plan.num_additional_prompts)
        self._flow = make_flow(self._engines, self._rewards, data.sampler.next_batch, settings, 0, self._loop)
        self._ahead = AsyncScheduler(
            self._engines,
            self._flow,
            ReplayBuffer(ahead),
            config.max_steps,
            config.rpc_timeout,
            in_flight=config.partial_rollout,
            takes_turns=plan.engines_take_turns,
        )
        self._counts_before = self._ahead.buffer.counts()

    def exchange(self, version: int, transfer: Callable[[], Metrics]) -> Metrics:
        return self._ahead.exchange(version, transfer)

    @property
    def _is_at_work(self) -> bool:
        return True

    def _work(self, timeout: float | None, others: Sequence[PendingCall] = ()) -> list[PendingCall]:
        """Generation and scoring go on, a validation beside them."""
        return self._advanced(self._ahead.work(timeout, [*others, *self._validation_calls()]))

    def validate(self) -> Validation:
        """With the engines free for it: what they are at work on goes on afterwards."""
        with self._ahead.engines_free():
            return super().validate()

    def _groups_of(self, step: int) -> tuple[list[SampleGroup], Metrics]:
        groups = self._ahead.collect(step)
        before, now = self._counts_before, self._ahead.buffer.counts()
        self._counts_before = now
        return groups, {
            "scheduler/collect_query_count": Mean(now["drawn"] - before["drawn"]),
            "scheduler/query_use_count": Mean(len(groups)),
            "scheduler/filtered_query_count": Mean(now["filtered"] - before["filtered"]),
            "scheduler/stale_query_count": Mean(now["stale"] - before["stale"]),
            "scheduler/generating_query_count": Mean(now["generating"]),
            "scheduler/waiting_query_count": Mean(now["scoring"] + now["ready"]),
        } | staleness_metrics(groups, step)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and arrays. Engines are interrupted for it and go on at once."""
        ahead = self._ahead.state_dict()
        self.num_drawn = self._flow.next_order
        return super().state_dict() | {"ahead": ahead}

    def state_between_steps(self) -> dict[str, Any]:
        """As :meth:`state_dict`, without a word to the engines: their samples begin anew."""
        self.num_drawn = self._flow.next_order
        return super().state_dict() | {"ahead": self._ahead.state_between_steps()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._flow.next_order = self.num_drawn
        if "ahead" in state:  # not in the checkpoint of a synchronous run
            self._ahead.load_state_dict(state["ahead"], self._data.sampler.find)
        self._counts_before = self._ahead.buffer.counts()


def staleness_metrics(groups: Sequence[SampleGroup], step: int) -> Metrics:
    """How many steps the weights that sampled are behind those that are trained, by sample and by token."""
    samples = [spans for group in groups for spans in group.finished.weight_versions]
    oldest = np.array([step - spans[0][0] for spans in samples])
    lags = np.array([(step - version, end - start) for spans in samples for version, start, end in spans])
    tokens = float(lags[:, 1].sum())
    return {
        "scheduler/version_lag/mean": Mean(float((lags[:, 0] * lags[:, 1]).sum()), tokens),
        "scheduler/version_lag/max": Max(float(oldest.max())),
        "scheduler/off_policy_ratio": Mean(float((oldest > 0).sum()), len(oldest)),
        "scheduler/partial_ratio": Mean(float(sum(len(spans) > 1 for spans in samples)), len(samples)),
    }
