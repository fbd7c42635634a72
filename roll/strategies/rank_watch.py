"""The ranks of one engine as processes that end together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from threading import Event, Thread

logger = logging.getLogger(__name__)

_NOTICE_SECONDS = 2.0
"""From an error that a rank's death has caused to its end being seen: a neighbour may be heard before."""
_END_SECONDS = 10.0
"""For killed ranks to be gone."""


class RankWatch:
    """Ends this process when a rank of its engine has died, and the other ranks first.

    A model without one of its parts computes nothing, and whoever waits for that part may wait for ever. So the death
    of any rank becomes the death of the engine, which those who drive it know how to deal with.

    Args:
        ranks: child processes; none for an engine that has no rank outside of this process.
        clean_up: called before the end.
    """

    def __init__(self, ranks: Sequence[BaseProcess], clean_up: Callable[[], None]) -> None:
        self._ranks = {rank.sentinel: rank for rank in ranks}
        self._clean_up = clean_up
        self._is_over = Event()
        self._thread = Thread(target=self._watch, daemon=True, name="roll-rank-watch")
        if ranks:
            # At an exit in good order the ranks end first.
            Finalize(None, self.close, exitpriority=0)
            self._thread.start()

    def close(self) -> None:
        """The ranks may end from now on."""
        self._is_over.set()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """For work that ranks take part in: if it fails because one has died, the process ends and nobody hears of the
        failure."""
        try:
            yield
        except Exception:
            if self._ranks and wait(list(self._ranks), _NOTICE_SECONDS):
                self._thread.join()
            raise

    def _watch(self) -> None:
        dead = wait(list(self._ranks))
        if self._is_over.is_set():
            return
        for number, (sentinel, rank) in enumerate(self._ranks.items()):
            if sentinel in dead:
                logger.error("rank %d of the engine (pid %d) has died, and the engine ends with it", number, rank.pid)
        self._kill()
        self._clean_up()
        logging.shutdown()
        os._exit(1)

    def _kill(self) -> None:
        """Returns when no rank is left: they hold devices, which whoever takes this engine's place needs."""
        for rank in self._ranks.values():
            rank.kill()
        left, give_up = set(self._ranks), time.monotonic() + _END_SECONDS
        while left and time.monotonic() < give_up:
            left -= set(wait(list(left), give_up - time.monotonic()))
