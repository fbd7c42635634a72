"""The definition of the DPO pipeline. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks
from roll.config.losses import PreferenceLossConfig
from roll.config.pipelines import (
    COMPUTES_LOG_PROBS,
    TRAINS,
    Headline,
    Panel,
    Role,
    Written,
)
from roll.config.roles import WorkerConfig
from roll.config.run import RunConfig
from roll.pipelines.dpo.config import DPOConfig, DPOPlan, check_dpo, plan_dpo, runs_reference
from roll.pipelines.supervised import SupervisedDefinition

if TYPE_CHECKING:
    from roll.pipelines.dpo.pipeline import DPOPipeline


class DPO(SupervisedDefinition):
    """Learning from preferences: DPO and its relatives."""

    name = "dpo"
    config_class = DPOConfig
    roles = (Role("actor_train", TRAINS), Role("reference", COMPUTES_LOG_PROBS, optional=True))
    headlines = (
        Headline("actor/loss", "loss", "{:.4f}"),
        Headline("actor/acc", "accuracy"),
        Headline("val/acc", "val accuracy"),
        Headline("actor/lr", "lr", "{:.2e}"),
        Headline("system/tps", "tok/s", "{:,.0f}"),
    )
    panels = (
        Panel("Loss", ("actor/loss", "val/loss"), smooth=True),
        Panel("Pairs ranked right", ("actor/acc", "val/acc"), unit_range=True, smooth=True),
        Panel("Implicit rewards", ("actor/chosen_reward", "actor/reject_reward"), smooth=True),
        Panel("Log-prob of the chosen response", ("actor/chosen_log_prob",), smooth=True),
    )
    published_workers = ("ActorWorker",)
    reference = (
        ("DPO (top level)", DPOConfig, (RunConfig, PreferenceLossConfig)),
        ("DPO: losses (top level)", PreferenceLossConfig, ()),
    )

    def check(self, config: DPOConfig, checks: Checks) -> None:
        check_dpo(config, checks)

    def plan(self, config: DPOConfig, exp_name: str, written: Written) -> DPOPlan:
        return plan_dpo(self, config, exp_name, written)

    def pipeline(self) -> type[DPOPipeline]:
        from roll.pipelines.dpo.pipeline import DPOPipeline

        return DPOPipeline

    def models(self, config: DPOConfig) -> dict[str, WorkerConfig]:
        found = super().models(config)
        return found if runs_reference(config) else {"actor_train": found["actor_train"]}

    def effective(self, config: DPOConfig) -> dict[str, Any]:
        return {"reference": runs_reference(config)}

    def longest_row(self, config: DPOConfig) -> int:
        """Of a pair: both responses are computed in one micro-batch."""
        return 2 * config.sequence_length
