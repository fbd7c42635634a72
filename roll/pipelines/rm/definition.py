"""The definition of the rm pipeline. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.checks.base import Checks
from roll.config.losses import RewardLossConfig
from roll.config.pipelines import TRAINS, Headline, Panel, Role, Written
from roll.config.run import RunConfig
from roll.pipelines.rm.config import RMConfig, RMPlan, check_rm, plan_rm
from roll.pipelines.supervised import SupervisedDefinition

if TYPE_CHECKING:
    from roll.pipelines.rm.pipeline import RMPipeline


class RewardModel(SupervisedDefinition):
    """Reward models from rankings, grades and labels."""

    name = "rm"
    config_class = RMConfig
    roles = (Role("reward_train", TRAINS),)
    headlines = (
        Headline("reward/loss", "loss", "{:.4f}"),
        Headline("reward/acc", "accuracy"),
        Headline("val/acc", "val accuracy"),
        Headline("reward/lr", "lr", "{:.2e}"),
        Headline("system/tps", "tok/s", "{:,.0f}"),
    )
    panels = (
        Panel("Loss", ("reward/loss", "val/loss"), smooth=True),
        Panel("Ranked right", ("reward/acc", "val/acc"), unit_range=True, smooth=True),
        Panel("Scores", ("reward/chosen_score", "reward/reject_score", "reward/score"), smooth=True),
        Panel("Calibration error and correlation with length", ("val/ece", "val/length_correlation")),
    )
    reference = (
        ("Reward models (top level)", RMConfig, (RunConfig, RewardLossConfig)),
        ("Reward models: losses (top level)", RewardLossConfig, ()),
    )

    def check(self, config: RMConfig, checks: Checks) -> None:
        check_rm(config, checks)

    def plan(self, config: RMConfig, exp_name: str, written: Written) -> RMPlan:
        return plan_rm(self, config, exp_name, written)

    def pipeline(self) -> type[RMPipeline]:
        from roll.pipelines.rm.pipeline import RMPipeline

        return RMPipeline

    def longest_row(self, config: RMConfig) -> int:
        """Of a pair: all responses to a prompt are computed in one micro-batch. Longer rankings need a larger budget,
        which the first of them says."""
        return (2 if config.loss_type == "bradley_terry" else 1) * config.sequence_length
