"""Derives the plan of an RLVR run. Assumes that the checks have passed or reports nothing itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from roll.config.model_files import model_number
from roll.config.pipelines import PipelineDefinition, Written, find_own_modules, worker_name
from roll.config.plan.planning import shared_plan, with_cache_length
from roll.config.rewards import (
    JUDGE_ROLE,
    OWN_PREFIX,
    RewardConfig,
    judge_length,
    judge_role,
    judged_domains,
    model_inputs,
    own_judges,
    reward_workers,
)
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import own_weights
from roll.config.strategies.registry import generation_strategies, with_engine_size
from roll.pipelines.policy import (
    needs_critic,
    needs_greedy_baseline,
    needs_reference,
    policy_plan,
    policy_training_plans,
    with_adapter,
)
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.plan import RLVRPlan, validates_concurrently, validation_sets
from roll.pipelines.rlvr.teachers import TEACHER, teacher_roles
from roll.pipelines.teachers import finished_teacher
from roll.rewards.base import RewardOptionError
from roll.rewards.composition import concurrent_calls


def reward_pretrain(config: RLVRConfig, name: str) -> str | None:
    """What a role without a model of its own has in place of ``pretrain``: critics and judges."""
    is_scorer = name in ("critic", JUDGE_ROLE) or name.startswith(OWN_PREFIX)
    return config.reward_pretrain or None if is_scorer else None


def model_path(config: RLVRConfig, name: str, role: WorkerConfig) -> str | None:
    """The role's own model, else the pipeline's."""
    own = role.model_args.model_name_or_path
    return own if own is not None else reward_pretrain(config, name) or config.pretrain or None


def model_roles(config: RLVRConfig) -> dict[str, WorkerConfig]:
    """The sections of roles that hold a model and that this run starts."""
    roles: dict[str, WorkerConfig] = {
        "actor_train": config.actor_train,
        "actor_infer": with_engine_size(config.actor_infer),
    }
    if config.reference is not None and needs_reference(config):
        roles["reference"] = config.reference
    if config.critic is not None and needs_critic(config):
        roles["critic"] = config.critic
    if config.reward_model is not None and (judged_domains(config.rewards) or model_inputs(config.rewards)):
        roles[JUDGE_ROLE] = with_engine_size(config.reward_model)
    roles |= teacher_roles(config)
    return roles | {name: with_engine_size(role) for name, role in own_judges(config.rewards).items()}


def started_roles(config: RLVRConfig) -> dict[str, WorkerConfig]:
    """Every role whose workers this run starts."""
    rewards = {f"rewards.{name}": reward_workers(name, role) for name, role in config.rewards.items()}
    return {**model_roles(config), **rewards}


def reward_name(section: str, role: RewardConfig) -> str:
    """A reward domain without ``worker_cls`` is scored by the reward of its own name, or by its components."""
    if role.components:
        return " + ".join(role.components)
    return worker_name(role.worker_cls) or section.removeprefix("rewards.")


def lengths(config: RLVRConfig) -> tuple[int, int]:
    """Response and sequence length; one follows from the other."""
    return config.response_and_sequence


def max_new_tokens(config: RLVRConfig) -> int:
    """Most tokens that a response is given in training."""
    response = lengths(config)[0]
    return min(response, config.actor_infer.generating_args.max_new_tokens or response)


def finished(config: RLVRConfig, longest: int, name: str, section: WorkerConfig) -> WorkerConfig:
    """The section of a role as its workers get it.

    Args:
        longest: tokens of the longest sequence that an engine meets, validation included.
        section: with model, workers and packed lengths filled in.
    """
    if isinstance(section, RewardConfig):
        domain = name.removeprefix("rewards.")
        return replace(section, name=domain, max_concurrency=reward_calls(domain, section))
    if name in judge_roles(config):
        positions = model_number(section.model_args.model_name_or_path, "max_position_embeddings")
        return own_weights(with_cache_length(section, judge_length(longest, positions)))
    if name.partition(".")[0] == TEACHER:
        return finished_teacher(section, longest)
    if section.strategy_args.strategy_name in generation_strategies():
        section = with_cache_length(section, longest)
    return with_adapter(section, config) if name == "actor_infer" else section


def judge_roles(config: RLVRConfig) -> set[str]:
    """The roles whose engines answer judges."""
    asked = {judge_role(name, section) for name, section in config.rewards.items()}
    return {role for role in asked if role is not None}


def reward_calls(domain: str, section: RewardConfig) -> int | None:
    """Calls that a worker of the domain takes at a time; None for a reward that cannot be built, which
    :mod:`roll.preflight` refuses."""
    find_own_modules()
    try:
        return concurrent_calls(domain, section)
    except RewardOptionError:
        return None


def plan_rlvr(definition: PipelineDefinition, config: RLVRConfig, exp_name: str, written: Written) -> RLVRPlan:
    """The plan of a checked RLVR configuration."""
    response, sequence = lengths(config)
    validation = config.validation
    sets = validation_sets(config, sequence, written)
    longest = max(sequence, *(one.sequence_length for one in sets), 0)
    eval_steps = config.eval_steps if validation is None or validation.eval_steps is None else validation.eval_steps
    return RLVRPlan(
        **shared_plan(definition, config, exp_name, written, partial(finished, config, longest)),
        **policy_plan(config),
        training=policy_training_plans(config),
        max_steps=config.max_steps,
        eval_steps=max(0, eval_steps) if validation is not None else 0,
        prompts_per_step=config.rollout_batch_size,
        group_size=config.num_return_sequences_in_group,
        prompt_length=config.prompt_length,
        response_length=response,
        norm_length=config.loss_norm_length or response,
        max_new_tokens=max_new_tokens(config),
        validation_sets=sets,
        validates_concurrently=validates_concurrently(config, started_roles(config)),
        num_additional_prompts=config.max_additional_running_prompts if config.is_use_additional_prompts else 0,
        needs_greedy_baseline=needs_greedy_baseline(config),
    )
