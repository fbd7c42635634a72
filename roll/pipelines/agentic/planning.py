"""Derives the plan of an agentic run. Assumes that the checks have passed or reports nothing itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from roll.config.pipelines import PipelineDefinition, Written
from roll.config.plan.planning import shared_plan, with_cache_length
from roll.config.roles import GeneratingArguments, WorkerConfig
from roll.config.strategies.registry import generation_strategies, with_engine_size
from roll.pipelines.agentic.config import AgenticConfig, CustomEnvConfig, EnvManagerConfig
from roll.pipelines.agentic.plan import AgenticPlan, Context, EntryPlan, ManagerPlan, Samples
from roll.pipelines.policy import needs_critic, needs_reference, policy_plan, policy_training_plans, with_adapter


@dataclass(frozen=True)
class PlayedAs:
    """What an ``env_manager_cls`` of ROLL stands for."""

    context: Context
    samples: Samples


MANAGERS = {
    "TrajEnvManager": PlayedAs("append", "trajectory"),
    "StepEnvManager": PlayedAs("observation", "step"),
    "StepConcatEnvManager": PlayedAs("last", "step"),
    "AgentNativeStepEnvManager": PlayedAs("own", "step"),
    "ProxyEnvManager": PlayedAs("append", "trajectory"),
    "VLTrajEnvManager": PlayedAs("append", "trajectory"),
}
"""By the name of the class."""


def played_as(section: CustomEnvConfig) -> PlayedAs:
    """Context and samples of an entry: its own keys, else its ``env_manager_cls``."""
    name = (section.env_manager_cls or "TrajEnvManager").rpartition(".")[2]
    manager = MANAGERS.get(name, MANAGERS["TrajEnvManager"])
    if name == "StepConcatEnvManager" and re.search(r"{(history|current_observation)}", section.agent_template or ""):
        manager = MANAGERS["StepEnvManager"]
    if name == "ProxyEnvManager" and section.config.get("trajectory_mode") == "step":
        manager = PlayedAs("append", "step")
    context = section.context or manager.context
    own = manager.samples if section.context is None else "trajectory" if context == "append" else "step"
    return PlayedAs(context, section.samples or own)


def agent_of(section: CustomEnvConfig) -> tuple[str | None, dict[str, Any]]:
    """The agent of an entry, None for an environment, and its options with the short keys put in their place."""
    options = dict(section.agent_config)
    command = section.command
    if section.tools:
        options["tools"] = section.tools
    if command is not None:
        options["command"] = shlex.split(command) if isinstance(command, str) else command
    if section.verifier:
        options["verifier"] = section.verifier
    short = "tools" if section.tools else "black_box" if command is not None else None
    return section.agent or short, options


def partition(section: EnvManagerConfig) -> dict[str, int]:
    """Groups of each tag: as written, else equal shares, the first tags one more where they do not divide."""
    if section.num_groups_partition:
        return dict(zip(section.tags, section.num_groups_partition, strict=True))
    share, rest = divmod(section.num_env_groups, max(1, len(section.tags)))
    return {tag: share + (index < rest) for index, tag in enumerate(section.tags)}


def managers(config: AgenticConfig) -> Iterator[tuple[str, EnvManagerConfig, int]]:
    """Key, section and episodes of training, and of validation where there is one."""
    yield "train_env_manager", config.train_env_manager, config.rollout_batch_size
    if config.val_env_manager is not None:
        yield "val_env_manager", config.val_env_manager, config.val_batch_size


def used_entries(config: AgenticConfig) -> dict[str, CustomEnvConfig]:
    """The entries of ``custom_envs`` that are played, by tag."""
    tags = dict.fromkeys(tag for _, section, _ in managers(config) for tag in section.tags)
    return {tag: config.custom_envs[tag] for tag in tags if tag in config.custom_envs}


def training_sampling(config: AgenticConfig, written: Written) -> GeneratingArguments:
    """How episodes of training are sampled: ``actor_infer.generating_args``, else those of ``train_env_manager``."""
    if written("actor_infer.generating_args"):
        return config.actor_infer.generating_args
    return config.train_env_manager.generating_args


def validation_sampling(config: AgenticConfig, written: Written) -> GeneratingArguments:
    """Those of ``val_env_manager``; keys that it leaves out are as in training."""
    assert config.val_env_manager is not None
    base, own = training_sampling(config, written), config.val_env_manager.generating_args
    names = [item.name for item in fields(GeneratingArguments)]
    kept = {name: getattr(base, name) for name in names if not written(f"val_env_manager.generating_args.{name}")}
    return replace(own, **kept)


def entry_plan(config: AgenticConfig, tag: str, most_new_tokens: int | None) -> EntryPlan:
    section = config.custom_envs[tag]
    played = played_as(section)
    agent, agent_config = agent_of(section)
    new_tokens = min(section.max_tokens_per_step, config.sequence_length - 1)
    return EntryPlan(
        tag=tag,
        section=section,
        context=played.context,
        samples=played.samples,
        turns=section.max_steps,
        new_tokens=new_tokens if most_new_tokens is None else min(new_tokens, most_new_tokens),
        seconds=section.time_limit,
        agent=agent,
        agent_config=agent_config,
        concurrent=1 if section.use_thread_lock else section.max_env_step_concurrent or None,
    )


def norm_types(config: AgenticConfig) -> tuple[str | None, str | None]:
    """``norm_mean_type`` and ``norm_std_type`` of the rewards: as ``reward_normalization`` says, where it is there."""
    section = config.reward_normalization
    if section is None:
        return config.norm_mean_type, config.norm_std_type
    kind = "group" if section.grouping == "traj_group_id" else "batch"
    if section.norm_mean_type is not None or section.norm_std_type is not None:
        kinds = {None: None, "group": kind, "batch": "batch"}
        return kinds[section.norm_mean_type], kinds[section.norm_std_type]
    method = section.method or "identity"
    return (None if method == "identity" else kind), (kind if method in ("mean_std", "asym_clip") else None)


def model_roles(config: AgenticConfig) -> dict[str, WorkerConfig]:
    """The sections of roles that hold a model and that this run starts."""
    roles: dict[str, WorkerConfig] = {
        "actor_train": config.actor_train,
        "actor_infer": with_engine_size(config.actor_infer),
    }
    if config.reference is not None and needs_reference(config):
        roles["reference"] = config.reference
    if config.critic is not None and needs_critic(config):
        roles["critic"] = config.critic
    return roles


def finished(config: AgenticConfig, name: str, section: WorkerConfig) -> WorkerConfig:
    """The section of a role as its workers get it; engines have room for the longest conversation."""
    if section.strategy_args.strategy_name in generation_strategies():
        section = with_cache_length(section, config.sequence_length)
    return with_adapter(section, config) if name == "actor_infer" else section


def plan_agentic(definition: PipelineDefinition, config: AgenticConfig, exp_name: str, written: Written) -> AgenticPlan:
    """The plan of a checked configuration."""
    sampling = training_sampling(config, written)
    plans = {
        key: ManagerPlan(
            section=section,
            groups_by_tag=partition(section),
            group_size=section.group_size,
            redundancy=section.group_size_redundancy,
            episodes=episodes,
            generating_args=sampling if key == "train_env_manager" else validation_sampling(config, written),
        )
        for key, section, episodes in managers(config)
    }
    entries = {tag: entry_plan(config, tag, sampling.max_new_tokens) for tag in used_entries(config)}
    train, section = plans["train_env_manager"], config.reward_normalization
    longest = max(entries[tag].new_tokens for tag in train.groups_by_tag)
    return AgenticPlan(
        **shared_plan(definition, config, exp_name, written, partial(finished, config)),
        **policy_plan(config) | {"norm_types": norm_types(config)},
        training=policy_training_plans(config),
        max_steps=config.max_steps,
        eval_steps=max(0, config.eval_steps) if config.val_env_manager is not None else 0,
        prompts_per_step=train.groups,
        group_size=train.group_size,
        max_new_tokens=longest,
        norm_length=config.loss_norm_length or config.sequence_length,
        validates_concurrently=False,
        num_additional_prompts=0,
        entries=entries,
        train=train,
        validation=plans.get("val_env_manager"),
        normalizes_by_tag=section is not None and section.grouping == "tags",
    )
