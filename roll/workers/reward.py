"""The Ray worker of a reward: texts in, scalars out. Imports no torch, so that it starts in well under a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from roll.config.rewards import RewardConfig
from roll.distributed import Dispatch, Worker, register
from roll.rewards import RewardResult, RewardSample, apply_on_error, build_section


@dataclass(frozen=True)
class RewardSettings:
    """Keys of the section that are known when the run has started: the service that the reward's judges ask."""

    judge: Mapping[str, str] = field(default_factory=dict, repr=False)


class RewardWorker(Worker):
    """Scores finished samples of one domain."""

    settings_class = RewardSettings
    settings: RewardSettings

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> str:
        """Build the reward function that the section ``rewards.<name>`` describes; return what it says of this host."""
        judge: dict[str, Any] = dict(self.settings.judge)
        self.section = replace(cast(RewardConfig, self.context.role), **judge)
        self.reward = build_section(self.section.name, self.section)
        return self.reward.prepare()

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order. A sample that cannot be scored says why in ``error``. Raises ``RewardError``:
        a sample failed and the section says ``on_error: raise``."""
        results = self.reward(samples)
        assert len(results) == len(samples), f"{len(results)} rewards for {len(samples)} samples"
        return apply_on_error(results, self.section.on_error, self.section.error_value, self.section.name)

    def close(self) -> None:
        """Release the reward's helper processes when the cluster shuts down."""
        if hasattr(self, "reward"):
            self.reward.close()
