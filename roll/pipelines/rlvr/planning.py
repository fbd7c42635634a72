"""Derives the plan of an RLVR run. Assumes that the checks have passed or reports nothing itself."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from roll.config.algorithm import estimator
from roll.config.lora import adapter_rank, uses_lora
from roll.config.model_files import model_number
from roll.config.pipelines import PipelineDefinition, Written, find_own_modules, worker_name
from roll.config.plan.plan import TrainingPlan
from roll.config.plan.planning import shared_plan, training_plan, with_cache_length
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
from roll.config.strategies.registry import backend_of, generation_strategies, with_engine_size
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.plan import RLVRPlan, validates_concurrently, validation_sets
from roll.rewards.base import RewardOptionError
from roll.rewards.composition import concurrent_calls


def needs_reference(config: RLVRConfig) -> bool:
    """KL in the loss or in the reward consumes it; ``init_kl_coef`` alone does not."""
    in_loss = config.use_kl_loss and config.kl_loss_coef > 0
    return in_loss or kl_in_reward(config) or config.enable_reference


def reference_is_actor(config: RLVRConfig) -> bool:
    """Under LoRA the actor without its adapters is the policy it started from: no model of its own is needed."""
    return needs_reference(config) and config.reference is None and uses_lora(config.actor_train.model_args)


def kl_in_reward(config: RLVRConfig) -> bool:
    return config.add_token_level_kl and config.init_kl_coef > 0


def needs_critic(config: RLVRConfig) -> bool:
    """``gae`` uses values; an estimator of the user's own gets them where there is a critic section."""
    own = "." in config.adv_estimator and config.critic is not None
    return estimator(config.adv_estimator).needs_values or own


def pg_variant(config: RLVRConfig) -> str:
    return config.actor_train.pg_variant or config.pg_variant


def actor_keys(config: RLVRConfig) -> dict[str, Any]:
    """Every top-level key as a flat mapping, with those that ``actor_train`` sets for itself: what the options of the
    actor's loss are made from."""
    own = {
        "pg_variant": config.actor_train.pg_variant,
        "topr_positive_weight": config.actor_train.topr_positive_weight,
        "topr_negative_weight": config.actor_train.topr_negative_weight,
    }
    shared = {item.name: getattr(config, item.name) for item in fields(config)}
    return shared | {key: value for key, value in own.items() if value is not None}


def reward_pretrain(config: RLVRConfig, name: str) -> str | None:
    """What a role without a model of its own has in place of ``pretrain``: critics and judges."""
    is_scorer = name in ("critic", JUDGE_ROLE) or name.startswith(OWN_PREFIX)
    return config.reward_pretrain or None if is_scorer else None


def model_path(config: RLVRConfig, name: str, role: WorkerConfig) -> str | None:
    """The role's own model, else the pipeline's."""
    own = role.model_args.model_name_or_path
    return own if own is not None else reward_pretrain(config, name) or config.pretrain or None


def rlvr_training_plans(config: RLVRConfig) -> dict[str, TrainingPlan]:
    samples = config.rollout_batch_size * config.num_return_sequences_in_group
    warmup = config.critic_warmup if needs_critic(config) else 0
    sequence, epochs = lengths(config)[1], config.ppo_epochs
    plans = {
        "actor_train": training_plan(config.actor_train, sequence, samples, epochs, max(0, config.max_steps - warmup))
    }
    if needs_critic(config) and config.critic is not None:
        plans["critic"] = training_plan(config.critic, sequence, samples, epochs, config.max_steps)
    return plans


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


def recorded_rollouts(config: RLVRConfig, output_dir: Path) -> Path:
    """The folder of ``rollout_mock``."""
    return Path(config.rollout_mock.dump_dir).expanduser() if config.rollout_mock.dump_dir else output_dir / "rollouts"


def rollout_file(folder: Path, step: int) -> Path:
    """Where the batch of a step lies."""
    return folder / f"rollout_step_{step:06d}.safetensors"


def lengths(config: RLVRConfig) -> tuple[int, int]:
    """Response and sequence length; one follows from the other."""
    if config.response_length is not None:
        return config.response_length, config.prompt_length + config.response_length
    sequence = config.sequence_length or config.prompt_length + 1
    return max(1, sequence - config.prompt_length), sequence


def max_new_tokens(config: RLVRConfig) -> int:
    """Most tokens that a response is given in training."""
    response = lengths(config)[0]
    return min(response, config.actor_infer.generating_args.max_new_tokens or response)


def uses_old_log_probs(config: RLVRConfig) -> bool:
    """More than one optimizer step on a rollout, or KL in the reward."""
    return rlvr_training_plans(config)["actor_train"].optimizer_steps_per_step > 1 or kl_in_reward(config)


def is_async(config: RLVRConfig) -> bool:
    return config.async_generation_ratio > 0


def engine_log_probs_as_old(config: RLVRConfig) -> bool:
    """The engine's log-probs stand in for the trainer's before the update: where those are forbidden, and in
    asynchronous runs, whose samples come from older weights, unless a correction compares both or something else needs
    the trainer's."""
    if config.force_disable_old_logprobs_recompute:
        return uses_old_log_probs(config) or not config.train_infer_correction
    return is_async(config) and not (config.train_infer_correction or trainer_is_old(config))


def trainer_is_old(config: RLVRConfig) -> bool:
    """Something besides the policy's loss wants the trainer's view of the samples before the update."""
    return config.enable_old_logprobs_recompute or kl_in_reward(config) or needs_old_distribution(config)


def needs_old_log_probs(config: RLVRConfig) -> bool:
    """The trainer looks at the samples before the update: something uses old log-probs, entropies or sums of squares;
    the two force keys have the last word."""
    if config.force_disable_old_logprobs_recompute or engine_log_probs_as_old(config):
        return False
    return uses_old_log_probs(config) or needs_old_distribution(config) or config.enable_old_logprobs_recompute


def needs_old_entropy(config: RLVRConfig) -> bool:
    return config.top_entropy_quantile < 1.0 or config.target_entropy is not None


def needs_sum_of_squares(config: RLVRConfig) -> bool:
    return estimator(config.adv_estimator).needs_squares


def needs_old_distribution(config: RLVRConfig) -> bool:
    """Something wants more of the trainer's distributions before the update than the log-probs of the samples."""
    return needs_old_entropy(config) or needs_sum_of_squares(config)


def needs_greedy_baseline(config: RLVRConfig) -> bool:
    return estimator(config.adv_estimator).needs_greedy


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


def with_adapter(role: WorkerConfig, config: RLVRConfig) -> WorkerConfig:
    """The engines' section, with room for the adapter that the trainer will send by itself, where they need that."""
    arguments = role.strategy_args
    room_for = backend_of(arguments.strategy_name).adapter_arguments
    if config.weight_sync.lora != "adapter" or room_for is None:
        return role
    needed = room_for(adapter_rank(config.actor_train.model_args))
    engine_args = needed | dict(arguments.strategy_config.get("engine_args") or {})
    options = {**arguments.strategy_config, "engine_args": engine_args}
    return replace(role, strategy_args=replace(arguments, strategy_config=options))


def plan_rlvr(definition: PipelineDefinition, config: RLVRConfig, exp_name: str, written: Written) -> RLVRPlan:
    """The plan of a checked RLVR configuration."""
    response, sequence = lengths(config)
    validation = config.validation
    sets = validation_sets(config, sequence, written)
    longest = max(sequence, *(one.sequence_length for one in sets), 0)
    eval_steps = config.eval_steps if validation is None or validation.eval_steps is None else validation.eval_steps
    return RLVRPlan(
        **shared_plan(definition, config, exp_name, written, partial(finished, config, longest)),
        training=rlvr_training_plans(config),
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
        needs_reference=needs_reference(config),
        needs_old_log_probs=needs_old_log_probs(config),
        needs_old_entropy=needs_old_entropy(config),
        needs_sum_of_squares=needs_sum_of_squares(config),
        engine_log_probs_as_old=engine_log_probs_as_old(config),
        async_generation_ratio=config.async_generation_ratio,
        num_additional_prompts=config.max_additional_running_prompts if config.is_use_additional_prompts else 0,
        needs_greedy_baseline=needs_greedy_baseline(config),
        needs_critic=needs_critic(config),
        pg_variant=pg_variant(config),
        norm_types=(config.norm_mean_type, config.norm_std_type),
    )
