"""Groups in flight: a coroutine each, from being drawn to being accepted or rejected; a step collects its own.

Filters reject groups that are not worth training on (dynamic sampling, DAPO: arXiv 2503.14476, section 3.2): one whose
samples all have the same reward has zero advantage everywhere and only dilutes the batch.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from roll.algorithms.registry import Registry
from roll.algorithms.samples import EPS
from roll.config.roles import GeneratingArguments
from roll.datasets.types import PromptRow
from roll.rollout.engines import EngineClient
from roll.rollout.groups import UNSCORED, AnyGroup, Group, SampleGroup
from roll.rollout.loops import GroupSettings, RolloutContext, RolloutLoop, SingleTurn
from roll.rollout.rewarding import RewardClient
from roll.strategies.engines.requests import SamplingParams

if TYPE_CHECKING:
    from roll.agents.episode import Task

MAX_DRAWS_PER_WANTED = 50
CANCELLED_SECONDS = 30.0  # time for the coroutine of a group to end after it has been cancelled


class RolloutExhausted(RuntimeError):
    """So many groups were rejected by filters, or could not be scored, that a step cannot be filled."""


class RolloutStalled(RuntimeError):
    """Nothing has moved for as long as a call may take, though groups are in flight."""


GroupFilter = Callable[[np.ndarray], bool]
"""Takes the scores of a group, float32 (num_samples,) with NaN where a reward is missing; True keeps the group."""


def mean_filter(threshold_down: float = 0.0, threshold_up: float = 1.0) -> GroupFilter:
    """Keep groups whose mean score lies strictly between the two thresholds; compared in the scores' float32."""
    low, high = np.float32(threshold_down), np.float32(threshold_up)
    return lambda scores: bool(low < np.float32(np.nanmean(scores, dtype=np.float64)) < high)


def std_filter(std_threshold: float = 0.0) -> GroupFilter:
    """Keep groups whose scores differ, by a population standard deviation of more than ``std_threshold``, and by more
    than arithmetic in float32 leaves of equal ones: a millionth of their size."""

    def keep(scores: np.ndarray) -> bool:
        exact = scores.astype(np.float64)
        return bool(np.nanstd(exact) > max(std_threshold, EPS * np.nanmax(np.abs(exact))))

    return keep


def no_filter() -> GroupFilter:
    return lambda scores: True


FilterFactory = Callable[..., GroupFilter]  # makes a filter from ``filter_args``, given as keywords

group_filters: Registry[FilterFactory] = Registry("query_filter_config.type")
for _factory in (no_filter, mean_filter, std_filter):
    group_filters.add(_factory, _factory.__name__)


def by_domain(filters: Mapping[str, GroupFilter]) -> Callable[[SampleGroup], bool]:
    """The filter of each group's domain; a domain without one keeps all."""
    return lambda group: group.item.domain not in filters or filters[group.item.domain](group.scores())


def response_mask(scores: np.ndarray, domains: np.ndarray, filters: Mapping[str, GroupFilter]) -> np.ndarray:
    """Responses that the filters of their domains keep, each judged as a group of one: bool (B,).

    Args:
        scores: float (B,), NaN where a reward is missing.
        domains: object (B,).
        filters: by domain; a domain without one keeps all.
    """
    pairs = zip(scores[:, None], domains, strict=True)
    return np.array([domain not in filters or filters[domain](score) for score, domain in pairs], dtype=bool)


def build_filter(kind: str, filter_args: Mapping[str, Any]) -> GroupFilter:
    """Build the filter of a ``query_filter_config`` section.

    ``kind`` is a name or the dotted path of a :data:`FilterFactory`.  A group without any reward is never kept,
    whatever the filter.

    Raises:
        ValueError: no such factory, or one that does not take these arguments.
    """
    factory = group_filters.resolve(kind)
    try:
        keep = factory(**filter_args)
    except TypeError as error:
        raise ValueError(f"query_filter_config.filter_args {dict(filter_args)} do not fit {kind}: {error}") from error
    return lambda scores: not np.isnan(scores).all() and keep(scores)


@dataclass
class Rejections:
    """Rejections by filters, and the reason why nothing else may come."""

    key: str  # key of the configuration that the filter comes from
    count: int = 0
    mean_scores: list[float] = field(default_factory=list)
    last_error: str | None = None

    def add(self, group: AnyGroup) -> None:
        self.count += 1
        self.mean_scores.append(group.mean_score())
        self.last_error = group.error or self.last_error

    def check(self, wanted: int, accepted: int) -> None:
        """RolloutExhausted: more than ``MAX_DRAWS_PER_WANTED`` rejected groups for each wanted one."""
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
    group: AnyGroup
    is_accepted: bool
    version: int  # the weights that it was begun with


@dataclass(eq=False)
class GroupFlow:
    """Groups in flight: a coroutine each, which a rollout loop begins."""

    engines: EngineClient
    rewards: RewardClient | None  # score the samples of prompts; None: a loop brings the rewards itself
    draw: Callable[[int], Sequence[PromptRow | Task]]
    """Gives the next n prompts or tasks, or fewer when there are no more."""
    settings: GroupSettings
    next_order: int = 0  # how many were drawn before
    loop: RolloutLoop | None = None  # makes a group of each; None: :class:`~roll.rollout.loops.SingleTurn`

    def __post_init__(self) -> None:
        # Groups that are not accepted or rejected yet.
        self.in_flight: dict[asyncio.Task[Ended], RolloutContext] = {}
        # Groups since the last take(), in the order of their ends.
        self.ended: list[Ended] = []
        # The loop's own numbers, since the beginning.
        self.counts: Counter[str] = Counter()
        self.version = 0  # of the weights that groups are begun with
        self.exhausted = False  # there is nothing more to draw
        self._loop = self.loop or SingleTurn()
        self._name = f"{type(self._loop).__name__}.answer"
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def start(self, count: int) -> int:
        """Draw ``count`` times and begin a group for each; return how many, fewer where there is no more."""
        items = self.draw(count)
        self.exhausted = self.exhausted or len(items) < count
        for item in items:
            self.begin(RolloutContext(self, self.next_order, item, self.version))
            self.next_order += 1
        return len(items)

    def begin(self, context: RolloutContext) -> None:
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
        """Wait for ``event``. Raises ``RolloutStalled``: nothing has moved for ``deadline`` seconds."""
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
        # By identity: a reward that failed is a result of its own.
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
        scored = 0 if self.rewards is None else self.rewards.num_calls
        return self.engines.num_turns, scored, self.counts.total()

    def _stall_message(self, seconds: float) -> str:
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


async def collected(flow: GroupFlow, count: int, num_additional: int, deadline: float) -> RolloutResult:
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
    names = ("min_new_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "include_stop_str_in_output")
    same: dict[str, Any] = {name: getattr(args, name) for name in names}
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=args.temperature if args.do_sample else 0.0,
        stop_token_ids=tuple(args.stop_token_ids or ()),
        stop_strings=tuple(args.stop_strings or ()),
        **same,
    )


def greedy(max_new_tokens: int, like: SamplingParams) -> SamplingParams:
    """The most probable continuation, stopping where ``like`` would."""
    names = ("stop_token_ids", "stop_strings", "include_stop_str_in_output")
    stops: dict[str, Any] = {name: getattr(like, name) for name in names}
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **stops)
