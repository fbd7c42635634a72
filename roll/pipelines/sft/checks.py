"""Checks of an SFT configuration across keys."""

from __future__ import annotations

from roll.config.checks.base import Checks, check_columns, check_data_files, check_resume, check_schedule
from roll.config.checks.keys import note_unread
from roll.config.checks.models import note_positions
from roll.config.checks.roles import check_roles
from roll.pipelines.sft.config import SFTConfig


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
    check_schedule("sft_train", config.sft_train, config.max_steps, checks)
    check_resume(config, checks)
    _, path = checks.pipeline.model(config, "sft_train", config.sft_train)
    note_positions("sequence_length", path, config.sequence_length, checks)
    note_unread(config, options, checks)
