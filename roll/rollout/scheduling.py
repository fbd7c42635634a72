"""The scheduler of groups that are made ahead of their training step, while training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic

from roll.rollout.engines import EngineClient, Generation
from roll.rollout.flow import GroupFlow, Progress, Rejections
from roll.rollout.groups import GroupT, ItemT
from roll.rollout.replay import ReplayBuffer


class AsyncScheduler(Generic[ItemT, GroupT]):
    """Begins groups as the buffer has room for them, and hands out the groups of each step.

    :meth:`keep_going` runs in the background: groups continue, and others begin, whenever the event loop runs.

    Args:
        num_steps: steps of the run; no group is begun that none of them needs.
        deadline: seconds after which a wait in which nothing moves is given up.
        in_flight: weights are exchanged while samples are partial, which then continue with the new ones; False: the
            samples in flight are finished first.
        takes_turns: other roles have the engines' devices between two :meth:`collect`: what is partial when a step has
            its groups is taken back from the engines, and continues with the next step's weights.
        rejected_by: key of the configuration that the groups' filter comes from, for messages.
    """

    def __init__(
        self,
        engines: EngineClient,
        flow: GroupFlow[ItemT, GroupT],
        buffer: ReplayBuffer[ItemT, GroupT],
        num_steps: int,
        deadline: float,
        in_flight: bool = True,
        takes_turns: bool = False,
        rejected_by: str = "query_filter_config",
    ) -> None:
        self._engines = engines
        self._flow = flow
        self._num_steps = num_steps
        self._deadline = deadline
        self._in_flight = in_flight
        self._takes_turns = takes_turns
        self._recalled: list[Generation] = []
        self._version = 0
        self._taken_at_version = 0
        self._may_begin = False
        self._rejections = Rejections(rejected_by)
        self._changed = asyncio.Event()
        self.buffer = buffer

    async def keep_going(self) -> None:
        """Act on whatever becomes of groups, for as long as the run lasts.

        Raises:
            RolloutExhausted: filters rejected too many groups for each wanted one.
            Exception: of a loop, of the last engine, of a reward worker.
        """
        while True:
            self._absorb(await self._flow.progress())
            self._fill()

    async def collect(self, step: int) -> list[GroupT]:
        """The groups that step ``step`` trains on, in the order in which they were drawn.

        Raises:
            RolloutStalled: nothing has moved for ``deadline`` seconds.
        """
        recalled, self._recalled = self._recalled, []
        self._engines.resubmit(recalled)
        await self._engines.resume()
        self._absorb(self._flow.take())
        # After the flow was absorbed: a group complete there but "generating" here would be dropped, and its event
        # would find no entry later.
        await self._flow.abort(self.buffer.drop_stale(step))
        self._may_begin = True
        self._fill()
        await self._wait_until(lambda: self.buffer.can_take(step))
        groups = self.buffer.take(step)
        # They keep their room until the next exchange: groups begun in their place would still have these weights, and
        # be a step older when trained (arXiv 2505.24298, eq. 3).
        self._taken_at_version += len(groups)
        self._rejections = Rejections(self._rejections.key)
        if self._takes_turns:
            await self._take_back()
        else:
            self._fill()
            await self._engines.dispatched()  # the driver may compute for a while before the loop runs again
        return groups

    async def pause(self) -> None:
        """Leave the engines without a turn in flight, for an exchange of weights; they begin again in
        :meth:`collect`."""
        self._may_begin = False
        # `_may_begin` is off by now: with new groups the flow would never run empty.
        if not self._in_flight:
            await self._wait_until(lambda: not self._flow.in_flight)
        await self._engines.pause()
        self._engines.readmit()

    def exchanged(self, version: int) -> None:
        """The engines have the weights of ``version``."""
        self._version = version
        self._taken_at_version = 0

    async def free_engines(self) -> None:
        """Free the engines for other requests, between an exchange and :meth:`collect`: what is in flight is recalled
        and continues afterwards."""
        await self._take_back()
        await self._engines.resume()

    async def state_dict(self) -> dict[str, Any]:
        """Everything that is held, unfinished samples with their tokens so far: plain values and arrays. The engines
        are interrupted for it, and continue."""
        # Recalled before the flow is absorbed: the turns that end for it may complete groups.
        recalled = await self._engines.recall()
        self._absorb(self._flow.take())
        state = self.state_between_steps()
        self._engines.resubmit(recalled)
        return state

    def state_between_steps(self) -> dict[str, Any]:
        """Like :meth:`state_dict`, without a call to the engines: samples have what they had when an engine last got
        them."""
        known = self._flow.progress_state()
        nothing = self.buffer.codec.no_progress
        return self.buffer.state_dict({order: known.get(order, nothing) for order in self.buffer.generating})

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; before the first :meth:`collect`."""
        # Until the first exchange the engines have the weights of the run's start: nothing may be sampled with those.
        self._engines.hold()
        self._flow.resume(*self.buffer.load_state_dict(state))

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            # No await lies between the check and this, so that no event is lost.
            self._changed.clear()
            await self._flow.watched(self._changed, self._deadline)

    async def _take_back(self) -> None:
        """Leave the engines without work."""
        self._may_begin = False
        self._engines.hold()
        for _ in range(2):  # prompts begun just now have yet to submit their requests
            await asyncio.sleep(0)
        self._recalled += await self._engines.recall()
        await self._engines.pause()

    def _absorb(self, progress: Progress[GroupT]) -> None:
        for group in progress.generated:
            self.buffer.generated(group)
        for group in progress.accepted:
            self.buffer.scored(group, accepted=True)
        for group in progress.rejected:
            if self.buffer.scored(group, accepted=False):
                self._rejections.add(group)
        if progress.rejected:
            self._rejections.check(self.buffer.ahead.prompts_per_step, self.buffer.num_ready)
        self._changed.set()

    def _fill(self) -> None:
        """Begin as many groups as there is room for."""
        if not self._may_begin:
            return
        ahead = self.buffer.ahead
        needed = (self._num_steps - self._version) * ahead.prompts_per_step + ahead.num_additional
        count = min(ahead.capacity, needed) - self._taken_at_version - self.buffer.num_held
        if count > 0:
            for drawn in self._flow.start(count):
                self.buffer.begin(drawn, self._version)
