"""The plan of an RLVR run, and its sentences: batch arithmetic, lengths, passes, how far generation runs ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from roll.config.pipelines import Written
from roll.config.plan.plan import RunAhead
from roll.config.plan.planning import validation_data
from roll.config.reading.errors import count
from roll.config.roles import DataArguments, GeneratingArguments, WorkerConfig
from roll.pipelines.policy import PolicyPlan
from roll.pipelines.rlvr.config import RLVRConfig, ValidationSetConfig
from roll.pipelines.rlvr.teachers import TEACHER


@dataclass(frozen=True)
class ValidationSet:
    """One set of questions, and how they are answered."""

    name: str
    """Empty for the set of ``validation.data_args``."""
    data_args: DataArguments
    """What the set leaves out of columns and template is filled in."""
    generating_args: GeneratingArguments
    prompt_length: int
    sequence_length: int
    max_new_tokens: int
    samples_per_prompt: int
    greedy: bool
    """Every question is also answered greedily."""


@dataclass(frozen=True)
class RLVRPlan(PolicyPlan):
    """Plan of an RLVR run."""

    prompt_length: int
    response_length: int
    validation_sets: tuple[ValidationSet, ...]
    needs_greedy_baseline: bool
    """Every prompt is answered once more, greedily, for the advantages."""

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence that an engine meets, validation included."""
        return max(self.sequence_length, *(one.sequence_length for one in self.validation_sets), 0)


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
    return {
        name: others
        for name, others in sharing.items()
        if others and name.partition(".")[0] not in (*TRAINING_ROLES, TEACHER)
    }


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


def batch_facts(plan: RLVRPlan) -> list[tuple[str, str]]:
    samples = count(plan.samples_per_step, "sample")
    total = f"{count(plan.prompts_per_step, 'prompt')} x {plan.group_size} = {samples}"
    return [
        ("batch" if name == "actor_train" else name, f"{total}; {training.sentence()}")
        for name, training in plan.training.items()
    ]


def rlvr_facts(plan: RLVRPlan) -> list[tuple[str, str]]:
    lengths = (
        f"prompt {plan.prompt_length} + response {plan.response_length} = {plan.sequence_length} tokens"
        f" (at most {plan.max_new_tokens} new)"
    )
    for one in plan.validation_sets if plan.eval_steps else ():
        response = one.sequence_length - one.prompt_length
        lengths += (
            f"; validation {one.name}{' ' if one.name else ''}{one.prompt_length} + {response} = {one.sequence_length}"
            f" (at most {one.max_new_tokens} new)"
        )
    reference = "reference log-probs" + ("" if "reference" in plan.roles else " (actor_train without its adapters)")
    passes = {
        reference: plan.needs_reference,
        "greedy baseline": plan.needs_greedy_baseline,
        "old log-probs": plan.needs_old_log_probs,
        "teachers": any(name.partition(".")[0] == TEACHER for name in plan.roles),
        "values": plan.needs_critic,
    }
    needed = ", ".join(name for name, needed in passes.items() if needed) or "none"
    facts = [("lengths", lengths), ("passes", f"{needed} (in addition to generation and training)")]
    return [*facts, ("ahead", run_ahead_sentence(plan))] if plan.is_async else facts


def run_ahead_sentence(plan: RLVRPlan) -> str:
    """Say how far generation may run ahead, how old samples may be, and which policy the loss takes for theirs."""
    ahead = RunAhead.of(plan.async_generation_ratio, plan.prompts_per_step, plan.num_additional_prompts)
    steps = "1 step" if plan.async_generation_ratio == 1 else f"{plan.async_generation_ratio:g} steps"
    age = count(ahead.max_lag, "version")
    old = "; ratios against the engine's log-probs" if plan.engine_log_probs_as_old else ""
    prompts = f"{count(ahead.capacity, 'prompt')} in flight or waiting at a time"
    turns = "; stopped while others have its devices" if plan.engines_take_turns else ""
    return f"generation up to {steps}: {prompts}; samples at most {age} of the weights old{turns}{old}"
