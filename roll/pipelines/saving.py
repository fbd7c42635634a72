"""A checkpoint that appears when every role has it on disk, which may be while training goes on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from roll.distributed import Cluster, PendingCall


class PendingCheckpoint:
    """A checkpoint folder under its hidden name, and the clusters that write into it.

    Args:
        writing: gives the folder when it is entered, publishes it when it is left.
        writers: clusters of training workers.
        steps_done: by the weights that it holds.
    """

    def __init__(self, writing: AbstractContextManager[Path], writers: Sequence[Cluster], steps_done: int = 0) -> None:
        self._stack = ExitStack()
        self._writers = writers
        self.steps_done = steps_done
        self._asked: list[PendingCall] = []
        self.path = self._stack.enter_context(writing)

    def is_written(self) -> bool:
        """Whether all ranks were done when they were last asked; never waits, asks again where some were not.

        Raises:
            WorkerFailed, WorkerDied: a rank could not write its part.
        """
        if not self._asked:
            self._asked = self._ask(wait=False)
        if not all(call.done() for call in self._asked):
            return False
        answers = [done for call in self._asked for done in call.result()]
        self._asked = []
        return all(answers)

    def publish(self) -> None:
        """Wait until all ranks are done, then let the checkpoint appear.

        Raises:
            WorkerFailed, WorkerDied: a rank could not write its part; nothing appears.
            OSError: the folder could not be completed.
        """
        try:
            for call in self._ask(wait=True):
                call.result()
        except BaseException:
            self.discard()
            raise
        self._stack.close()

    def discard(self) -> None:
        """Remove the folder. To be called where an exception is handled, when nobody writes any more."""
        error = sys.exc_info()
        assert error[0] is not None
        self._stack.__exit__(*error)

    def _ask(self, wait: bool) -> list[PendingCall]:
        return [cluster.checkpoint_saved(wait, blocking=False) for cluster in self._writers]
