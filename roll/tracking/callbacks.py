"""Callbacks of a run from Python: they see its steps, samples and checkpoints, and may end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final


class _Answer(Enum):
    STOP = "stop"


STOP: Final = _Answer.STOP
"""Returned by a callback, it ends the run after the step in flight: the last evaluation, the model and the report are
made as at the end of any run."""
HOOKS = ("on_step", "on_samples", "on_checkpoint", "on_end")


class Callback:
    """Base of callbacks; any object with one of these methods will do. What a method raises ends the run."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> Any:
        """After each step.

        Args:
            step: counted from 0; a resumed run continues the count.
            metrics: of the step, and of an evaluation before it (``val/...``); plain numbers.
        """

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> Any:
        """When samples have been recorded (``sample_log``): of a training step before its model learns, of an
        evaluation at its end.

        Args:
            samples: rows of :func:`roll.tracking.sample_rows.sample_rows`.
        """

    def on_checkpoint(self, step: int, path: Path) -> Any:
        """When a checkpoint is complete.

        Args:
            step: the number of steps done by its weights.
        """

    def on_end(self, run: Any) -> Any:
        """At the end of a run that did not fail, stopped or not.

        Args:
            run: a :class:`roll.api.Run`.
        """


class Callbacks:
    """All callbacks of a run.

    Raises:
        TypeError: an object with none of :data:`HOOKS`.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        for one in callbacks:
            if not any(hasattr(one, hook) for hook in HOOKS):
                raise TypeError(f"callbacks: {one!r} has none of the methods {', '.join(HOOKS)}")
        self._callbacks = tuple(callbacks)
        self.stopping = False
        """One has returned :data:`STOP`."""

    def has(self, hook: str) -> bool:
        """True if one of them has the method."""
        return any(hasattr(one, hook) for one in self._callbacks)

    def call(self, hook: str, *values: object) -> None:
        """Call the method of all that have it.

        Raises:
            TypeError: one returns neither None nor :data:`STOP`.
        """
        for one in self._callbacks:
            answer = getattr(one, hook)(*values) if hasattr(one, hook) else None
            if answer is not None and answer is not STOP:
                raise TypeError(f"{type(one).__name__}.{hook} returned {answer!r}: return roll.STOP, or nothing")
            self.stopping = self.stopping or answer is STOP
