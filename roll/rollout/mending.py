"""Workers that die at their work are replaced, and their work is done again; what kills them twice is set aside.

A worker dies with all that it was given. Given to its successor one by one, the item that kills it again is known; it
gets a result that says so, and its row goes into a file, while all others get theirs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from roll.distributed import Cluster, WorkerDied

logger = logging.getLogger(__name__)

FILE_NAME = "set_aside.jsonl"
"""In the folder of logs: a line for every sample that has killed its worker twice."""
MOST_IN_A_ROW = 3
"""Samples that may kill their workers one after the other: where all do, the fault is not theirs."""

T = TypeVar("T")
R = TypeVar("R")


class SetAside:
    """The account of samples that have killed their workers.

    Args:
        folder: of the file; None: there is none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.num_deaths = 0
        """Workers that were replaced."""
        self.num_samples = 0

    def add(self, role: str, row: Mapping[str, Any], cause: object) -> None:
        """Write down a sample that has killed two workers of ``role``, or an episode whose environment fails again."""
        self.num_samples += 1
        logger.error("a sample has failed its worker of %s twice and is set aside: %s", role, cause)
        if self._folder is not None:
            line = json.dumps({"time": time.time(), "role": role, "cause": str(cause), **row}, default=str)
            with suppress(OSError):  # a full disk ends no run
                self._folder.mkdir(parents=True, exist_ok=True)
                with (self._folder / FILE_NAME).open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


class Mended(Generic[T, R]):
    """Asks a worker, or a cluster that works as one, in spite of its deaths.

    Args:
        ask: has items worked on; raises :class:`WorkerDied`.
        replace: puts a new worker in the place of the dead one.
        set_aside: the result of an item that has killed two workers.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[T]], Awaitable[list[R]]],
        replace: Callable[[WorkerDied], Awaitable[None]],
        set_aside: Callable[[T, WorkerDied], R],
    ) -> None:
        self._ask = ask
        self._replace = replace
        self._set_aside = set_aside
        self._lock = asyncio.Lock()
        self._lives = 0
        self._in_a_row = 0

    async def __call__(self, items: Sequence[T]) -> list[R]:
        """One result an item.

        Raises:
            WorkerDied: of the last of too many that died one after the other, or of one that did not start.
        """
        async with self._lock:  # a successor may be starting
            life = self._lives
        try:
            return await self._ask(items)
        except WorkerDied as death:
            await self._mend(life, death)
        return [await self._alone(item) for item in items]

    async def _alone(self, item: T) -> R:
        async with self._lock:
            life = self._lives
        try:
            (result,) = await self._ask([item])
        except WorkerDied as death:
            self._in_a_row += 1
            if self._in_a_row > MOST_IN_A_ROW:
                raise
            await self._mend(life, death)
            return self._set_aside(item, death)
        self._in_a_row = 0
        return result

    async def _mend(self, life: int, death: WorkerDied) -> None:
        """Replace the worker that has died in its ``life``, unless that has been done."""
        async with self._lock:
            if life == self._lives:
                logger.warning("a worker is replaced, and its work done again:\n%s", death)
                await self._replace(death)
                self._lives += 1


async def replace_rank(cluster: Cluster, rank: int) -> None:
    """Start a rank anew that has nothing to do with the others.

    Raises:
        RemoteError: it did not start.
    """
    cluster.leave_out(rank)
    await cluster.restart(rank)
    cluster.rejoin(rank)
