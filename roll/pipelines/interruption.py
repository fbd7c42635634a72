"""Reaction of a run to a signal that asks it to end: it saves its state, within a bounded time."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from roll.config.loader import LoadedConfig
from roll.config.reading.masking import masked_text
from roll.distributed import Interrupted
from roll.distributed.signals import ending

logger = logging.getLogger(__name__)

State = dict[str, Any]


class Interruption:
    """Knows how far the run has come, what of it is saved, and how the rest would be.

    Args:
        seconds: from the first signal, for a step that must not be torn apart to end and for a checkpoint to be
            written; 0: none is written.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._state: Callable[[], State | None] = lambda: None
        self._save: Callable[[int, State], None] | None = None
        self._point: tuple[int, State] | None = None
        self._timer: threading.Timer | None = None
        self._is_over = False
        self.steps_done: int | None = None
        """None: training has not begun."""
        self.saved_steps: int | None = None
        """Steps done by the newest checkpoint; None: there is none."""

    def saves(self, state: Callable[[], State | None], save: Callable[[int, State], None]) -> None:
        """See :meth:`roll.pipelines.run_context.RunContext.save_when_interrupted`."""
        self._state, self._save = state, save

    def reach(self, steps_done: int) -> None:
        """So many steps are done, and the next is not begun.

        Raises:
            Interrupted: a signal has come, and this is a point that can be saved.
        """
        self.steps_done = steps_done
        state = self._state()
        self._point = None if state is None else (steps_done, state)
        if self._point is not None:
            ending.check()

    def begin(self, number: signal.Signals) -> None:
        """The first signal has come. Within a signal handler, where nothing may be logged."""
        plan = f"what is done is saved first (at most {self._seconds:g} s); " if self._can_save else ""
        os.write(2, f"\n{number.name}: the run ends; {plan}once more ends it at once\n".encode())
        self._timer = threading.Timer(self._seconds, self._give_up, [number])
        self._timer.daemon = True
        self._timer.start()

    def save(self, publish: Callable[[], None]) -> None:
        """Write what :meth:`reach` has noted, unless it is saved already; says what came of it, raises nothing.

        Args:
            publish: completes a checkpoint that is being written.
        """
        try:
            if self._can_save and self._point is not None and self.steps_done and not self._is_over:
                self._write(publish)
            elif self._is_over:
                logger.error("nothing was saved: the step in flight was not done within %s", self._limit)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            late = self._is_over or isinstance(error, SystemExit | KeyboardInterrupt)
            reason = f"it took longer than {self._limit}" if late else str(error)
            logger.error("no checkpoint was saved: %s", reason)
        finally:
            self.end()

    def end(self) -> None:
        """Nothing is limited in time any more."""
        if self._timer is not None:
            self._timer.cancel()
        ending.forget_pending()

    def _write(self, publish: Callable[[], None]) -> None:
        assert self._point is not None and self._save is not None
        steps_done, state = self._point
        began = time.monotonic()
        publish()
        if self.saved_steps != steps_done:
            self._save(steps_done, state)
            publish()
            logger.info("saved after %d steps, in %.1f s", steps_done, time.monotonic() - began)

    @property
    def _limit(self) -> str:
        return f"interrupt_timeout: {self._seconds:g}"

    @property
    def _can_save(self) -> bool:
        return self._seconds > 0 and self._save is not None

    def _give_up(self, number: signal.Signals) -> None:
        self._is_over = True
        ending.raise_in_main(Interrupted(number))


def command_to_go_on(loaded: LoadedConfig[Any]) -> str:
    """The command line that continues the run."""
    kept = [word for word in loaded.overrides if not word.lstrip("+").startswith("resume_from_checkpoint=")]
    return masked_text(shlex.join(["roll", "run", str(loaded.source), *kept, "resume_from_checkpoint=true"]))
