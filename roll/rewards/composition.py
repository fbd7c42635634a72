"""Several rewards make one score: a weighted sum, times the gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll.rewards.base import RewardFunction, RewardOptionError, RewardResult, RewardSample
from roll.rewards.guard import GuardedReward

OWN_NUMBERS = ("score", "error_rate", "timeout_rate")
"""What is logged of every component beside the numbers that it returns itself."""
TIMEOUT_MARK = "timeout:"
"""In the error of a sample whose scoring took too long."""


@dataclass(frozen=True, slots=True)
class Component:
    """One of the rewards, and its part in the score."""

    name: str
    reward: RewardFunction
    weight: float = 1.0
    is_gate: bool = False
    """Multiplies the sum instead of being added to it."""
    gate_threshold: float | None = None
    """The factor is 1 from this score on and 0 below; None: the score itself."""
    error_value: float | None = None
    """Score where the reward failed; None: the sample has failed."""

    def factor(self, score: float) -> float:
        """What a gate multiplies the sum by."""
        return score if self.gate_threshold is None else float(score >= self.gate_threshold)


class CompositeReward:
    """``score = (sum of weight * score over the components) * (product over the gates)``.

    Every component's score, failures and numbers are among the metrics of a result as ``<component>/<number>``.  A
    sample fails when a component without ``error_value`` does, unless a closed gate (factor 0) has decided already.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = tuple(components)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names in the ``metrics`` of every result; empty if a component does not tell its own."""
        told = [getattr(component.reward, "numbers", ()) for component in self._components]
        if not all(told):
            return ()
        return tuple(
            f"{component.name}/{number}"
            for component, own in zip(self._components, told, strict=True)
            for number in (*OWN_NUMBERS, *own)
        )

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        columns = [component.reward(samples) for component in self._components]
        return [self.combined(row) for row in zip(*columns, strict=True)]

    def combined(self, results: Sequence[RewardResult]) -> RewardResult:
        """The result of a sample from those of its components, in their order."""
        total, factor = 0.0, 1.0
        metrics: dict[str, float] = {}
        errors = []
        for component, result in zip(self._components, results, strict=True):
            score = component.error_value if result.error is not None else result.score
            metrics |= component_metrics(component.name, result, score)
            if score is None:
                errors.append(f"{component.name}: {result.error}")
            elif component.is_gate:
                factor *= component.factor(score)
            else:
                total += component.weight * score
        if errors and factor != 0:
            return RewardResult(None, metrics, "; ".join(errors))
        return RewardResult(total * factor if factor else 0.0, metrics)

    def check_host(self) -> None:
        for component in self._components:
            if isinstance(component.reward, GuardedReward):
                try:
                    component.reward.check_host()
                except RewardOptionError as error:
                    error.component = component.name
                    raise

    def prepare(self) -> str:
        parts = [component.reward for component in self._components]
        return "\n".join(filter(None, [part.prepare() for part in parts if isinstance(part, GuardedReward)]))

    def close(self) -> None:
        for component in self._components:
            component.reward.close()


def component_metrics(name: str, result: RewardResult, score: float | None) -> dict[str, float]:
    """A component's numbers under its name; averaged over samples, failures become rates."""
    metrics = {f"{name}/{number}": value for number, value in result.metrics.items()}
    if score is not None:
        metrics[f"{name}/score"] = score
    metrics[f"{name}/error_rate"] = float(result.error is not None)
    metrics[f"{name}/timeout_rate"] = float(is_timeout(result))
    return metrics


def is_timeout(result: RewardResult) -> bool:
    return result.error is not None and TIMEOUT_MARK in result.error
