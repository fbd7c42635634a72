"""Checks of the configuration across keys, of every run whose policy learns from its own samples."""

from __future__ import annotations

import os
from pathlib import Path

from roll.config.checks.base import Checks, check_resume
from roll.config.checks.roles import note_needless_reference
from roll.config.choices import PassAtKOptions, traits
from roll.config.lora import adapter_rank, adapts_experts, uses_lora
from roll.config.model_files import EXPERTS, model_config, needed
from roll.config.plan.planning import shares_devices
from roll.config.run import update_mode
from roll.config.strategies.registry import BACKENDS, backend_of
from roll.methods.policy_plan import (
    PolicyConfig,
    corrects_batches,
    corrects_old_log_probs,
    engine_log_probs_as_old,
    is_async,
    needs_critic,
    needs_old_entropy,
    needs_old_log_probs,
    needs_reference,
    policy_training_plans,
    rollout_file,
    trainer_is_old,
    uses_old_log_probs,
)
from roll.pipelines.policy_preflight import check_strict

KEY = "async_generation_ratio"
ROUTE_RECORDERS = ("hf_infer", "vllm")  # engines that return the experts of every token


def check_policy(config: PolicyConfig, response_limit: int, checks: Checks) -> None:
    """The checks that all such runs share, besides those of roles, lengths and batches; ``response_limit``: most tokens
    of a response, or of all responses of an episode."""
    check_needed_roles(config, checks)
    check_algorithm(config, response_limit, checks)
    check_async(config, checks)
    note_distribution(config, checks)
    check_weight_sync(config, checks)
    check_strict(config, checks)
    check_resume(config, checks)
    check_recorded_rollouts(config, checks)


def check_needed_roles(config: PolicyConfig, checks: Checks) -> None:
    devices = config.actor_train.device_mapping or [0]
    # Under LoRA the actor without its adapters is the policy it started from: no model of its own is needed.
    is_actor = uses_lora(config.actor_train.model_args)
    if needs_reference(config) and config.reference is None and not is_actor:
        rule = "is needed: a KL to the reference policy is used"
        checks.missing("reference", rule, f"reference.device_mapping: {devices}")
    if config.reference is not None and needs_reference(config):
        note_needless_reference(config, config.reference, checks)
    elif config.reference is not None:
        checks.note("reference", "not started: no KL is used (use_kl_loss with kl_loss_coef, or add_token_level_kl)")
    if needs_critic(config) and config.critic is None and not checks.broken("estimator"):
        rule = f"is needed by estimator: {config.estimator.name}"
        checks.missing("critic", rule, f"critic.device_mapping: {devices}")
    if config.critic is not None and not needs_critic(config):
        checks.note("critic", f"not started: estimator {config.estimator.name} uses none")
    engine, trainer = config.actor_infer, config.actor_train
    if trainer.model_args.dtype != engine.model_args.dtype and not checks.broken("actor_train.model_args.dtype"):
        key, dtype = "actor_infer.model_args.dtype", trainer.model_args.dtype
        if backend_of(engine.strategy_args.strategy_name).holds_sent_dtype:
            rule = f"must be actor_train's, {dtype}: the engine holds exactly the weights it is sent"
            checks.add(key, engine.model_args.dtype, rule, dtype)
        else:
            checks.note(key, f"{engine.model_args.dtype} with {dtype} in training: log-probs differ by the rounding")
    own, trained = engine.model_args.model_name_or_path, trainer.model_args.model_name_or_path
    if own is not None and own != (trained or config.pretrain):
        text = "the engines get actor_train's weights before the first step"
        checks.note("actor_infer.model_args.model_name_or_path", text)


def check_recorded_rollouts(config: PolicyConfig, checks: Checks) -> None:
    """``rollout_mock`` has its files, and a step to each of them."""
    section = config.rollout_mock
    if not section.enable or section.mode != "mock":
        return
    if is_async(config):
        rule = "must be 0 with rollout_mock.mode: mock, which generates nothing that could run ahead"
        checks.add(KEY, config.async_generation_ratio, rule, 0)
    if section.dump_dir is None:
        rule = "is needed with mode: mock: the folder that a run with mode: dump has written"
        checks.missing("rollout_mock.dump_dir", rule, "./output/first/rollouts")
    elif checks.check_files:
        first = rollout_file(Path(section.dump_dir).expanduser(), 0)
        # A run that is resumed starts with a later file.
        if not os.path.isfile(first) and not config.resume_from_checkpoint:
            rule = f"holds no {first.name}: a run with mode: dump writes it"
            checks.add("rollout_mock.dump_dir", section.dump_dir, rule)


def check_algorithm(config: PolicyConfig, response_limit: int, checks: Checks) -> None:
    """The algorithm's keys against one another; ``response_limit``: most tokens of a response."""
    group, name = config.group_size, config.estimator.name
    if traits(config.estimator).leaves_one_out and group < 2:
        rule = f"must be at least 2 with {name}: a sample is compared with the others of its prompt"
        checks.add(config.group_key, group, rule, 8)
    if name == "grpo" and group < 2:
        checks.note(config.group_key, "1 with grpo: a group of one keeps its raw score")
    if config.difficulty_low_threshold > config.difficulty_high_threshold:
        rule = f"must not be greater than difficulty_high_threshold {config.difficulty_high_threshold}"
        checks.add("difficulty_low_threshold", config.difficulty_low_threshold, rule, 0.0)
    options = config.estimator.options
    if isinstance(options, PassAtKOptions) and options.k >= group:
        # One of k has a chance to differ from one of all only while k is below the group's size.
        if group > 1:
            rule = f"must be less than {config.group_key} {group}, or every advantage is 0"
            checks.add("estimator.k", options.k, rule, group // 2)
        else:
            rule = f"must be greater than estimator.k {options.k}, or every advantage is 0"
            checks.add(config.group_key, group, rule, 2 * options.k)
    check_passes(config, checks)
    check_router_replay(config, checks)
    check_rewards_of_estimator(config, checks)
    buffer, keys = config.overlong_buffer_length, ("response_length", "sequence_length")
    broken = checks.broken(*keys, "actor_infer.generating_args.max_new_tokens")
    if buffer is not None and buffer > response_limit and not broken:
        rule = f"must be at most the length limit of a response, {response_limit} tokens"
        checks.add("overlong_buffer_length", buffer, rule, max(1, response_limit // 5))
    if config.critic_warmup >= config.max_steps and needs_critic(config):
        rule = f"must be less than max_steps {config.max_steps}, or the policy never learns"
        checks.add("critic_warmup", config.critic_warmup, rule, 0)
    if name == "grpo" and config.norm_mean_type is None:
        checks.note("norm_mean_type", "null with grpo: rewards are not compared within their group")
    note_without_effect(config, checks)
    # Settings under which every advantage is 0, or no sample is used, whatever the scores.
    if config.norm_mean_type == "batch" and config.samples_per_step == 1:
        checks.note("norm_mean_type", "batch with one sample a step: its advantage is always 0, so nothing is learnt")
    if (weights := config.estimator.get("weights")) and not any(weights.values()):
        checks.note("estimator.weights", "all are 0: every advantage is 0, so nothing is learnt")
    if config.difficulty_mask and config.difficulty_low_threshold == config.difficulty_high_threshold:
        rule = "equals difficulty_low_threshold: no mean score lies between them, so nothing is learnt"
        checks.note("difficulty_high_threshold", rule)


def check_passes(config: PolicyConfig, checks: Checks) -> None:
    """Keys that forbid or need the pass before the update."""
    key = "force_disable_old_logprobs_recompute"
    if not config.force_disable_old_logprobs_recompute:
        return
    if config.enable_old_logprobs_recompute:
        checks.add(key, True, "contradicts enable_old_logprobs_recompute: true; keep one of them", False)
    if needs_old_entropy(config):
        user = "target_entropy" if config.target_entropy is not None else "top_entropy_quantile"
        checks.add(key, True, f"leaves no entropies for {user} {getattr(config, user):g}", False)
    if traits(config.estimator).needs_squares:
        rule = f"leaves no sums of squared probabilities for estimator: {config.estimator.name}"
        checks.add(key, True, rule, False)
    if corrects_batches(config):
        asked = "action: reject and normalize of train_infer_correction ask"
        rule = f"leaves no log-probs of the trainer before the update, for which {asked}"
        checks.add(key, True, rule, False)
    elif corrects_old_log_probs(config) and uses_old_log_probs(config):
        checks.note("train_infer_correction", f"has no effect with {key}: old and engine log-probs are the same")


def check_router_replay(config: PolicyConfig, checks: Checks) -> None:
    """Routes are recorded where they are to be, and replayed by the policy only."""
    trainer, engine = config.actor_train, config.actor_infer
    key, mode = "actor_train.router_replay.mode", trainer.router_replay.mode
    for name, role in {"reference": config.reference, "critic": config.critic}.items():
        if role is not None and role.router_replay.mode != "disabled":
            rule = "is for actor_train and actor_infer: the routes are the policy's own"
            checks.add(f"{name}.router_replay.mode", role.router_replay.mode, rule, "disabled")
    wanted = "R3" if mode == "R3" else "disabled"
    if engine.router_replay.mode != wanted and not (mode == "R2" and engine.router_replay.mode == "R2"):
        rule = f"does not go with {key}: {mode}; R3 is recorded by the engine and replayed by the trainer: set both"
        checks.add("actor_infer.router_replay.mode", engine.router_replay.mode, rule, wanted)
    if mode == "disabled":
        return
    strategy, engine_name = trainer.strategy_args.strategy_name, engine.strategy_args.strategy_name
    if not strategy.startswith(("fsdp2", "fsdp_", "deepspeed", "megatron")):
        checks.add(key, mode, f"is not there under {strategy}", "disabled")
    for name, role in (("actor_train", trainer), ("actor_infer", engine)):
        model = model_config(role.model_args.model_name_or_path or config.pretrain)
        if model is not None and EXPERTS not in needed(model) and (name == "actor_train" or mode == "R3"):
            checks.add(f"{name}.router_replay.mode", mode, "is for mixture-of-experts models", "disabled")
    if mode == "R2" and not needs_old_log_probs(config):
        rule = "replays the pass that computes old log-probs, which this run has none of"
        checks.add(key, mode, f"{rule}: set enable_old_logprobs_recompute: true, or use R3", "disabled")
    if mode == "R3" and engine_name not in ROUTE_RECORDERS:
        rule = f"needs an engine that returns routes ({', '.join(ROUTE_RECORDERS)}), which {engine_name} does not"
        checks.add(key, mode, rule, "R2")


def check_rewards_of_estimator(config: PolicyConfig, checks: Checks) -> None:
    """Rewards in the form that the estimator compares them in."""
    name, weights = config.estimator.name, config.estimator.get("weights")
    if traits(config.estimator).needs_greedy:
        for key, value in (("norm_mean_type", config.norm_mean_type), ("norm_std_type", config.norm_std_type)):
            if value not in (None, "auto"):
                rule = f"must be null with {name}: the greedy response's reward is subtracted as it is"
                checks.add(key, value, rule, "~")
    if weights is not None:
        if not weights:
            rule = "needs weights: the numbers of the reward to normalise apart, each with its weight"
            checks.add("estimator", name, rule, f"{{name: {name}, weights: {{correct: 1.0, answered: 0.5}}}}")
        for key in ("norm_mean_type", "norm_std_type", "reward_clip", "overlong_buffer_length", "add_token_level_kl"):
            if checks.written(key) and getattr(config, key) not in (None, False, "auto"):
                checks.note(key, f"has no effect with {name}: it normalises the rewards of its weights itself")


def note_without_effect(config: PolicyConfig, checks: Checks) -> None:
    """Keys that are written and have no effect alongside the others."""
    has_entropy = config.entropy_loss_coef > 0 or config.target_entropy is not None
    if config.entropy_loss_agg_mode is not None and not has_entropy:
        checks.note("entropy_loss_agg_mode", "has no effect without entropy_loss_coef above 0")
    terms = (
        (config.loss_agg_mode, True),
        (config.kl_loss_agg_mode, config.use_kl_loss),
        (config.entropy_loss_agg_mode, has_entropy),
        (config.value_loss_agg_mode, needs_critic(config)),
    )
    modes = {mode for mode, is_used in terms if is_used}
    if config.loss_norm_length is not None and "seq-mean-token-sum-norm" not in modes:
        checks.note("loss_norm_length", "has no effect without the mode seq-mean-token-sum-norm")
    if traits(config.estimator).needs_squares and config.train_infer_correction:
        checks.note("train_infer_correction", f"weighs the loss alone, not the baseline of {config.estimator.name}")
    if config.shuffle_mini_batches and policy_training_plans(config)["actor_train"].optimizer_steps_per_step == 1:
        checks.note("shuffle_mini_batches", "has no effect: a batch is one mini-batch, passed over once")
    if config.rl_loss_coef == 0 and config.entropy_loss_coef == 0 and not (config.use_kl_loss or config.target_entropy):
        checks.note("rl_loss_coef", "0 with no other loss term: the policy does not learn")


def note_distribution(config: PolicyConfig, checks: Checks) -> None:
    """Sampling settings that the trainer's log-probs cannot follow."""
    arguments, key = config.actor_infer.generating_args, "actor_infer.generating_args"
    why = "training log-probs are not comparable with the sampled ones"
    top_p, top_k, min_p = arguments.top_p, arguments.top_k, arguments.min_p
    settings = (("top_p", top_p, top_p < 1, "1.0"), ("top_k", top_k, top_k > 0, "-1"), ("min_p", min_p, min_p > 0, "0"))
    for name, value, cuts, off in settings:
        if cuts:
            checks.note(f"{key}.{name}", f"{value} cuts the distribution: {why}; {off} is off")
    if arguments.repetition_penalty != 1:
        checks.note(f"{key}.repetition_penalty", f"{arguments.repetition_penalty} changes it: {why}; 1.0 is off")
    if arguments.temperature == 0 or not arguments.do_sample:
        name, value, works = ("temperature", 0, 1.0) if arguments.do_sample else ("do_sample", False, True)
        rule = "is greedy decoding: all samples of a prompt are the same, and their log-probs are those of no policy"
        checks.add(f"{key}.{name}", value, rule, works)


def check_async(config: PolicyConfig, checks: Checks) -> None:
    """Needs of generation that runs concurrently with training, and what it means for the algorithm."""
    if checks.broken(KEY) or not is_async(config):
        return
    key, engines = "actor_infer.device_mapping", config.actor_infer
    others = {name: role for name, role in checks.pipeline.started(config).items() if name != "actor_infer"}
    sharing = [name for name, role in others.items() if shares_devices(engines, role)]
    # Engines that finish all they begin have their devices to themselves; only partial rollout takes turns.
    if sharing and not config.partial_rollout and not checks.broken(key):
        taken = {device for role in others.values() for device in role.device_mapping or ()}
        # Among so many ids there are always enough free ones.
        free = [device for device in range(len(taken) + len(engines.device_mapping or ())) if device not in taken]
        rule = f"must share no device with {', '.join(sharing)}: with {KEY} {config.async_generation_ratio:g} and "
        rule += (
            "partial_rollout: false engines generate while they compute (partial_rollout: true lets them take turns)"
        )
        checks.add(key, engines.device_mapping, rule, free[: len(engines.device_mapping or ())])
    if traits(config.estimator).needs_greedy:
        rule = f"must be 0 with estimator {config.estimator.name}: its greedy answers need the engines between steps"
        checks.add(KEY, config.async_generation_ratio, rule, 0)
    if trainer_is_old(config) and not config.train_infer_correction and not engine_log_probs_as_old(config):
        text = (
            "samples come from older weights, which nothing corrects for: ratios are taken against the trainer before "
        )
        checks.note(KEY, text + "the update; train_infer_correction: decoupled weighs them against the engine")


def check_weight_sync(config: PolicyConfig, checks: Checks) -> None:
    """Mistakes that do not depend on the hosts."""
    options = config.weight_sync
    sender = (config.actor_train.device_mapping or [0])[0]
    elsewhere = sorted(set(config.actor_infer.device_mapping or []) - {sender})
    if options.transport == "cuda_ipc" and elsewhere:
        rule = (
            f"needs every engine on the GPU of actor_train's first rank, device {sender}: "
            f"actor_infer.device_mapping has {elsewhere}, whose processes do not see that GPU"
        )
        checks.add("weight_sync.transport", "cuda_ipc", rule, "object_store")
    engine = config.actor_infer.strategy_args.strategy_name
    modes = backend_of(engine).updates
    if options.lora == "adapter":
        _check_adapter(config, checks)
    elif options.mode not in ("auto", *modes):
        least = "tensors" if "trained" in modes else "layers"
        others = ", ".join(BACKENDS.where(lambda backend: options.mode in backend.updates))
        rule = f"{engine} takes whole {least} only; engines that take parts: {others}"
        checks.add("weight_sync.mode", options.mode, rule, "full")
    sleep_level = config.actor_infer.strategy_args.strategy_config.get("sleep_level")
    if sleep_level == 2 and update_mode(options, engine) == "trained":
        rule = "drops weights that updates do not bring back with "
        rule += "weight_sync.lora: adapter" if options.lora == "adapter" else "weight_sync.mode: trained"
        checks.add("actor_infer.strategy_args.strategy_config.sleep_level", sleep_level, rule, 1)


def _check_adapter(config: PolicyConfig, checks: Checks) -> None:
    options = config.weight_sync
    if not uses_lora(config.actor_train.model_args):
        rule = "actor_train has no adapters (model_args.lora_target)"
        checks.add("weight_sync.lora", options.lora, rule, "merged")
    elif adapts_experts(config.actor_train.model_args):
        rule = "does not go with adapters of experts: engines hold matrices of single experts, so they are merged first"
        checks.add("weight_sync.lora", options.lora, rule, "merged")
    elif options.mode in ("full", "delta"):
        rule = "with lora: adapter, A and B are sent whole and nothing else changes"
        checks.add("weight_sync.mode", options.mode, rule, "trained")
    args, backend = config.actor_train.model_args, backend_of(config.actor_infer.strategy_args.strategy_name)
    if not backend.adapter_ranks or checks.broken("weight_sync.lora", "weight_sync.mode"):
        return
    # An engine that computes with the adapter itself makes room for its rank when it starts.
    engine, most = backend.package.title if backend.package else backend.name, backend.adapter_ranks[-1]
    if args.additional_target:
        rule = f"goes with weight_sync.lora: merged: of a policy in {engine} only the adapter is exchanged"
        checks.add("actor_train.model_args.additional_target", args.additional_target, rule, "~")
    key, rank = "actor_train.model_args.lora_rank", adapter_rank(args)
    on_hub = args.adapter_name_or_path is not None and not os.path.isdir(Path(args.adapter_name_or_path).expanduser())
    if on_hub and not checks.written(key):
        rule = f"is needed: the rank of adapter_name_or_path, for which {engine} makes room when it starts"
        checks.missing(key, rule, 32)
    elif rank > most:
        rule = f"must be at most {most} for {engine}; with weight_sync.lora: merged it may be more"
        checks.add(key, rank, rule, most)
