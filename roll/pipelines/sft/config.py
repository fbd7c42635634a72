"""The SFT pipeline's configuration, plan and checks: supervised learning from demonstrations. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from roll.config.checks.base import Checks
from roll.config.checks.roles import check_roles
from roll.config.names import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.pipelines import PipelineDefinition, Written
from roll.config.reading.fields import setting
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.run import RunConfig
from roll.pipelines.supervised import SupervisedPlan, check_rows, check_supervised, supervised_plan


@dataclass(frozen=True)
class SFTValidationConfig(WorkerConfig):
    """``validation`` of an SFT run: held-out demonstrations. Only ``data_args`` counts of the role's keys."""


@dataclass(frozen=True)
class SFTConfig(RunConfig):
    """The keys of an SFT run. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    pretrain: str = ""
    """Model to start from: a folder or a hub name."""
    max_steps: int | None = setting(None, ge=1)
    """Optimizer steps; null: ``num_train_epochs`` passes over the data."""
    sequence_length: int = setting(1024, ge=2)
    """Longest prompt plus response in tokens; longer rows are left out."""
    global_template: str | None = setting(None, choices=TEMPLATES, endings=TEMPLATE_ENDINGS)
    """Chat template; null: ``data_args.template`` of the role."""
    prompt_key: str | None = None
    """Column of the instruction; null: ``messages`` or ``prompt`` of ``data_args``."""
    query_key: str | None = None
    """Column of further input, appended to the instruction."""
    response_key: str | None = None
    """Column of the response; null: ``data_args.response``."""
    train_on: Literal["last", "assistant"] = "last"
    """Which turns of a conversation carry the loss: the ``last`` response, in front of which all is prompt; or every
    turn of the ``assistant``, tool calls included, with tools from the column ``tools``."""
    sft_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The model that learns; its ``data_args`` name the demonstrations."""
    validation: SFTValidationConfig | None = None
    """Held-out demonstrations; null: none."""


@dataclass(frozen=True)
class SFTPlan(SupervisedPlan):
    """Plan of an SFT run."""


def sft_data(config: SFTConfig) -> DataArguments:
    """The training data section, with the columns that the top-level keys name."""
    own = config.sft_train.data_args
    return replace(own, prompt=config.prompt_key or own.prompt, response=config.response_key or own.response)


def plan_sft(definition: PipelineDefinition, config: SFTConfig, exp_name: str, written: Written) -> SFTPlan:
    """The plan of a checked SFT configuration."""
    return SFTPlan(**supervised_plan(definition, config, exp_name, written, "sft_train", sft_data(config)))


def check_sft(config: SFTConfig, checks: Checks) -> None:
    """Every check; mistakes and notes go to ``checks.problems``."""
    options = check_roles(config, checks)
    check_rows(config, "sft_train", checks)
    if config.query_key is not None and config.prompt_key is None:
        checks.missing("prompt_key", "goes with query_key: the column that it is appended to", "instruction")
    if config.query_key is not None and config.train_on == "assistant":
        checks.add("query_key", config.query_key, "goes with train_on: last: conversations have no further input", "~")
    if config.sft_train.data_args.streaming:
        if config.max_steps is None:
            checks.missing(
                "max_steps", "is needed with data_args.streaming: nobody knows how many rows there are", 1000
            )
        if config.sft_train.data_args.curriculum is not None:
            rule = "goes with streaming: false: a stream does not know the difficulties of later rows"
            checks.add("sft_train.data_args.curriculum", config.sft_train.data_args.curriculum.column, rule, "~")
    check_supervised(config, "sft_train", options, checks)
