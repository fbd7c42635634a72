"""Groups in flight: a coroutine each, from being drawn to being accepted or rejected; a step collects its own."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from roll.config.roles import GeneratingArguments
from roll.datasets.types import PromptRow
from roll.rollout.engines import EngineClient
from roll.rollout.groups import UNSCORED, AnyGroup, Group
from roll.rollout.loops import GroupSettings, RolloutContext, RolloutLoop, SingleTurn
from roll.rollout.rewarding import RewardClient
from roll.strategies.engines.requests import SamplingParams

if TYPE_CHECKING:
    from roll.agents.episode import Task

MAX_DRAWS_PER_WANTED = 50
CANCELLED_SECONDS = 30.0
"""Time for the coroutine of a group to end after it has been cancelled."""


class RolloutExhausted(RuntimeError):
    """So many groups were rejected by filters, or could not be scored, that a step cannot be filled."""


class RolloutStalled(RuntimeError):
    """Nothing has moved for as long as a call may take, though groups are in flight."""


@dataclass
class Rejections:
    """Rejections by filters, and the reason why nothing else may come.

    Args:
        key: key of the configuration that the filter comes from.
    """

    key: str
    count: int = 0
    mean_scores: list[float] = field(default_factory=list)
    last_error: str | None = None

    def add(self, group: AnyGroup) -> None:
        self.count += 1
        self.mean_scores.append(group.mean_score())
        self.last_error = group.error or self.last_error

    def check(self, wanted: int, accepted: int) -> None:
        """
        Raises:
            RolloutExhausted: more than ``MAX_DRAWS_PER_WANTED`` rejected groups for each wanted one.
        """
        if self.count <= MAX_DRAWS_PER_WANTED * wanted:
            return
        so_far = f"{self.count} groups while {wanted} were wanted and {accepted} accepted"
        scores = [score for score in self.mean_scores if not math.isnan(score)]
        if not scores:
            raise RolloutExhausted(
                f"no sample could be scored in {so_far}; the last failure: {self.last_error}. Check the reward "
                "and the columns that it reads."
            )
        raise RolloutExhausted(
            f"{self.key} rejected {so_far}; mean scores of rejected groups: {min(scores):.3f} to "
            f"{max(scores):.3f}. Loosen the filter's thresholds, or check the reward and the task's difficulty."
        )


class Ended(NamedTuple):
    """A group whose coroutine has ended."""

    group: AnyGroup
    is_accepted: bool
    version: int
    """The weights that it was begun with."""


class GroupFlow:
    """Groups in flight: a coroutine each, which a rollout loop begins.

    Args:
        rewards: score the samples of prompts; None: a loop brings the rewards itself.
        draw: gives the next n prompts or tasks, or fewer when there are no more.
        first_draw: how many were drawn before; continues the count of draws.
        loop: makes a group of each; None: :class:`~roll.rollout.loops.SingleTurn`.
    """

    def __init__(
        self,
        engines: EngineClient,
        rewards: RewardClient | None,
        draw: Callable[[int], Sequence[PromptRow | Task]],
        settings: GroupSettings,
        first_draw: int = 0,
        loop: RolloutLoop | None = None,
    ) -> None:
        self.engines = engines
        self.rewards = rewards
        self.settings = settings
        self.in_flight: dict[asyncio.Task[Ended], RolloutContext] = {}
        """Groups that are not accepted or rejected yet."""
        self.ended: list[Ended] = []
        """Groups since the last :meth:`take`, in the order of their ends."""
        self.counts: Counter[str] = Counter()
        """Numbers of the loop's, since the beginning."""
        self.next_order = first_draw
        self.version = 0
        """The weights that groups are begun with."""
        self.exhausted = False
        """There is nothing more to draw."""
        self._draw = draw
        self._loop = loop or SingleTurn()
        self._name = f"{type(self._loop).__name__}.answer"
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def start(self, count: int) -> int:
        """Draw ``count`` times and begin a group for each; return how many, fewer where there is no more."""
        items = self._draw(count)
        self.exhausted = self.exhausted or len(items) < count
        for item in items:
            self.begin(RolloutContext(self, self.next_order, item, self.version))
            self.next_order += 1
        return len(items)

    def begin(self, context: RolloutContext) -> None:
        """Run the coroutine of a group."""
        task = asyncio.create_task(self._run(context))
        self.in_flight[task] = context
        task.add_done_callback(self._end)

    def take(self) -> list[Ended]:
        """The groups that have ended since the last call; an error remains for :meth:`progress`."""
        if self._error is None:
            self._changed.clear()
        ended, self.ended = self.ended, []
        return ended

    async def progress(self, deadline: float = math.inf) -> list[Ended]:
        """Wait until something ends, then as :meth:`take`: what ends in one pass of the loop comes together.

        Raises:
            RolloutStalled: see :meth:`watched`.
            Exception: of a group's coroutine.
        """
        await self.watched(self._changed, deadline)
        if self._error is not None:
            raise self._error
        return self.take()

    async def watched(self, event: asyncio.Event, deadline: float) -> None:
        """Wait for ``event``.

        Raises:
            RolloutStalled: nothing has moved for ``deadline`` seconds.
        """
        while not event.is_set():
            moved = self._moves()
            try:
                async with asyncio.timeout(None if deadline == math.inf else deadline):
                    await event.wait()
            except TimeoutError:
                # Long responses finish no group for minutes, but their engines end turns all the while.
                if moved == self._moves():
                    raise RolloutStalled(self._stall_message(deadline)) from None

    async def abort(self, orders: Iterable[int] | None = None) -> None:
        """Cancel these groups (None: all), wait until their coroutines have ended, and forget them."""
        unwanted = None if orders is None else set(orders)
        tasks = [task for task, begun in self.in_flight.items() if unwanted is None or begun.order in unwanted]
        for task in tasks:
            # Before the cancellation: `_end` takes the cancellation of a group that it still knows for an error.
            del self.in_flight[task]
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CANCELLED_SECONDS)
            if late:
                raise RuntimeError(f"{self._name} goes on {CANCELLED_SECONDS:g} s after it was cancelled: {late}")

    async def _run(self, context: RolloutContext) -> Ended:
        try:
            group: AnyGroup | None = await self._loop.answer(context.item, context)
        finally:
            context.calls.abort()
        if group is None:
            return Ended(Group(context.order, context.item, []), False, context.version)
        size, members = self.settings.group_size, group.members
        scored = sum(one.reward is not UNSCORED for one in members)
        if not len(members) == scored == size or group.order != context.order:
            raise ValueError(
                f"{self._name} gave a group of {len(members)} samples with {scored} rewards; it must have {size} of "
                "each: use context.group and context.compute_rewards"
            )
        is_kept = any(one.is_sampled for one in members) and self.settings.keeps(group)
        return Ended(group, is_kept, context.version)

    def _end(self, task: asyncio.Task[Ended]) -> None:
        begun = self.in_flight.pop(task, None)
        error: BaseException | None = None
        if task.cancelled():
            error = RuntimeError(f"{self._name} was cancelled by something that it awaits")
        else:
            # Read even where the group was aborted: asyncio logs an exception that nobody has looked at.
            error = task.exception()
        if begun is None:
            return  # aborted: nobody waits for it
        if error is not None:
            self._error = self._error or error
        else:
            self.ended.append(task.result())
        self._changed.set()

    def _moves(self) -> tuple[int, int, int]:
        """Numbers that change when anything moves."""
        scored = 0 if self.rewards is None else self.rewards.num_calls
        return self.engines.num_turns, scored, self.counts.total()

    def _stall_message(self, seconds: float) -> str:
        """The message of a stalled rollout: how many groups wait, and where the first of them do."""
        lines = [f"no group, engine or reward has moved for {seconds:g} s; {len(self.in_flight)} groups are in flight"]
        for task, begun in list(self.in_flight.items())[:3]:
            outer: Any = task.get_coro()
            frame = getattr(outer.cr_await, "cr_frame", None) or outer.cr_frame  # of the loop, if it is in it
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "its end"
            label = ", ".join(map(str, list(begun.item.state_dict().values())[:2]))
            lines.append(f"  group {begun.order} ({label}) waits at {place}")
        return "\n".join(lines)


@dataclass
class RolloutResult:
    """Groups in the order in which they were drawn, and what it took to get them."""

    groups: list[Any]
    num_drawn: int = 0
    num_filtered: int = 0
    num_aborted: int = 0


async def collected(
    flow: GroupFlow,
    count: int,
    num_additional: int,
    deadline: float,
) -> RolloutResult:
    """``count`` groups of ``flow``, or all that there are; the rest is aborted.

    Args:
        num_additional: groups to run beyond the need at any moment, so that a rejected one is replaced by one
            that is in flight already.
        deadline: seconds after which a wait in which nothing moves is given up.

    Raises:
        RolloutExhausted: more than ``MAX_DRAWS_PER_WANTED`` groups for each wanted one were rejected.
        RolloutStalled: nothing has moved for ``deadline`` seconds.
        Exception: of a group's coroutine.
    """
    first_draw = flow.next_order
    accepted: list[AnyGroup] = []
    rejections = Rejections(flow.settings.filter_key)
    flow.start(count + num_additional)
    try:
        while len(accepted) < count and (flow.in_flight or not flow.exhausted):
            rejected = rejections.count
            for group, is_accepted, _ in await flow.progress(deadline):
                if is_accepted:
                    accepted.append(group)
                else:
                    rejections.add(group)
            missing = count - len(accepted) - len(flow.in_flight)
            if rejections.count > rejected and missing + num_additional > 0 and len(accepted) < count:
                rejections.check(count, len(accepted))
                flow.start(missing + num_additional)
        # Counted before the abort below, which empties the flow.
        num_in_flight = len(flow.in_flight)
    finally:
        await flow.abort()
    return RolloutResult(
        groups=sorted(accepted[:count], key=lambda group: group.order),
        num_drawn=flow.next_order - first_draw,
        num_filtered=rejections.count,
        num_aborted=num_in_flight + max(0, len(accepted) - count),
    )


def sampling_params(args: GeneratingArguments, max_new_tokens: int) -> SamplingParams:
    """The parameters that training samples with; ``do_sample: false`` means greedy."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        temperature=args.temperature if args.do_sample else 0.0,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(args.stop_token_ids or ()),
        stop_strings=tuple(args.stop_strings or ()),
        include_stop_str_in_output=args.include_stop_str_in_output,
    )


def greedy(max_new_tokens: int, like: SamplingParams) -> SamplingParams:
    """The most probable continuation, stopping where ``like`` would."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        stop_token_ids=like.stop_token_ids,
        stop_strings=like.stop_strings,
        include_stop_str_in_output=like.include_stop_str_in_output,
    )
