"""A user's own reward: a plain function ``(prompt, response, ground_truth, **row) -> float | dict``."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.rewards.base import RewardOptionError, RewardResult, RewardSample, failure

logger = logging.getLogger(__name__)

OWN_ARGUMENTS = ("prompt", "response", "ground_truth")


class CustomReward:
    """Calls the function once a sample, with the arguments that it names.

    It may ask for ``prompt``, ``response``, ``ground_truth``, ``finish_reason``, any column of the row, and the options
    of ``reward_kwargs`` (which win over a column of the same name); with ``**row`` it gets everything.  It returns the
    score, or a dict with ``score`` and further numbers, which become metrics.  What it raises is logged with its
    traceback the first time and carried as the sample's error.
    """

    def __init__(self, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """
        Raises:
            RewardOptionError: an option that the function does not take, or an async function.
        """
        if inspect.iscoroutinefunction(function):
            raise RewardOptionError(f"reward {name}: the function is async; give a plain one")
        parameters = inspect.signature(function).parameters
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._names = {n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        unknown = [option for option in options if option not in self._names and not self._takes_all]
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RewardOptionError(
                f"reward {name}: the function takes no argument {unknown[0]!r}; {hint}it takes {sorted(self._names)}"
            )
        self._name = name
        self._function = function
        self._options = dict(options)
        self._has_failed = False

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> RewardResult:
        offered = {"finish_reason": sample.finish_reason, **sample.row, **self._options}
        offered.update(prompt=sample.prompt, response=sample.response, ground_truth=sample.ground_truth)
        arguments = offered if self._takes_all else {n: offered[n] for n in self._names if n in offered}
        try:
            returned = self._function(**arguments)
        except Exception as error:  # whatever a user's code raises belongs to this sample, not to the run
            if not self._has_failed:
                logger.exception("reward %s failed; later failures are counted without a traceback", self._name)
                self._has_failed = True
            return failure(f"{self._name}: {type(error).__name__}: {error}")
        return self._read(returned)

    def _read(self, returned: Any) -> RewardResult:
        metrics = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
        if "score" not in metrics:
            return failure(f"{self._name}: the returned dict has no 'score', only {sorted(metrics)}")
        try:
            numbers = {key: float(value) for key, value in metrics.items()}
        except (TypeError, ValueError) as error:
            return failure(f"{self._name}: must return numbers, returned {returned!r}: {error}")
        score = numbers.pop("score")
        if not math.isfinite(score):
            return failure(f"{self._name}: returned the score {score}; it must be finite")
        return RewardResult(score, numbers)

    def close(self) -> None:
        """Nothing to release."""
