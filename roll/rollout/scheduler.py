"""Collects the samples of a training step: prompts to engines, samples to rewards, groups through filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roll.distributed import PendingCall
from roll.rollout.engines import EnginePool
from roll.rollout.filters import GroupFilter
from roll.rollout.flow import DrawPrompts, GroupFlow, GroupSettings, Rejections
from roll.rollout.groups import SampleGroup
from roll.rollout.loops import RolloutLoop, make_flow
from roll.rollout.rewarding import RewardRouter
from roll.strategies.engines.requests import SamplingParams


@dataclass
class RolloutResult:
    """Groups in the order in which their prompts were drawn, and what it took to get them."""

    groups: list[SampleGroup]
    num_drawn: int = 0
    num_filtered: int = 0
    num_aborted: int = 0
    rejected_mean_scores: list[float] = field(default_factory=list)


class RolloutScheduler:
    """Keeps engines and reward workers busy until enough groups have been accepted.

    Args:
        seed: see :class:`~roll.rollout.flow.GroupSettings`.
        deadline: seconds after which a step without any progress is given up (with a report of who did not answer).
    """

    def __init__(self, engines: EnginePool, rewards: RewardRouter, seed: int, deadline: float) -> None:
        self._engines = engines
        self._rewards = rewards
        self._seed = seed
        self._deadline = deadline

    def collect(
        self,
        draw: DrawPrompts,
        num_prompts: int,
        group_size: int,
        params: SamplingParams,
        first_draw: int,
        filters: Mapping[str, GroupFilter] | None = None,
        num_additional: int = 0,
        loop: RolloutLoop | None = None,
    ) -> RolloutResult:
        """Generate and score ``group_size`` samples for each of ``num_prompts`` prompts.

        Args:
            first_draw: how many prompts the run has drawn before; continues the count of draws.
            filters: by domain; a rejected group is replaced by another prompt's.
            num_additional: prompts to run beyond the need at any moment, so that a rejected group is replaced by one
                that is under way already; the first to finish count, the rest is aborted.
            loop: what becomes of each prompt; None: its samples are generated and scored.

        Raises:
            RolloutExhausted: more than ``MAX_DRAWS_PER_WANTED`` groups for each wanted one were rejected by filters or
                could not be scored.
        """
        settings = GroupSettings(group_size, params, self._seed, filters or {})
        flow = make_flow(self._engines, self._rewards, draw, settings, first_draw, loop)
        collection = Collection(flow, num_prompts, num_additional)
        while not collection.complete:
            collection.advance(flow.wait(self._deadline))
        result = collection.finish()
        self._rewards.drop_pending()
        self._engines.drain(self._deadline)
        return result


class Collection:
    """``wanted`` groups of a flow that somebody drives: begun when it is made, and :attr:`complete` when it has all of
    them or there are no more. See :meth:`RolloutScheduler.collect`."""

    def __init__(self, flow: GroupFlow, wanted: int, additional: int = 0) -> None:
        self._flow = flow
        self._wanted = wanted
        self._additional = additional
        self._first_draw = flow.next_order
        self._accepted: list[SampleGroup] = []
        self._rejections = Rejections()
        flow.start(wanted + additional)

    @property
    def complete(self) -> bool:
        nothing_left = self._flow.dry and not self._flow.num_under_way
        return len(self._accepted) >= self._wanted or nothing_left

    def advance(self, done: Sequence[PendingCall]) -> None:
        """Act on calls that are done."""
        progress = self._flow.advance(done)
        self._accepted += progress.accepted
        for group in progress.rejected:
            self._rejections.add(group)
        missing = self._wanted - len(self._accepted) - self._flow.num_under_way
        if progress.rejected and missing + self._additional > 0 and not self.complete:
            self._rejections.check(self._wanted, len(self._accepted))
            self._flow.start(missing + self._additional)

    def finish(self) -> RolloutResult:
        """Abort what is not needed any more and return the accepted groups in order of drawing."""
        surplus = max(0, len(self._accepted) - self._wanted)
        num_under_way = self._flow.num_under_way
        self._flow.abort()
        return RolloutResult(
            groups=sorted(self._accepted[: self._wanted], key=lambda group: group.order),
            num_drawn=self._flow.next_order - self._first_draw,
            num_filtered=self._rejections.count,
            num_aborted=num_under_way + surplus,
            rejected_mean_scores=self._rejections.mean_scores,
        )
