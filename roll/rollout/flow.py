"""Groups in flight: a coroutine each, from being drawn to being accepted or rejected; a step collects its own."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple

from roll.config.roles import GeneratingArguments
from roll.rollout.filters import GroupFilter
from roll.rollout.groups import Drawn, Group, GroupT, ItemT, SampleGroup
from roll.strategies.engines.requests import SamplingParams

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

    key: str = "query_filter_config"
    count: int = 0
    mean_scores: list[float] = field(default_factory=list)
    last_error: str | None = None

    def add(self, group: Group) -> None:
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


@dataclass
class Progress(Generic[GroupT]):
    """Fates of groups since the last call."""

    generated: list[GroupT] = field(default_factory=list)
    """Groups that have all of their samples and may be in scoring yet."""
    accepted: list[GroupT] = field(default_factory=list)
    rejected: list[GroupT] = field(default_factory=list)


class GroupInFlight(NamedTuple):
    """A group whose coroutine is running."""

    drawn: Drawn[Any]
    label: str
    """Name of the group in messages."""
    state: Callable[[], dict[str, Any] | None]
    """Progress of its samples; None: they are complete."""


class GroupFlow(ABC, Generic[ItemT, GroupT]):
    """Groups in flight: a coroutine each, which a subclass begins.

    Args:
        name: what the coroutines run, in messages.
        draw: gives the next n items to make groups of, or fewer when there are no more.
        first_draw: how many groups were drawn before; continues the count of draws.
    """

    _unit = "group"
    """Name of what is drawn, for messages."""
    _scores_itself = True
    """Groups are scored by the coroutine that makes them, so that they are generated when it ends."""

    def __init__(self, name: str, draw: Callable[[int], Sequence[ItemT]], first_draw: int) -> None:
        self._name = name
        self._draw = draw
        self.in_flight: dict[asyncio.Task[tuple[GroupT, bool]], GroupInFlight] = {}
        """Groups that are not accepted or rejected yet."""
        self._progress: Progress[GroupT] = Progress()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self.next_order = first_draw
        self.exhausted = False
        """There is nothing more to draw."""

    @property
    @abstractmethod
    def _moves(self) -> tuple[int, ...]:
        """Numbers that change when anything moves."""

    @abstractmethod
    def _start_group(self, drawn: Drawn[ItemT], progress: Mapping[str, Any] | None = None) -> None:
        """Begin the group of a prompt or task, from where ``progress`` left it."""

    def _start_scoring(self, group: GroupT) -> None:
        """Score a complete group of an earlier process."""
        raise AssertionError(f"{self._name} brings the rewards of its group")

    def resume(self, begun: Sequence[tuple[Drawn[ItemT], Mapping[str, Any]]], scoring: Sequence[GroupT] = ()) -> None:
        """Continue groups of an earlier process: those begun, each with its progress, and those to be scored."""
        for drawn, progress in begun:
            self._start_group(drawn, progress)
        for group in scoring:
            self._start_scoring(group)

    def progress_state(self) -> dict[int, dict[str, Any]]:
        """The progress of incomplete groups, by number."""
        states = ((group.drawn.order, group.state()) for group in self.in_flight.values())
        return {order: state for order, state in states if state is not None}

    def start(self, count: int) -> list[Drawn[ItemT]]:
        """Draw ``count`` times and begin a group for each; return what was drawn, fewer where there is no more."""
        drawn = [Drawn(self.next_order + index, item) for index, item in enumerate(self._draw(count))]
        self.exhausted = self.exhausted or len(drawn) < count
        self.next_order += len(drawn)
        for one in drawn:
            self._start_group(one)
        return drawn

    def take(self) -> Progress[GroupT]:
        """Events since the last call.

        Raises:
            Exception: of a group's coroutine.
        """
        if self._error is not None:
            raise self._error
        progress, self._progress = self._progress, Progress()
        self._changed.clear()
        return progress

    async def progress(self, deadline: float = math.inf) -> Progress[GroupT]:
        """Wait until something happens, then as :meth:`take`: what happens in one pass of the loop comes together.

        Raises:
            RolloutStalled: see :meth:`watched`.
        """
        await self.watched(self._changed, deadline)
        return self.take()

    async def watched(self, event: asyncio.Event, deadline: float) -> None:
        """Wait for ``event``.

        Raises:
            RolloutStalled: nothing has moved for ``deadline`` seconds.
        """
        while not event.is_set():
            moved = self._moves
            try:
                async with asyncio.timeout(None if deadline == math.inf else deadline):
                    await event.wait()
            except TimeoutError:
                # Long responses finish no group for minutes, but their engines end turns all the while.
                if moved == self._moves:
                    raise RolloutStalled(self._stall_message(deadline)) from None

    async def abort(self, orders: Iterable[int] | None = None) -> None:
        """Cancel these groups (None: all), wait until their coroutines have ended, and forget them."""
        unwanted = None if orders is None else set(orders)
        tasks = [task for task, begun in self.in_flight.items() if unwanted is None or begun.drawn.order in unwanted]
        for task in tasks:
            # Before the cancellation: `_end` takes the cancellation of a group that it still knows for an error.
            del self.in_flight[task]
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CANCELLED_SECONDS)
            if late:
                raise RuntimeError(f"{self._name} goes on {CANCELLED_SECONDS:g} s after it was cancelled: {late}")

    def _begin(self, begun: GroupInFlight, coroutine: Coroutine[Any, Any, tuple[GroupT, bool]]) -> None:
        """Run a coroutine that gives a group, and whether it is accepted."""
        task = asyncio.create_task(coroutine)
        self.in_flight[task] = begun
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[tuple[GroupT, bool]]) -> None:
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
            group, kept = task.result()
            if self._scores_itself:
                self._progress.generated.append(group)
            (self._progress.accepted if kept else self._progress.rejected).append(group)
        self._changed.set()

    def _stall_message(self, seconds: float) -> str:
        """The message of a stalled rollout: how many groups wait, and where the first of them do."""
        lines = [
            f"no {self._unit}, engine or reward has moved for {seconds:g} s; {len(self.in_flight)} {self._unit}s are "
            "in flight"
        ]
        for task, begun in list(self.in_flight.items())[:3]:
            outer: Any = task.get_coro()
            frame = getattr(outer.cr_await, "cr_frame", None) or outer.cr_frame  # of the loop, if it is in it
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "its end"
            lines.append(f"  {self._unit} {begun.drawn.order} ({begun.label}) waits at {place}")
        return "\n".join(lines)


@dataclass
class RolloutResult(Generic[GroupT]):
    """Groups in the order in which they were drawn, and what it took to get them."""

    groups: list[GroupT]
    num_drawn: int = 0
    num_filtered: int = 0
    num_aborted: int = 0


async def collected(
    flow: GroupFlow[ItemT, GroupT],
    count: int,
    num_additional: int,
    deadline: float,
    rejected_by: str = "query_filter_config",
) -> RolloutResult[GroupT]:
    """``count`` groups of ``flow``, or all that there are; the rest is aborted.

    Args:
        num_additional: groups to run beyond the need at any moment, so that a rejected one is replaced by one
            that is in flight already.
        deadline: seconds after which a wait in which nothing moves is given up.
        rejected_by: key of the configuration that the groups' filter comes from, for messages.

    Raises:
        RolloutExhausted: more than ``MAX_DRAWS_PER_WANTED`` groups for each wanted one were rejected.
        RolloutStalled: nothing has moved for ``deadline`` seconds.
        Exception: of a group's coroutine.
    """
    first_draw = flow.next_order
    accepted: list[GroupT] = []
    rejections = Rejections(rejected_by)
    flow.start(count + num_additional)
    try:
        while len(accepted) < count and (flow.in_flight or not flow.exhausted):
            progress = await flow.progress(deadline)
            accepted += progress.accepted
            for group in progress.rejected:
                rejections.add(group)
            missing = count - len(accepted) - len(flow.in_flight)
            if progress.rejected and missing + num_additional > 0 and len(accepted) < count:
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


@dataclass(frozen=True)
class GroupSettings:
    """Settings of answering and judging every prompt."""

    group_size: int
    """Samples of each prompt."""
    params: SamplingParams
    seed: int
    """The run's. With the draw number of a prompt it gives the seed of the prompt's samples, so that a resumed run
    samples what an uninterrupted run would have."""
    filters: Mapping[str, GroupFilter] = field(default_factory=dict)
    """By domain; a domain without one keeps every group."""

    def params_of(self, order: int) -> SamplingParams:
        """The sampling parameters with the seed of the prompt that was drawn as number ``order``."""
        # Seeds of different runs and prompts never meet: 31 bits for the run, 32 for the draw.
        return replace(self.params, seed=(self.seed & 0x7FFFFFFF) << 32 | (order & 0xFFFFFFFF))

    def keeps(self, group: SampleGroup) -> bool:
        """True if the filter of its domain accepts a scored group."""
        keep = self.filters.get(group.prompt.domain)
        return keep is None or keep(group.scores())
