"""The Ray worker of a reward: texts in, scalars out. Imports no torch, so that it starts in well under a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import cast

from roll.config.rewards import RewardConfig
from roll.distributed import Dispatch, Worker, register
from roll.rewards import RewardResult, RewardSample, apply_on_error, build_section


@dataclass(frozen=True)
class RewardSettings:
    """The service of the run that a reward's judges ask, known when the run has started; None: as in the section."""

    judge_api_url: str | None = None
    judge_api_key: str | None = field(default=None, repr=False)
    judge_model_name: str | None = None


class RewardWorker(Worker):
    """Scores finished samples of one domain."""

    settings_class = RewardSettings
    settings: RewardSettings

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> str:
        """Build the reward function that the section ``rewards.<name>`` describes; return what it says of this host."""
        section = cast(RewardConfig, self.context.role)
        judge = {key: value for key, value in asdict(self.settings).items() if value is not None}
        self.section = replace(section, **judge)
        self.reward = build_section(self.section.name, self.section)
        return self.reward.prepare()

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order. A sample that cannot be scored says why in ``error``.

        Raises:
            RewardError: a sample failed and the section says ``on_error: raise``.
        """
        results = self.reward(samples)
        assert len(results) == len(samples), f"{len(results)} rewards for {len(samples)} samples"
        return apply_on_error(results, self.section.on_error, self.section.error_value, self.section.name)

    def close(self) -> None:
        """Release the reward's helper processes when the cluster shuts down."""
        if hasattr(self, "reward"):
            self.reward.close()
