"""Derives the validation sets of a run: what each leaves out is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from roll.config.definition import Written
from roll.config.planning import validation_data
from roll.config.rlvr import RLVRConfig
from roll.config.roles import GeneratingArguments, WorkerConfig
from roll.config.validation import ValidationSetConfig
from roll.pipelines.rlvr.plan import ValidationSet

TRAINING_ROLES = ("actor_train", "reference", "critic")
"""Those that a validation asks nothing of."""


def validation_sets(config: RLVRConfig, sequence_length: int, written: Written) -> tuple[ValidationSet, ...]:
    """The set of ``validation.data_args``, if it has files, and those of ``validation.sets``."""
    section = config.validation
    if section is None:
        return ()
    data = validation_data("validation.data_args", section.data_args, config.actor_train.data_args, written)
    common = ValidationSetConfig(data, section.generating_args, section.greedy)
    found = [planned_set("", common, config, sequence_length)] if data.file_name else []
    for name, own in section.sets.items():
        key = f"validation.sets.{name}"
        filled = replace(
            own,
            data_args=validation_data(f"{key}.data_args", own.data_args, data, written),
            generating_args=generating(f"{key}.generating_args", own.generating_args, section.generating_args, written),
            greedy=section.greedy if own.greedy is None else own.greedy,
        )
        found.append(planned_set(name, filled, config, sequence_length))
    return tuple(found)


def sharing_roles(roles: Mapping[str, WorkerConfig]) -> dict[str, list[str]]:
    """The roles that answer or score questions and share devices, each with those that it shares them with: none of
    them can be at work whenever it likes."""
    devices = {name: set(role.device_mapping or ()) for name, role in roles.items()}
    sharing = {name: [other for other in roles if other != name and devices[name] & devices[other]] for name in roles}
    return {name: others for name, others in sharing.items() if others and name not in TRAINING_ROLES}


def validates_concurrently(config: RLVRConfig, roles: Mapping[str, WorkerConfig]) -> bool:
    """Whether validation goes on while ``roles`` train: where devices allow it, unless the file says no."""
    section = config.validation
    return section is not None and section.concurrent is not False and not sharing_roles(roles)


def generating(key: str, own: GeneratingArguments, base: GeneratingArguments, written: Written) -> GeneratingArguments:
    """The sampling section at ``key``; keys that it leaves out are those of ``base``."""
    names = [item.name for item in fields(GeneratingArguments)]
    return replace(own, **{name: getattr(base, name) for name in names if not written(f"{key}.{name}")})


def planned_set(name: str, filled: ValidationSetConfig, config: RLVRConfig, sequence_length: int) -> ValidationSet:
    prompt = filled.prompt_length or config.val_prompt_length or config.prompt_length
    sequence = filled.sequence_length or config.val_sequence_length or sequence_length
    room, arguments = sequence - prompt, filled.generating_args
    return ValidationSet(
        name=name,
        data_args=filled.data_args,
        generating_args=arguments,
        prompt_length=prompt,
        sequence_length=sequence,
        max_new_tokens=min(room, arguments.max_new_tokens or room),
        samples_per_prompt=arguments.num_return_sequences or 1,
        greedy=bool(filled.greedy),
    )
