"""The scheduler of groups that are made ahead of their training step, while training goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from roll.config.plan.plan import RunAhead
from roll.datasets.types import PromptRow
from roll.rollout.flow import Ended, GroupFlow, Rejections
from roll.rollout.groups import AnyGroup, Group, Sample, Trajectory
from roll.rollout.loops import RolloutContext
from roll.rollout.routing import Generation


@dataclass(frozen=True)
class GroupCodec:
    """Prompts (or tasks) from their states, and the members of their groups."""

    item_from: Callable[[Mapping[str, Any]], Any]
    member_from: Callable[[Any, Mapping[str, Any]], Trajectory]  # takes the prompt or task


def prompt_codec(find: Callable[[str, str], PromptRow]) -> GroupCodec:
    """The codec of prompts; ``find`` gives one by its domain and its id, the mark of its epoch included."""
    return GroupCodec(lambda state: find(state["domain"], state["prompt_id"]), Sample.from_state)


@dataclass
class Ledger:
    """Groups since the run began. What was drawn and has not left in one of these ways is still held."""

    drawn: int = 0
    trained: int = 0
    filtered: int = 0  # rejected by ``query_filter_config``
    stale: int = 0  # given up because a token was older than training allows


@dataclass(eq=False)
class AsyncScheduler:
    """Begins groups as there is room for them, and hands out the groups of each step, the oldest first.

    :meth:`keep_going` runs in the background: groups continue, and others begin, whenever the event loop runs.
    """

    flow: GroupFlow
    ahead: RunAhead  # how many groups are begun, and how old they may become
    codec: GroupCodec  # reads what checkpoints hold
    num_steps: int  # of the run; no group is begun that none of them needs
    deadline: float  # seconds after which a wait in which nothing moves is given up
    in_flight: bool = True
    """Weights are exchanged while samples are partial, which then continue with the new ones; False: the samples in
    flight are finished first."""
    takes_turns: bool = False
    """Other roles have the engines' devices between two :meth:`collect`: what is partial when a step has its groups is
    taken back from the engines, and continues with the next step's weights."""
    ledger: Ledger = field(default_factory=Ledger, init=False)
    _recalled: list[Generation] = field(default_factory=list, init=False)
    _taken_at_version: int = field(default=0, init=False)
    _may_begin: bool = field(default=False, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ready: dict[int, tuple[AnyGroup, int]] = field(default_factory=dict, init=False)
    """Accepted groups, each with the version of its oldest token."""

    def __post_init__(self) -> None:
        self._engines = self.flow.engines
        self._rejections = Rejections(self.flow.settings.filter_key)

    async def keep_going(self) -> None:
        """Act on whatever becomes of groups, for as long as the run lasts.

        Raises:
            RolloutExhausted: filters rejected too many groups for each wanted one.
            Exception: of a loop, of the last engine, of a reward worker.
        """
        while True:
            self._absorb(await self.flow.progress())
            self._rejections.check(self.ahead.prompts_per_step, len(self._ready))
            self._fill()

    async def collect(self, step: int) -> list[AnyGroup]:
        """The groups that step ``step`` trains on, in the order in which they were drawn. Raises ``RolloutStalled``:
        nothing has moved for ``deadline`` seconds."""
        recalled, self._recalled = self._recalled, []
        self._engines.resubmit(recalled)
        await self._engines.resume()
        self._absorb(self.flow.take())
        # What is too old for this step, and so for all after it, is given up.
        stale = [order for order, (_, version) in self._ready.items() if self.ahead.is_too_old(version, step)]
        for order in stale:
            del self._ready[order]
        in_flight = self.flow.in_flight.values()
        unfinished = [context.order for context in in_flight if self.ahead.is_too_old(context.oldest, step)]
        await self.flow.abort(unfinished)
        self.ledger.stale += len(stale) + len(unfinished)
        self._may_begin = True
        self._fill()
        await self._wait_until(lambda: self._can_take(step))
        # Oldest first: `RunAhead.can_be_taken` counts on it when it promises that no held group becomes too old.
        by_age = sorted(self._ready, key=lambda order: (self._ready[order][1], order))
        taken = [self._ready.pop(order) for order in sorted(by_age[: self.ahead.prompts_per_step])]
        assert not any(self.ahead.is_too_old(version, step) for _, version in taken), "stale groups must have left"
        self.ledger.trained += len(taken)
        # They keep their room until the next exchange: groups begun in their place would still have these weights, and
        # be a step older when trained (arXiv 2505.24298, eq. 3).
        self._taken_at_version += len(taken)
        self._rejections = Rejections(self._rejections.key)
        if self.takes_turns:
            await self._take_back()
        else:
            self._fill()
            await self._engines.dispatched()  # the driver may compute for a while before the loop runs again
        return [group for group, _ in taken]

    async def pause(self) -> None:
        """Leave the engines without a turn in flight, for an exchange of weights; they begin again in
        :meth:`collect`."""
        self._may_begin = False
        # `_may_begin` is off by now: with new groups the flow would never run empty.
        if not self.in_flight:
            await self._wait_until(lambda: not self.flow.in_flight)
        await self._engines.pause()
        self._engines.readmit()

    def exchanged(self, version: int) -> None:
        self.flow.version = version
        self._taken_at_version = 0

    async def free_engines(self) -> None:
        """Free the engines for other requests, between an exchange and :meth:`collect`: what is in flight is recalled
        and continues afterwards."""
        await self._take_back()
        await self._engines.resume()

    def counts(self) -> dict[str, int]:
        """The ledger and where the rest is; ``drawn`` is the sum of the others."""
        scoring = sum(context.is_scoring for context in self.flow.in_flight.values())
        held = {"generating": len(self.flow.in_flight) - scoring, "scoring": scoring + len(self.flow.ended)}
        return asdict(self.ledger) | held | {"ready": len(self._ready)}

    async def state_dict(self) -> dict[str, Any]:
        """Everything that is held, unfinished samples with their tokens so far: plain values and arrays. The engines
        are interrupted for it, and continue."""
        # Recalled before the flow is absorbed: the turns that end for it may complete groups.
        recalled = await self._engines.recall()
        state = self.state_between_steps()
        self._engines.resubmit(recalled)
        return state

    def state_between_steps(self) -> dict[str, Any]:
        """Like :meth:`state_dict`, without a call to the engines: samples have what they had when an engine last got
        them."""
        self._absorb(self.flow.take())
        return {
            "ledger": asdict(self.ledger),
            "unfinished": [
                {"order": one.order, "version": one.version, "item": one.item.state_dict(), "progress": one.state()}
                for one in self.flow.in_flight.values()
            ],
            "complete": [
                group.state_dict() | {"order": order, "version": version}
                for order, (group, version) in self._ready.items()
            ],
        }

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; before the first :meth:`collect`."""
        # Until the first exchange the engines have the weights of the run's start: nothing may be sampled with those.
        self._engines.hold()
        self.ledger = Ledger(**state["ledger"])
        for entry in state["unfinished"]:
            item, order, version = self.codec.item_from(entry["item"]), int(entry["order"]), int(entry["version"])
            self.flow.begin(RolloutContext(self.flow, order, item, version, entry["progress"]))
        for entry in state["complete"]:
            item, order = self.codec.item_from(entry), int(entry["order"])
            group = Group(order, item, [self.codec.member_from(item, one) for one in entry["members"]])
            self._ready[order] = group, int(entry["version"])

    def check(self) -> None:
        """Assert that every drawn group has left once or is held in exactly one place."""
        counts = self.counts()
        assert counts.pop("drawn") == sum(counts.values()), counts

    def _can_take(self, step: int) -> bool:
        if len(self._ready) < self.ahead.prompts_per_step:
            return False
        ready = Counter(version for _, version in self._ready.values())
        unfinished = Counter(context.oldest for context in self.flow.in_flight.values())
        return self.ahead.can_be_taken(step, ready, unfinished)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            # No await lies between the check and this, so that no event is lost.
            self._changed.clear()
            await self.flow.watched(self._changed, self.deadline)

    async def _take_back(self) -> None:
        self._may_begin = False
        self._engines.hold()
        for _ in range(2):  # prompts begun just now have yet to submit their requests
            await asyncio.sleep(0)
        self._recalled += await self._engines.recall()
        await self._engines.pause()

    def _absorb(self, ended: Sequence[Ended]) -> None:
        for group, is_accepted, begun in ended:
            if is_accepted:
                versions = (version for one in group.members for version, _ in one.version_counts())
                # A group in which nothing was sampled is as old as its beginning.
                self._ready[group.order] = group, min(versions, default=begun)
            else:
                self.ledger.filtered += 1
                self._rejections.add(group)
        self._changed.set()

    def _fill(self) -> None:
        if not self._may_begin:
            return
        ahead, version = self.ahead, self.flow.version
        needed = (self.num_steps - version) * ahead.prompts_per_step + ahead.num_additional
        held = len(self.flow.in_flight) + len(self.flow.ended) + len(self._ready)
        count = min(ahead.capacity, needed) - self._taken_at_version - held
        if count > 0:
            self.ledger.drawn += self.flow.start(count)
