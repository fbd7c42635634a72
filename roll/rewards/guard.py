"""A reward that fails on one sample, in whatever way, fails for this sample alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from roll.rewards.base import RewardFunction, RewardResult, RewardRule, RewardSample, failure

logger = logging.getLogger(__name__)


class GuardedReward:
    """Calls a reward; what it raises becomes the error of the sample that it was raised for.

    The first traceback is logged, and so is the first error that the reward reports itself; later ones are counted
    (``error_rate``, ``timeout_rate``).
    """

    def __init__(self, name: str, reward: RewardFunction) -> None:
        self.numbers: tuple[str, ...] = getattr(reward, "numbers", ())
        self._name = name
        self._reward = reward
        self._has_raised = False
        self._has_failed = False

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        try:
            results = self._checked(samples)
        except Exception:  # one bad sample must not cost the others their reward: find it
            results = [self._single(sample) for sample in samples]
        if not self._has_failed:
            self._show_first_failure(results)
        return results

    def _checked(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        results = self._reward(samples)
        if len(results) != len(samples):
            raise ValueError(f"returned {len(results)} results for {len(samples)} samples")
        return results

    def _single(self, sample: RewardSample) -> RewardResult:
        try:
            return self._checked([sample])[0]
        except Exception as error:
            if not self._has_raised:
                self._has_raised = self._has_failed = True
                logger.exception("reward %s failed; later failures are counted without a traceback", self._name)
            return failure(f"{self._name}: {type(error).__name__}: {error}")

    def _show_first_failure(self, results: Sequence[RewardResult]) -> None:
        failed = next((result for result in results if result.error is not None), None)
        if failed is not None:
            self._has_failed = True
            logger.warning("reward %s: first failure (later ones are only counted): %s", self._name, failed.error)

    def check_host(self) -> None:
        """Let a rule look at this host."""
        if isinstance(self._reward, RewardRule):
            self._reward.check_host()

    def prepare(self) -> str:
        """Let a rule get ready; what it raises is not the error of a sample."""
        return self._reward.prepare() if isinstance(self._reward, RewardRule) else ""

    def close(self) -> None:
        self._reward.close()
