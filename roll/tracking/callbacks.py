"""Callbacks of a run from Python: they see its steps, samples (as rows of a table) and checkpoints, and may end it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
            samples: rows of :func:`sample_rows`.
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
    """All callbacks of a run. Raises ``TypeError``: an object with none of :data:`HOOKS`."""

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
        """Call the method of all that have it. Raises ``TypeError``: one returns neither None nor :data:`STOP`."""
        for one in self._callbacks:
            answer = getattr(one, hook)(*values) if hasattr(one, hook) else None
            if answer is not None and answer is not STOP:
                raise TypeError(f"{type(one).__name__}.{hook} returned {answer!r}: return roll.STOP, or nothing")
            self.stopping = self.stopping or answer is STOP


PARTIAL = "\ufffd"  # replacement character in the text of a token that holds only a part of a character

_PROMPT = {"id": "prompt_id", "text": "prompt", "truth": "ground_truth", "domain": "domain", "tag": "tag"}
_SAMPLE = ("group", "score", "reward", "kind", "response_tokens", "finish_reason", "outcome", "error")


def sample_rows(block: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """One row a sample of a block of :mod:`roll.tracking.run_record`.

    A row has ``step``, ``set`` (``train``, ``validation``), ``prompt_id``, ``prompt``, ``response`` and, where the
    record knows them, ``group``, ``ground_truth``, ``domain``, ``tag``, ``score``, ``reward`` (normalised), ``kind``
    (``chosen`` or ``rejected``), ``response_tokens`` (sampled ones), ``finish_reason``, ``outcome``, ``error`` and the
    parts of the reward as ``metrics/<name>``. ``decode``: from token ids to text; called for responses with characters
    of several tokens.
    """
    ids, pieces = block["ids"], block["pieces"]

    def response(sample: Mapping[str, Any]) -> str:
        if "response" in sample:
            return str(sample["response"])
        text = "".join(pieces[place] for place in sample.get("tokens", ()))
        return decode([ids[place] for place in sample["tokens"]]) if PARTIAL in text else text

    rows = []
    for sample in block["samples"]:
        prompt = block["prompts"][sample["prompt"]]
        row = {"step": block["step"], "set": block["kind"], "response": response(sample)}
        row |= {name: prompt[key] for key, name in _PROMPT.items() if key in prompt}
        row |= {name: sample[name] for name in _SAMPLE if name in sample}
        rows.append(row | {f"metrics/{name}": value for name, value in sample.get("metrics", {}).items()})
    return rows
