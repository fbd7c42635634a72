"""The SFT pipeline's configuration, plan and checks: supervised learning from demonstrations. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from roll.config.checks.base import Checks, check_columns, check_data_files, check_resume, check_schedule
from roll.config.checks.keys import note_unread
from roll.config.checks.models import note_positions
from roll.config.checks.roles import check_roles
from roll.config.names import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.pipelines import PipelineDefinition, Written
from roll.config.plan.plan import Plan
from roll.config.plan.planning import shared_plan, training_plan, validation_data
from roll.config.reading.fields import setting
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.run import RunConfig


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
class SFTPlan(Plan):
    """Plan of an SFT run. A step is an optimizer step."""

    global_batch_size: int
    """Samples of one optimizer step."""
    data_args: DataArguments
    """The training data section, columns named by ``prompt_key`` and ``response_key`` included."""
    val_data_args: DataArguments | None
    """The validation's; columns and template that it leaves out are those of ``sft_train``."""


def sft_data(config: SFTConfig) -> DataArguments:
    """The training data section, with the columns that the top-level keys name."""
    own = config.sft_train.data_args
    return replace(own, prompt=config.prompt_key or own.prompt, response=config.response_key or own.response)


def plan_sft(definition: PipelineDefinition, config: SFTConfig, exp_name: str, written: Written) -> SFTPlan:
    """The plan of a checked SFT configuration."""
    data, validation = sft_data(config), config.validation
    training = training_plan(config.sft_train, config.sequence_length, 0, 1, config.max_steps)
    training = replace(training, samples_per_step=training.mini_batch_size)
    return SFTPlan(
        **shared_plan(definition, config, exp_name, written),
        training={"sft_train": training},
        max_steps=config.max_steps,
        eval_steps=max(0, config.eval_steps) if config.validation is not None else 0,
        global_batch_size=training.mini_batch_size,
        data_args=data,
        val_data_args=None
        if validation is None
        else validation_data("validation.data_args", validation.data_args, data, written),
    )


def check_sft(config: SFTConfig, checks: Checks) -> None:
    """Every check; mistakes and notes go to ``checks.problems``."""
    options = check_roles(config, checks)
    check_data_files("sft_train.data_args", config.sft_train.data_args, checks)
    check_columns("sft_train.data_args", config.sft_train.data_args, checks)
    if config.validation is not None:
        check_data_files("validation.data_args", config.validation.data_args, checks)
        check_columns("validation.data_args", config.validation.data_args, checks)
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
    check_schedule("sft_train", config.sft_train, config.max_steps, checks)
    check_resume(config, checks)
    _, path = checks.pipeline.model(config, "sft_train", config.sft_train)
    note_positions("sequence_length", path, config.sequence_length, checks)
    note_unread(config, options, checks)
