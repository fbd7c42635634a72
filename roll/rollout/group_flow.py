"""Groups in flight: a coroutine each, from being drawn to being accepted or rejected."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

MAX_DRAWS_PER_WANTED = 50
CANCELLED_SECONDS = 30.0
"""Time for the coroutine of a group to end after it has been cancelled."""


class RolloutExhausted(RuntimeError):
    """So many groups were rejected by filters, or could not be scored, that a step cannot be filled."""


class RolloutStalled(RuntimeError):
    """Nothing has moved for as long as a call may take, though groups are in flight."""


class Group(Protocol):
    """Samples that share a baseline."""

    @property
    def order(self) -> int:
        """Position in the order in which groups were drawn."""

    @property
    def error(self) -> str | None:
        """Why a sample of it could not be scored, if one could not."""

    def mean_score(self) -> float:
        """The mean of the scores that are there; NaN for a group without any."""


GroupT = TypeVar("GroupT", bound=Group)


@dataclass
class Rejections:
    """Rejections by filters, and the reason why nothing else may come.

    Args:
        key: of the configuration, that the filter comes from.
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


class Begun(Protocol):
    """A group in flight."""

    @property
    def order(self) -> int:
        """Position in the order in which groups were drawn."""

    @property
    def label(self) -> str:
        """For messages."""


BegunT = TypeVar("BegunT", bound=Begun)


class GroupFlow(ABC, Generic[BegunT, GroupT]):
    """The coroutines of groups; what begins them is a subclass's.

    Args:
        name: of what the coroutines run, for messages.
        first_draw: how many groups were drawn before; continues the count of draws.
    """

    _unit = "group"
    """Of what is drawn, for messages."""

    def __init__(self, name: str, first_draw: int) -> None:
        self._name = name
        self._begun: dict[asyncio.Task[tuple[GroupT, bool]], BegunT] = {}
        self._progress: Progress[GroupT] = Progress()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self.next_order = first_draw
        self.exhausted = False
        """There is nothing more to draw."""

    @property
    def num_in_flight(self) -> int:
        """Groups that are not accepted or rejected yet."""
        return len(self._begun)

    @property
    @abstractmethod
    def _moves(self) -> tuple[int, ...]:
        """Numbers that change when anything moves."""

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
                if moved == self._moves:
                    raise RolloutStalled(self._where_it_stands(deadline)) from None

    async def abort(self, orders: Iterable[int] | None = None) -> None:
        """Cancel these groups (None: all), wait until their coroutines have ended, and forget them."""
        unwanted = None if orders is None else set(orders)
        tasks = [task for task, begun in self._begun.items() if unwanted is None or begun.order in unwanted]
        for task in tasks:
            del self._begun[task]
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CANCELLED_SECONDS)
            if late:
                raise RuntimeError(f"{self._name} goes on {CANCELLED_SECONDS:g} s after it was cancelled: {late}")

    def _begin(self, begun: BegunT, coroutine: Coroutine[Any, Any, tuple[GroupT, bool]]) -> None:
        """Run a coroutine that gives a group, and whether it is accepted."""
        task = asyncio.create_task(coroutine)
        self._begun[task] = begun
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[tuple[GroupT, bool]]) -> None:
        begun = self._begun.pop(task, None)
        error: BaseException | None = None
        if task.cancelled():
            error = RuntimeError(f"{self._name} was cancelled by something that it awaits")
        else:
            error = task.exception()
        if begun is None:
            return  # aborted: nobody waits for it
        if error is not None:
            self._error = self._error or error
        else:
            group, kept = task.result()
            self._ended(group)
            (self._progress.accepted if kept else self._progress.rejected).append(group)
        self._changed.set()

    def _ended(self, group: GroupT) -> None:
        """Hear of a group before it is accepted or rejected."""

    def _where_it_stands(self, seconds: float) -> str:
        """The message of a stalled rollout: how many groups wait, and where the first of them do."""
        lines = [
            f"no {self._unit}, engine or reward has moved for {seconds:g} s; {len(self._begun)} {self._unit}s are in "
            "flight"
        ]
        for task, begun in list(self._begun.items())[:3]:
            outer: Any = task.get_coro()
            frame = getattr(outer.cr_await, "cr_frame", None) or outer.cr_frame  # of the loop, if it is in it
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "its end"
            lines.append(f"  {self._unit} {begun.order} ({begun.label}) waits at {place}")
        return "\n".join(lines)
