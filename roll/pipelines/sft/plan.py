"""The plan of an SFT run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.config.pipelines import PipelineDefinition, Written
from roll.config.plan.plan import Plan
from roll.config.plan.planning import shared_plan, training_plan, validation_data
from roll.config.roles import DataArguments
from roll.pipelines.sft.config import SFTConfig


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
