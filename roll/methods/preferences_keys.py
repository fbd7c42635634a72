"""The DPO pipeline: its configuration, checks and definition. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from roll.config.checks.base import Checks
from roll.config.checks.roles import note_needless_reference
from roll.config.lora import uses_lora
from roll.config.losses import PreferenceLossConfig, needs_reference, preference_problems
from roll.config.pipelines import COMPUTES_LOG_PROBS, TRAINS, Headline, Panel, Role, Written
from roll.config.roles import ReferenceWorkerConfig, WorkerConfig
from roll.methods.supervised import SupervisedConfig, SupervisedDefinition, SupervisedPlan


@dataclass(frozen=True)
class DPOConfig(PreferenceLossConfig, SupervisedConfig):
    """The keys of a DPO run. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    pretrain: str = ""
    """Model that policy and reference start from: a folder or a hub name."""
    chosen_key: str = "chosen"
    """Column of the preferred response: a text, or a conversation that ends with it."""
    rejected_key: str = "rejected"
    """Column of the other response."""
    completion_key: str = "completion"
    """``kto``: column of a single response; rows without it are pairs, of which both responses are used."""
    label_key: str = "label"
    """``kto``: column that says whether that response is desirable."""
    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The model that learns; its ``data_args`` name the pairs. ``per_device_train_batch_size`` counts pairs."""
    reference: ReferenceWorkerConfig | None = None
    """The model that it is tied to; not needed with LoRA, whose base is the reference, and for ``simpo``, ``orpo``."""


def runs_reference(config: DPOConfig) -> bool:
    """The role ``reference`` is started: it is needed, and has a section."""
    return config.reference is not None and needs_reference(config)


class DPO(SupervisedDefinition[DPOConfig]):
    """Learning from preferences: DPO and its relatives."""

    name = "dpo"
    config_class = DPOConfig
    role = "actor_train"
    method_class = "roll.methods.preferences.DPO"
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
        ("DPO (top level)", DPOConfig, (SupervisedConfig, PreferenceLossConfig)),
        ("DPO: losses (top level)", PreferenceLossConfig, ()),
    )

    def check_keys(self, config: DPOConfig, checks: Checks) -> None:
        if config.chosen_key == config.rejected_key:
            checks.add("rejected_key", config.rejected_key, "is the column of the chosen responses too", "rejected")
        if not checks.broken("loss_type"):
            for key, value, rule in preference_problems(config):
                checks.add(key, value, rule)
            # Adapters leave their base as it is, which then is the reference.
            has_base = uses_lora(config.actor_train.model_args)
            if needs_reference(config) and config.reference is None and not has_base:
                rule = "is needed: a section with the strategy and devices of the model that the policy is tied to"
                checks.missing("reference", rule, "{strategy_args: {strategy_name: fsdp2_infer}, device_mapping: [0]}")
            if config.reference is not None and needs_reference(config):
                note_needless_reference(config, config.reference, checks)

    def plan(self, config: DPOConfig, exp_name: str, written: Written) -> SupervisedPlan:
        return replace(super().plan(config, exp_name, written), needs_reference=needs_reference(config))

    def models(self, config: DPOConfig) -> dict[str, WorkerConfig]:
        found = super().models(config)
        return found if runs_reference(config) else {"actor_train": found["actor_train"]}

    def effective(self, config: DPOConfig) -> dict[str, Any]:
        return {"reference": runs_reference(config)}

    def longest_row(self, config: DPOConfig) -> int:
        """Tokens of a pair: both responses are computed in one micro-batch."""
        return 2 * config.sequence_length
