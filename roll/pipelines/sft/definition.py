"""The definition of the SFT pipeline. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.checks.base import Checks
from roll.config.pipelines import TRAINS, Headline, Panel, Role, Written
from roll.config.run import RunConfig
from roll.pipelines.sft.config import SFTConfig, SFTPlan, check_sft, plan_sft
from roll.pipelines.supervised import SupervisedDefinition

if TYPE_CHECKING:
    from roll.pipelines.sft.pipeline import SFTPipeline


class SFT(SupervisedDefinition):
    """Supervised learning from demonstrations."""

    name = "sft"
    config_class = SFTConfig
    roles = (Role("sft_train", TRAINS),)
    headlines = (
        Headline("sft_train/loss", "loss", "{:.4f}"),
        Headline("val/loss", "validation loss", "{:.4f}"),
        Headline("sft_train/lr", "lr", "{:.2e}"),
        Headline("system/tps", "tok/s", "{:,.0f}"),
    )
    panels = (
        Panel("Loss", ("sft_train/loss",), smooth=True),
        Panel("Validation loss", ("val/loss",)),
        Panel("Learning rate", ("sft_train/lr",)),
        Panel("Gradient norm", ("sft_train/grad_norm",), smooth=True),
    )
    published_workers = ("SFTWorker",)
    reference = (("SFT (top level)", SFTConfig, (RunConfig,)),)

    def check(self, config: SFTConfig, checks: Checks) -> None:
        check_sft(config, checks)

    def plan(self, config: SFTConfig, exp_name: str, written: Written) -> SFTPlan:
        return plan_sft(self, config, exp_name, written)

    def pipeline(self) -> type[SFTPipeline]:
        from roll.pipelines.sft.pipeline import SFTPipeline

        return SFTPipeline
