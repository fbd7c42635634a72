"""The SFT pipeline's configuration: supervised learning from demonstrations."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.config.names import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.reading.fields import setting
from roll.config.roles import WorkerConfig
from roll.config.run import RunConfig


@dataclass(frozen=True)
class SFTValidationConfig(WorkerConfig):
    """``validation`` of an SFT run: held-out demonstrations. Only ``data_args`` counts of the role's keys."""


@dataclass(frozen=True)
class SFTConfig(RunConfig):
    """Everything an SFT run is told. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

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
    sft_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The model that learns; its ``data_args`` name the demonstrations."""
    validation: SFTValidationConfig | None = None
    """Held-out demonstrations; null: none."""
