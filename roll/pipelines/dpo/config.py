"""The DPO pipeline's configuration, plan and checks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.config.checks.base import Checks
from roll.config.checks.roles import check_roles
from roll.config.lora import uses_lora
from roll.config.losses import PreferenceLossConfig, needs_reference, preference_problems
from roll.config.names import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.pipelines import PipelineDefinition, Written
from roll.config.reading.fields import setting
from roll.config.roles import ReferenceWorkerConfig, WorkerConfig
from roll.config.run import RunConfig
from roll.pipelines.supervised import SupervisedPlan, check_rows, check_supervised, supervised_plan


@dataclass(frozen=True)
class DPOValidationConfig(WorkerConfig):
    """``validation`` of a DPO run: held-out pairs. Only ``data_args`` counts of the role's keys."""


@dataclass(frozen=True)
class DPOConfig(PreferenceLossConfig, RunConfig):
    """The keys of a DPO run. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    pretrain: str = ""
    """Model that policy and reference start from: a folder or a hub name."""
    max_steps: int | None = setting(None, ge=1)
    """Optimizer steps; null: ``num_train_epochs`` passes over the data."""
    sequence_length: int = setting(1024, ge=2)
    """Most tokens of a prompt with one response; pairs with a longer side are left out and counted."""
    global_template: str | None = setting(None, choices=TEMPLATES, endings=TEMPLATE_ENDINGS)
    """Chat template; null: ``data_args.template`` of the role."""
    chosen_key: str = "chosen"
    """Column of the preferred response: a text, or a conversation that ends with it."""
    rejected_key: str = "rejected"
    """Column of the other response."""
    completion_key: str = "completion"
    """``kto``: column of a single response; rows without it are pairs, of which both responses are used."""
    label_key: str = "label"
    """``kto``: column that says whether that response is desirable."""
    cache_reference: bool = True
    """Keep the reference's log-probs of each pair (4 bytes a response token, in the driver) for later epochs."""
    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The model that learns; its ``data_args`` name the pairs. ``per_device_train_batch_size`` counts pairs."""
    reference: ReferenceWorkerConfig | None = None
    """The model that it is tied to; not needed with LoRA, whose base is the reference, and for ``simpo``, ``orpo``."""
    validation: DPOValidationConfig | None = None
    """Held-out pairs; null: none."""


@dataclass(frozen=True)
class DPOPlan(SupervisedPlan):
    """Plan of a DPO run."""

    needs_reference: bool
    """The loss compares the policy with a reference."""


def runs_reference(config: DPOConfig) -> bool:
    """True if the role ``reference`` is started: it is needed, and there is no LoRA base that could stand for it."""
    return config.reference is not None and needs_reference(config) and not has_base(config)


def has_base(config: DPOConfig) -> bool:
    """True for a LoRA policy whose base is the reference, since no other model is named."""
    named = config.reference is not None and config.reference.model_args.model_name_or_path is not None
    return uses_lora(config.actor_train.model_args) and not named


def plan_dpo(definition: PipelineDefinition, config: DPOConfig, exp_name: str, written: Written) -> DPOPlan:
    """The plan of a checked DPO configuration."""
    shared = supervised_plan(definition, config, exp_name, written, "actor_train", config.actor_train.data_args)
    return DPOPlan(**shared, needs_reference=needs_reference(config))


def check_dpo(config: DPOConfig, checks: Checks) -> None:
    """Every check; mistakes and notes go to ``checks.problems``."""
    options = check_roles(config, checks)
    check_rows(config, "actor_train", checks)
    if config.chosen_key == config.rejected_key:
        checks.add("rejected_key", config.rejected_key, "is the column of the chosen responses too", "rejected")
    if not checks.broken("loss_type"):
        for key, value, rule in preference_problems(config):
            checks.add(key, value, rule)
        if needs_reference(config) and config.reference is None and not has_base(config):
            rule = "is needed: a section with the strategy and devices of the model that the policy is tied to"
            checks.missing("reference", rule, "{strategy_args: {strategy_name: fsdp2_infer}, device_mapping: [0]}")
    check_supervised(config, "actor_train", options, checks)
