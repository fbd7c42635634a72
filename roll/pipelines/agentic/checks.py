"""Checks of an agentic configuration across keys."""

from __future__ import annotations

from roll.config.checks.base import Checks, check_schedule, check_template_file
from roll.config.checks.keys import note_unread
from roll.config.checks.roles import check_engine_length, check_roles, note_positions
from roll.config.choices import traits
from roll.config.plan.planning import shares_devices
from roll.config.reading.errors import closest, count
from roll.config.rewards import LLM_JUDGE, PUBLISHED_PREFIX, generates_otherwise
from roll.config.strategies.base import StrategyConfig
from roll.config.strategies.registry import backend_of
from roll.methods.policy_plan import check_method, is_async, policy_training_plans
from roll.pipelines.agentic.checks_entries import check_entries
from roll.pipelines.agentic.config import (
    REWARD,
    AgenticConfig,
    EntryPlan,
    EnvManagerConfig,
    agent_of,
    entry_plan,
    judged_entries,
    managers,
    model_roles,
    training_sampling,
    used_entries,
)
from roll.pipelines.policy_checks import check_policy


def check_agentic(config: AgenticConfig, checks: Checks) -> None:
    if not checks.written("actor_train"):
        rule = "is needed: to play without training, run `roll evaluate` on the file"
        checks.missing("actor_train", rule, "actor_train.device_mapping: [0]")
        return
    options = check_roles(config, checks)
    sampled_by = "actor_infer" if checks.written("actor_infer.generating_args") else "train_env_manager"
    sampling = training_sampling(config, checks.written)
    check_method(config, checks, sampling, f"{sampled_by}.generating_args", "agentic", config.train_env_manager.tags)
    check_managers(config, checks)
    check_entries(config, checks)
    check_lengths(config, options, checks.pipeline.default_model(config, "actor_train")[1], checks)
    check_batches(config, checks)
    name, row = config.estimator.name, traits(config.estimator)
    if row.needs_greedy:
        rule = "cannot be used with episodes: its greedy baseline would be an episode of its own"
        checks.add("estimator", name, rule, "grpo")
    if config.estimator.get("weights") is not None:
        rule = "cannot be used with episodes: they bring one number, not the numbers of several rewards"
        checks.add("estimator", name, rule, "grpo")
    if name == "gigpo" and config.group_size < 2:
        checks.note(config.group_key, "1 with gigpo: no other episode meets the same states, so steps teach nothing")
    check_trained_roles(config, checks)
    check_normalization(config, checks)
    entries = training_entries(config, checks)
    check_policy(config, max((entry.turns * entry.new_tokens for entry in entries), default=1), checks)
    note_devices(config, checks)
    check_template_file("global_template", config.global_template, checks)
    check_judge(config, checks)
    key, mode = "actor_train.router_replay.mode", config.actor_train.router_replay.mode
    if mode == "R3" and not checks.broken(key):
        checks.problems.not_available(key, mode, "the engine's routes of several turns; R2 replays the trainer's", "R2")
    note_unread(config, options, checks)


def check_managers(config: AgenticConfig, checks: Checks) -> None:
    """Tags, shares and sizes of groups, for training and validation."""
    for key, section, episodes in managers(config):
        if checks.broken(key):
            continue
        check_tags(key, section, config, checks)
        check_shares(key, section, checks)
        if (section.group_filter_cls or "").startswith(PUBLISHED_PREFIX):
            rule = "is a class of another code base; group_filter_config has filters by mean and spread of a group"
            checks.add(f"{key}.group_filter_cls", section.group_filter_cls, rule, "~")
        if section.system_envs and not section.max_env_num_per_worker:
            text = "has no effect without max_env_num_per_worker: the environments live in the driver's process"
            checks.note(f"{key}.system_envs", text)
        batch = "rollout_batch_size" if key == "train_env_manager" else "val_batch_size"
        size = section.group_size
        if episodes % size and not checks.broken(batch):
            rule = f"must be a multiple of {key}.group_size {size}: whole groups of episodes make up a batch"
            checks.add(batch, episodes, rule, max(1, round(episodes / size)) * size)
    validation = config.val_env_manager
    if validation is not None:
        for name in ("group_filter_cls", "group_filter_config", "group_size_redundancy"):
            if checks.written(f"val_env_manager.{name}") and getattr(validation, name):
                checks.note(f"val_env_manager.{name}", "has no effect: every episode of a validation counts")


def check_tags(key: str, section: EnvManagerConfig, config: AgenticConfig, checks: Checks) -> None:
    known = tuple(config.custom_envs)
    if not section.tags:
        rule = "is needed: which of custom_envs are played"
        checks.missing(f"{key}.tags", rule, f"[{known[0]}]" if known else "[lake]")
    for tag in section.tags:
        if tag not in config.custom_envs:
            there = f"there are {', '.join(known)}" if known else "it is empty"
            near = closest(tag, known) or (known[0] if known else "lake")
            checks.add(f"{key}.tags", section.tags, f"{tag} is not among custom_envs: {there}", f"[{near}]")
    doubles = sorted({tag for tag in section.tags if section.tags.count(tag) > 1})
    if doubles:
        checks.add(f"{key}.tags", section.tags, f"names {', '.join(doubles)} twice; num_groups_partition gives shares")


def check_shares(key: str, section: EnvManagerConfig, checks: Checks) -> None:
    shares, path, tags = section.num_groups_partition, f"{key}.num_groups_partition", section.tags
    if checks.broken(f"{key}.tags"):
        return
    if not shares:
        if section.num_env_groups < len(tags):
            rule = f"must be at least {len(tags)}, one for each of the tags"
            checks.add(f"{key}.num_env_groups", section.num_env_groups, rule, len(tags))
        return
    if len(shares) != len(tags):
        rule = f"needs a number for each of the {count(len(tags), 'tag')} {', '.join(tags)}"
        checks.add(path, shares, f"{rule}; left out, they get equal shares")
    elif min(shares) < 1:
        checks.add(path, shares, "every tag needs at least one group; leave out tags that are not to be played")
    elif sum(shares) != section.num_env_groups:
        rule = f"sums to {sum(shares)}, and num_env_groups is {section.num_env_groups}: they must agree"
        checks.add(path, shares, f"{rule}; left out, the tags get equal shares")


def training_entries(config: AgenticConfig, checks: Checks) -> list[EntryPlan]:
    most = training_sampling(config, checks.written).max_new_tokens
    return [entry_plan(config, tag, most) for tag in config.train_env_manager.tags if tag in config.custom_envs]


def check_lengths(config: AgenticConfig, options: dict[str, StrategyConfig], model: str | None, checks: Checks) -> None:
    """A response leaves room for its prompt, and engines (``options`` of :func:`check_roles`) and ``model`` have
    positions for the longest conversation."""
    if checks.broken("sequence_length", "custom_envs", "train_env_manager", "val_env_manager"):
        return
    most = training_sampling(config, checks.written).max_new_tokens
    for tag in dict.fromkeys(tag for _, section, _ in managers(config) for tag in section.tags):
        key, section = f"custom_envs.{tag}.max_tokens_per_step", config.custom_envs[tag]
        tokens = section.max_tokens_per_step if most is None else min(section.max_tokens_per_step, most)
        if tokens >= config.sequence_length:
            rule = f"must be less than sequence_length {config.sequence_length}, which holds prompt and response"
            checks.add(key, section.max_tokens_per_step, rule, max(1, config.sequence_length // 4))
        elif most is not None and most < section.max_tokens_per_step and checks.is_own(key):
            text = f"actor_infer.generating_args.max_new_tokens {most} is smaller, and counts"
            checks.note(key, text)
    own = config.train_env_manager.generating_args
    both = all(checks.written(f"{name}.generating_args") for name in ("train_env_manager", "actor_infer"))
    if both and own != config.actor_infer.generating_args:
        checks.note("train_env_manager.generating_args", "has no effect: actor_infer.generating_args decides")
    longest = config.sequence_length
    response = max((entry.new_tokens for entry in training_entries(config, checks)), default=1)
    check_engine_length(options, config.actor_infer, model, longest - response, longest, checks)
    note_positions("pretrain", model, longest, checks)


def check_batches(config: AgenticConfig, checks: Checks) -> None:
    """Optimizer steps of each trained role, among which the episodes of a step are divided."""
    if checks.broken("rollout_batch_size", "train_env_manager"):
        return
    for name, plan in policy_training_plans(config).items():
        sizes = f"{name}.training_args"
        if checks.broken(sizes, f"{name}.device_mapping", f"{name}.num_gpus_per_worker"):
            continue
        mini = plan.mini_batch_size
        if plan.samples_per_step % mini:
            steps = count(plan.optimizer_steps_per_step // plan.epochs, "optimizer step")
            text = f"{plan.samples_per_step} episodes are no multiple of {mini}: they are divided among {steps}"
            checks.note(f"{sizes}.gradient_accumulation_steps", f"{text}, each of at most {mini}")
        check_schedule(name, getattr(config, name), plan.total_optimizer_steps, checks)


def check_judge(config: AgenticConfig, checks: Checks) -> None:
    """The role ``reward`` exists where a verifier asks it, with devices of its own where it needs them."""
    judged = judged_entries(config)
    if not judged:
        if config.reward is not None:
            how = "custom_envs.<tag>.verifier: {worker_cls: llm_judge, reward_kwargs: {model_type: cluster}}"
            checks.note(REWARD, f"not started: nothing asks it; {how} does")
        return
    if config.reward is None:
        rule = f"is needed by the verifier of custom_envs.{judged[0]} (model_type: cluster): model, engine and devices"
        checks.missing(REWARD, rule, f"{REWARD}.device_mapping: [0]")
        return
    kind = config.reward.model_args.model_type
    if kind is not None:
        rule = "must be left out: a judge says what it thinks in words; http_reward asks a classifier of a service"
        checks.add(f"{REWARD}.model_args.model_type", kind, rule, "~")
    if generates_otherwise(config.reward):
        checks.note(f"{REWARD}.generating_args", f"has no effect: they are options of {LLM_JUDGE} (reward_kwargs)")
    key, roles = f"{REWARD}.device_mapping", model_roles(config)
    sharing = [name for name in roles if name != REWARD and shares_devices(roles[REWARD], roles[name])]
    if is_async(config) and sharing and not checks.broken(key):
        rule = f"must share no device with {', '.join(sharing)}: episodes are judged at any time"
        checks.add(key, config.reward.device_mapping, rule)


def check_trained_roles(config: AgenticConfig, checks: Checks) -> None:
    """``train_roles`` exist, as far as the entries name their roles."""
    entries = [agent_of(section) for section in used_entries(config).values()]
    known = [role for _, options in entries for role in options.get("roles") or ()]
    if checks.broken("custom_envs") or not all(agent == "black_box" and one.get("roles") for agent, one in entries):
        return
    for role in config.train_roles:
        if role not in known:
            near = closest(role, known) or known[0]
            rule = f"{role} is none of the roles of custom_envs: there are {', '.join(dict.fromkeys(known))}"
            checks.add("train_roles", config.train_roles, rule, f"[{near}]")


def check_normalization(config: AgenticConfig, checks: Checks) -> None:
    section, key = config.reward_normalization, "reward_normalization"
    if section is None or checks.broken(key):
        return
    for name in ("norm_mean_type", "norm_std_type"):
        if checks.written(name):
            checks.add(name, getattr(config, name), f"is set by {key}, too: keep one of them", f"leave out {name}")
    own = section.norm_mean_type is not None or section.norm_std_type is not None
    if own and section.method not in (None, "identity"):
        checks.note(f"{key}.method", "has no effect: norm_mean_type and norm_std_type decide")
    if section.method == "asym_clip":
        checks.note(f"{key}.method", "asym_clip is mean_std: nothing is clipped (reward_clip clips)")
    compared = own or section.method not in (None, "identity")
    if config.estimator.name == "grpo" and not compared:
        checks.note(f"{key}.method", "identity with grpo: rewards are not compared with one another")
    if compared and section.grouping == "traj_group_id" and config.group_size < 2:
        checks.note(f"{key}.grouping", "traj_group_id with groups of one: a single episode keeps its reward")


def note_devices(config: AgenticConfig, checks: Checks) -> None:
    """Engines share devices with the trainer and have others as well."""
    trainer, engines = set(config.actor_train.device_mapping or ()), set(config.actor_infer.device_mapping or ())
    if not (config.async_generation_ratio > 0 and config.partial_gpu_mode and trainer & engines and engines - trainer):
        return
    name = backend_of(config.actor_infer.strategy_args.strategy_name).name
    text = (
        f"all {name} engines stop while actor_train computes on some of their devices; with "
        f"actor_infer.device_mapping: {sorted(engines - trainer)} they go on all the time"
    )
    checks.note("actor_infer.device_mapping", text)
