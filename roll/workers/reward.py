"""The Ray worker of a reward: texts in, scalars out. Imports no torch, so that it starts in well under a second."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from roll.config.rewards import RewardConfig
from roll.distributed import Dispatch, Worker, register
from roll.rewards import RewardResult, RewardSample, apply_on_error, build_reward, reward_options

logger = logging.getLogger(__name__)


class RewardWorker(Worker):
    """Scores finished samples of one domain."""

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        """Build the reward function that the section ``rewards.<name>`` describes."""
        self.section = cast(RewardConfig, self.context.role)
        self.reward = build_reward(*reward_options(self.section.name, self.section))
        self._failure_shown = False

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order. A sample that cannot be scored says why in ``error``.

        Raises:
            RewardError: a sample failed and the section says ``on_error: raise``.
        """
        results = self.reward(samples)
        assert len(results) == len(samples), f"{len(results)} rewards for {len(samples)} samples"
        self._show_first_failure(results)
        return apply_on_error(results, self.section.on_error, self.section.error_value, self.section.name)

    def _show_first_failure(self, results: Sequence[RewardResult]) -> None:
        failed = next((result for result in results if result.error is not None), None)
        if failed is not None and not self._failure_shown:
            self._failure_shown = True
            logger.warning(
                "reward %s: first failure (later ones are only counted): %s", self.section.name, failed.error
            )

    def close(self) -> None:
        """Release the reward's helper processes when the cluster shuts down."""
        if hasattr(self, "reward"):
            self.reward.close()
