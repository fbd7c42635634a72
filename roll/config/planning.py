"""Derives a plan from a configuration. Assumes that the checks have passed or reports nothing itself."""

from __future__ import annotations

from dataclasses import fields, replace
from math import ceil
from pathlib import Path
from typing import Any

from roll.config.engine_args import SIZE_KEYS, with_engine_size
from roll.config.errors import Problems
from roll.config.judges import JUDGE_ROLE, OWN_PREFIX, judged_domains, own_judges, reward_workers
from roll.config.lora import uses_lora
from roll.config.megatron import ranks_of_a_replica
from roll.config.micro_batching import micro_batching, with_packed_lengths
from roll.config.names import (
    GREEDY_BASELINE_ESTIMATORS,
    PUBLISHED_PREFIX,
    PUBLISHED_REWARDS,
    PUBLISHED_WORKERS,
    SQUARES_ESTIMATORS,
)
from roll.config.plan import Folders, RLVRPlan, RolePlan, SFTPlan, TrainingPlan
from roll.config.planning_validation import Written, beside_training, validation_data, validation_sets
from roll.config.reward_models import model_inputs
from roll.config.rewards import RewardConfig
from roll.config.rlvr import RLVRConfig
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.run import RunConfig
from roll.config.sft import SFTConfig
from roll.config.strategy import MegatronStrategyConfig, ShardedStrategyConfig, read_strategy_config


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
    return config.adv_estimator == "gae" or own


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


def model_path(config: RLVRConfig | SFTConfig, name: str, role: WorkerConfig) -> str | None:
    """The role's own model, else the pipeline's."""
    own = role.model_args.model_name_or_path
    if own is not None:
        return own
    return reward_pretrain(config, name) or config.pretrain or None


def reward_pretrain(config: RLVRConfig | SFTConfig, name: str) -> str | None:
    """What a role without a model of its own has in place of ``pretrain``: critics and judges."""
    if isinstance(config, SFTConfig) or not (name in ("critic", JUDGE_ROLE) or name.startswith(OWN_PREFIX)):
        return None
    return config.reward_pretrain or None


def world_size(role: WorkerConfig) -> int:
    """One worker per :func:`devices_per_worker` devices; without devices, ``world_size`` workers."""
    if role.device_mapping is not None:
        return max(1, len(role.device_mapping) // devices_per_worker(role))
    return role.world_size or 1


def devices_per_worker(role: WorkerConfig) -> int:
    """An engine's own size, else ``num_gpus_per_worker``."""
    role = with_engine_size(role)
    options = read_strategy_config(role.strategy_args, role.name, Problems())
    if role.strategy_args.strategy_name in SIZE_KEYS and options is not None:
        return options.devices_per_worker
    return role.num_gpus_per_worker


def data_parallel_size(role: WorkerConfig) -> int:
    """Ranks that compute different rows: all of them, unless the model or each sequence is cut over some."""
    options = read_strategy_config(role.strategy_args, role.name, Problems())
    cut = ranks_of_a_replica(options) if isinstance(options, MegatronStrategyConfig) else 1
    shared = role.model_args.ulysses_size if isinstance(options, ShardedStrategyConfig) else 1
    return max(1, world_size(role) // (cut * shared))


def training_plan(
    role: WorkerConfig, sequence_length: int, samples: int, epochs: int, num_steps: int | None
) -> TrainingPlan:
    arguments = role.training_args
    rule = micro_batching(with_packed_lengths(role, sequence_length), trains=True)
    return TrainingPlan(
        samples_per_step=samples,
        micro_batch_size=arguments.per_device_train_batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        dp_size=data_parallel_size(role),
        epochs=epochs,
        num_steps=num_steps,
        rule=rule,
    )


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


def model_roles(config: RLVRConfig | SFTConfig) -> dict[str, WorkerConfig]:
    """The sections of roles that hold a model and that this run starts."""
    if isinstance(config, SFTConfig):
        return {"sft_train": config.sft_train}
    roles: dict[str, WorkerConfig] = {
        "actor_train": config.actor_train,
        "actor_infer": with_engine_size(config.actor_infer),
    }
    if config.reference is not None and needs_reference(config):
        roles["reference"] = config.reference
    if config.critic is not None and needs_critic(config):
        roles["critic"] = config.critic
    if config.reward_model is not None and (judged_domains(config) or model_inputs(config)):
        roles[JUDGE_ROLE] = with_engine_size(config.reward_model)
    return roles | {name: with_engine_size(role) for name, role in own_judges(config).items()}


def role_plans(config: RLVRConfig | SFTConfig) -> dict[str, RolePlan]:
    models, sections = model_roles(config), started_roles(config)
    sequence = config.sequence_length if isinstance(config, SFTConfig) else lengths(config)[1]
    plans = {}
    for name, role in sections.items():
        others = [other for other in sections if other != name and shares_devices(role, sections[other])]
        is_model = name in models
        plans[name] = RolePlan(
            name=name,
            strategy_name=role.strategy_args.strategy_name if is_model else None,
            device_mapping=tuple(role.device_mapping or ()),
            num_gpus_per_worker=devices_per_worker(role),
            world_size=world_size(role),
            dp_size=data_parallel_size(role),
            colocated_with=tuple(others),
            model_path=model_path(config, name, role) if is_model else None,
            sequence_length=sequence,
            forward_rule=micro_batching(with_packed_lengths(role, sequence), trains=False),
            worker_cls=reward_name(name, role) if isinstance(role, RewardConfig) else worker_name(role.worker_cls),
        )
    return plans


def worker_name(written: str | None) -> str | None:
    """A worker or reward under this project's name: published class paths become short names, or null for the
    classes that stand for a role's own worker."""
    if written is None or not written.startswith(PUBLISHED_PREFIX):
        return written
    class_name = written.rpartition(".")[2]
    return None if class_name in PUBLISHED_WORKERS else PUBLISHED_REWARDS.get(class_name, written)


def reward_name(section: str, role: RewardConfig) -> str:
    """A reward domain without ``worker_cls`` is scored by the reward of its own name, or by its components."""
    if role.components:
        return " + ".join(role.components)
    return worker_name(role.worker_cls) or section.removeprefix("rewards.")


def shares_devices(one: WorkerConfig, other: WorkerConfig) -> bool:
    return bool(set(one.device_mapping or ()) & set(other.device_mapping or ()))


def started_roles(config: RLVRConfig | SFTConfig) -> dict[str, WorkerConfig]:
    """Every role whose workers this run starts."""
    rewards = config.rewards if isinstance(config, RLVRConfig) else {}
    return {**model_roles(config), **{f"rewards.{name}": reward_workers(name, role) for name, role in rewards.items()}}


def node_shape(config: RLVRConfig | SFTConfig, written: Written) -> tuple[int, int]:
    """Devices of a node and number of nodes. A node is no larger than the ids ask for unless the file says so."""
    ids = [device for role in started_roles(config).values() for device in role.device_mapping or ()]
    needed = max(ids, default=0) + 1
    per_node = config.num_gpus_per_node
    if not written("num_gpus_per_node"):
        per_node = min(per_node, needed)
    return per_node, config.num_nodes or ceil(needed / per_node)


def folders(config: RunConfig, exp_name: str) -> Folders:
    """As written; the shared default folders get a folder of the experiment's own."""
    output, logs = Path(config.output_dir), Path(config.logging_dir)
    if output == Path("output"):
        output = output / exp_name
    if logs == Path("output/logs"):
        logs = logs / exp_name
    dump = Path(config.rollout_dump_dir) if config.rollout_dump_dir else None
    return Folders(output, output / "checkpoints", logs, dump)


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
    return config.adv_estimator in SQUARES_ESTIMATORS


def needs_old_distribution(config: RLVRConfig) -> bool:
    """Something wants more of the trainer's distributions before the update than the log-probs of the samples."""
    return needs_old_entropy(config) or needs_sum_of_squares(config)


def needs_greedy_baseline(config: RLVRConfig) -> bool:
    return config.adv_estimator in GREEDY_BASELINE_ESTIMATORS


def plan_rlvr(config: RLVRConfig, exp_name: str, written: Written) -> RLVRPlan:
    """The plan of a checked RLVR configuration."""
    response, sequence = lengths(config)
    validation = config.validation
    per_node, num_nodes = node_shape(config, written)
    eval_steps = config.eval_steps if validation is None or validation.eval_steps is None else validation.eval_steps
    return RLVRPlan(
        pipeline="rlvr",
        exp_name=exp_name,
        roles=role_plans(config),
        training=rlvr_training_plans(config),
        num_devices_per_node=per_node,
        num_nodes=num_nodes,
        folders=folders(config, exp_name),
        max_steps=config.max_steps,
        save_steps=max(0, config.save_steps),
        eval_steps=max(0, eval_steps) if validation is not None else 0,
        sequence_length=sequence,
        prompts_per_step=config.rollout_batch_size,
        group_size=config.num_return_sequences_in_group,
        prompt_length=config.prompt_length,
        response_length=response,
        norm_length=config.loss_norm_length or response,
        max_new_tokens=max_new_tokens(config),
        validation_sets=validation_sets(config, sequence, written),
        validates_beside_training=beside_training(config, started_roles(config)),
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


def sft_data(config: SFTConfig) -> DataArguments:
    """The training data section, with the columns that the top-level keys name."""
    own = config.sft_train.data_args
    return replace(own, prompt=config.prompt_key or own.prompt, response=config.response_key or own.response)


def plan_sft(config: SFTConfig, exp_name: str, written: Written) -> SFTPlan:
    """The plan of a checked SFT configuration."""
    data, validation = sft_data(config), config.validation
    training = training_plan(config.sft_train, config.sequence_length, 0, 1, config.max_steps)
    training = replace(training, samples_per_step=training.mini_batch_size)
    per_node, num_nodes = node_shape(config, written)
    return SFTPlan(
        pipeline="sft",
        exp_name=exp_name,
        roles=role_plans(config),
        training={"sft_train": training},
        num_devices_per_node=per_node,
        num_nodes=num_nodes,
        folders=folders(config, exp_name),
        max_steps=config.max_steps,
        save_steps=max(0, config.save_steps),
        eval_steps=max(0, config.eval_steps) if config.validation is not None else 0,
        sequence_length=config.sequence_length,
        global_batch_size=training.mini_batch_size,
        data_args=data,
        val_data_args=None
        if validation is None
        else validation_data("validation.data_args", validation.data_args, data, written),
    )
