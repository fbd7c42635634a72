"""Checks of the validation sets of an RLVR configuration."""

from __future__ import annotations

import re

from roll.config.checks import Checks, check_columns, check_data_files
from roll.config.judges import section_of
from roll.config.rlvr import RLVRConfig
from roll.pipelines.rlvr.plan_validation import sharing_roles
from roll.pipelines.rlvr.planning import started_roles

SET_NAME = re.compile(r"[A-Za-z0-9][\w-]*")


def check_validation(config: RLVRConfig, checks: Checks) -> None:
    """Files, columns, lengths and names of all sets."""
    section = config.validation
    if section is None:
        return
    if section.data_args.file_name or not section.sets:
        check_data_files("validation.data_args", section.data_args, checks)
    check_columns("validation.data_args", section.data_args, checks)
    check_concurrent(config, checks)
    for name, one in section.sets.items():
        key = f"validation.sets.{name}"
        if not SET_NAME.fullmatch(name) or name in ("sampled", "greedy"):
            rule = "a set's name is part of the metrics' names: letters, digits, - and _, and not sampled or greedy"
            checks.add(key, name, rule)
        check_data_files(f"{key}.data_args", one.data_args, checks)
        check_columns(f"{key}.data_args", one.data_args, checks)
        prompt, sequence = one.prompt_length, one.sequence_length
        if (prompt is None) != (sequence is None):
            absent, present = ("prompt_length", "sequence_length")[:: 1 if prompt is None else -1]
            checks.missing(f"{key}.{absent}", f"goes with {present}: set both or none", prompt or config.prompt_length)
        elif prompt is not None and sequence is not None and sequence <= prompt:
            rule = f"must be greater than prompt_length {prompt}, or no response fits"
            checks.add(f"{key}.sequence_length", sequence, rule, prompt * 2)


def check_concurrent(config: RLVRConfig, checks: Checks) -> None:
    """Roles that are to answer and score during training share their devices with nobody."""
    key, section = "validation.concurrent", config.validation
    if section is None or not section.concurrent:
        return
    sharing = {
        name: others
        for name, others in sharing_roles(started_roles(config)).items()
        if not checks.broken(f"{section_of(name)}.device_mapping")
    }
    for name, others in sharing.items():
        rule = f"needs devices of its own for {name}, which shares some with {', '.join(others)}"
        checks.add(key, True, rule, False)


def longest_in_validation(config: RLVRConfig) -> tuple[int, int]:
    """Longest prompt and longest sequence that a set asks for; 0 where none says so."""
    sets = config.validation.sets.values() if config.validation is not None else ()
    prompts = [config.val_prompt_length, *(one.prompt_length for one in sets)]
    sequences = [config.val_sequence_length, *(one.sequence_length for one in sets)]
    return max(length or 0 for length in prompts), max(length or 0 for length in sequences)
