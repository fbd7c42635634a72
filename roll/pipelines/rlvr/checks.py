"""Checks of an RLVR configuration across keys."""

from __future__ import annotations

import math
from pathlib import Path

from roll.config.checks.base import (
    Checks,
    check_columns,
    check_data_files,
    check_resume,
    check_schedule,
    check_template_file,
)
from roll.config.checks.keys import note_unread
from roll.config.checks.models import note_positions
from roll.config.checks.roles import check_roles, note_engine_length
from roll.config.lora import uses_lora
from roll.config.names import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.plan.plan import explain_indivisible, working_values
from roll.config.reading.errors import closest
from roll.config.strategies.registry import backend_of
from roll.pipelines.policy import (
    is_async,
    needs_critic,
    needs_reference,
    policy_training_plans,
    reference_is_actor,
    rollout_file,
)
from roll.pipelines.rlvr.checks_algorithm import check_algorithm
from roll.pipelines.rlvr.checks_rewards import check_judges, check_rewards
from roll.pipelines.rlvr.checks_rollout import check_async, check_validation, check_weight_sync, longest_in_validation
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.planning import lengths, model_path

PROBABILITY_TOLERANCE = 1e-6


def check_rlvr(config: RLVRConfig, checks: Checks) -> None:
    """Every check; mistakes and notes go to ``checks.problems``."""
    options = check_roles(config, checks)
    check_needed_roles(config, checks)
    check_lengths(config, checks)
    if not checks.broken("prompt_length", "response_length", "sequence_length"):
        val_prompt, val_sequence = longest_in_validation(config)
        prompt, longest = max(config.prompt_length, val_prompt), max(lengths(config)[1], val_sequence)
        note_engine_length(options, prompt, longest, checks)
        note_positions("pretrain", model_path(config, "actor_train", config.actor_train), longest, checks)
    check_batches(config, checks)
    check_rewards(config, checks)
    check_judges(config, checks)
    check_data(config, checks)
    check_algorithm(config, checks)
    check_async(config, checks)
    note_sampling(config, checks)
    check_weight_sync(config, checks)
    check_resume(config, checks)
    check_recorded_rollouts(config, checks)
    note_unread(config, options, checks)


def check_recorded_rollouts(config: RLVRConfig, checks: Checks) -> None:
    """``rollout_mock`` has its files, and a step to each of them."""
    section = config.rollout_mock
    if not section.enable:
        return
    if section.mode == "mock" and is_async(config):
        rule = "must be 0 with rollout_mock.mode: mock, which generates nothing that could run ahead"
        checks.add("async_generation_ratio", config.async_generation_ratio, rule, 0)
    if section.mode == "mock" and section.dump_dir is None:
        rule = "is needed with mode: mock: the folder that a run with mode: dump has written"
        checks.missing("rollout_mock.dump_dir", rule, "./output/first/rollouts")
    elif section.mode == "mock" and section.dump_dir is not None and checks.check_files:
        first = rollout_file(Path(section.dump_dir).expanduser(), 0)
        if not first.is_file() and not config.resume_from_checkpoint:
            rule = f"holds no {first.name}: a run with mode: dump writes it"
            checks.add("rollout_mock.dump_dir", section.dump_dir, rule)


def check_needed_roles(config: RLVRConfig, checks: Checks) -> None:
    devices = config.actor_train.device_mapping or [0]
    if needs_reference(config) and config.reference is None and not reference_is_actor(config):
        checks.missing(
            "reference", "is needed: a KL to the reference policy is used", f"reference.device_mapping: {devices}"
        )
    if config.reference is not None and not needs_reference(config):
        checks.note("reference", "not started: no KL is used (use_kl_loss with kl_loss_coef, or add_token_level_kl)")
    _note_needless_reference(config, checks)
    if needs_critic(config) and config.critic is None and not checks.broken("adv_estimator"):
        checks.missing("critic", "is needed by adv_estimator: gae", f"critic.device_mapping: {devices}")
    if config.critic is not None and not needs_critic(config):
        checks.note("critic", f"not started: adv_estimator {config.adv_estimator} uses none")
    engine, trainer = config.actor_infer, config.actor_train
    if trainer.model_args.dtype != engine.model_args.dtype and not checks.broken("actor_train.model_args.dtype"):
        key, dtype = "actor_infer.model_args.dtype", trainer.model_args.dtype
        if backend_of(engine.strategy_args.strategy_name).holds_sent_dtype:
            rule = f"must be actor_train's, {dtype}: the engine holds exactly the weights it is sent"
            checks.add(key, engine.model_args.dtype, rule, dtype)
        else:
            checks.note(key, f"{engine.model_args.dtype} beside {dtype} in training: log-probs differ by the rounding")
    own, trained = config.actor_infer.model_args.model_name_or_path, config.actor_train.model_args.model_name_or_path
    if own is not None and own != (trained or config.pretrain):
        checks.note(
            "actor_infer.model_args.model_name_or_path", "the engines get actor_train's weights before the first step"
        )


def _note_needless_reference(config: RLVRConfig, checks: Checks) -> None:
    """A second copy of what the LoRA actor has already."""
    trainer, reference = config.actor_train, config.reference
    if reference is None or not needs_reference(config) or not uses_lora(trainer.model_args):
        return
    same = model_path(config, "reference", reference) == model_path(config, "actor_train", trainer)
    if same and not uses_lora(reference.model_args):
        text = "actor_train without its adapters gives the same log-probs: leave the section out to save its memory"
        checks.note("reference", text)


def check_lengths(config: RLVRConfig, checks: Checks) -> None:
    keys = ("prompt_length", "response_length", "sequence_length")
    if checks.broken(*keys, "val_prompt_length", "val_sequence_length"):
        return
    prompt, response, sequence = config.prompt_length, config.response_length, config.sequence_length
    if response is None and sequence is None:
        checks.missing("response_length", "is needed (or sequence_length): the longest response in tokens", prompt)
    elif response is None and sequence is not None and sequence <= prompt:
        rule = f"must be greater than prompt_length {prompt}, or no response fits"
        checks.add("sequence_length", sequence, rule, prompt * 2)
    elif response is not None and sequence is not None and sequence != prompt + response:
        rule = f"must be prompt_length {prompt} + response_length {response} where all three are set"
        checks.add("sequence_length", sequence, rule, prompt + response)
    val_prompt, val_sequence = config.val_prompt_length, config.val_sequence_length
    if (val_prompt is None) != (val_sequence is None):
        absent, present = ("val_prompt_length", "val_sequence_length")[:: 1 if val_prompt is None else -1]
        checks.missing(absent, f"goes with {present}: set both or none", val_prompt or prompt)
    elif val_prompt is not None and val_sequence is not None and val_sequence <= val_prompt:
        rule = f"must be greater than val_prompt_length {val_prompt}, or no response fits"
        checks.add("val_sequence_length", val_sequence, rule, val_prompt * 2)


def check_batches(config: RLVRConfig, checks: Checks) -> None:
    """Samples of a step divide into optimizer steps, for each trained role."""
    prompts, group = config.rollout_batch_size, config.num_return_sequences_in_group
    if checks.broken("rollout_batch_size", "num_return_sequences_in_group"):
        return
    for name, plan in policy_training_plans(config).items():
        sizes = f"{name}.training_args"
        if checks.broken(sizes, f"{name}.device_mapping", f"{name}.num_gpus_per_worker"):
            continue
        rule = explain_indivisible(plan, prompts, group)
        if rule is not None:
            key = f"{sizes}.gradient_accumulation_steps"
            checks.add(key, plan.gradient_accumulation_steps, rule, working_values(plan, prompts, group, name))
            continue
        role = config.actor_train if name == "actor_train" else config.critic
        assert role is not None
        check_schedule(name, role, plan.total_optimizer_steps, checks)


def check_data(config: RLVRConfig, checks: Checks) -> None:
    arguments = config.actor_train.data_args
    check_data_files("actor_train.data_args", arguments, checks)
    check_columns("actor_train.data_args", arguments, checks)
    check_validation(config, checks)
    check_shares(config, checks)
    check_templates(config, checks)


def check_templates(config: RLVRConfig, checks: Checks) -> None:
    """Templates by tag are known names or files, and files are there."""
    check_template_file("global_template", config.global_template, checks)
    for tag, template in config.tag_to_template.items():
        known = template in TEMPLATES or template.endswith(TEMPLATE_ENDINGS)
        if not known:
            nearest = closest(template, TEMPLATES) or TEMPLATES[0]
            rule = f"must be one of {', '.join(TEMPLATES)}, or a file ({', '.join(TEMPLATE_ENDINGS)})"
            checks.add(f"tag_to_template.{tag}", template, rule, nearest)
        check_template_file(f"tag_to_template.{tag}", template, checks)


def check_shares(config: RLVRConfig, checks: Checks) -> None:
    """``domain_interleave_probs`` name the reward domains; the sampler divides them by their sum."""
    shares, key = config.actor_train.data_args.domain_interleave_probs, "actor_train.data_args.domain_interleave_probs"
    if not shares or not config.rewards:
        return
    for domain, share in shares.items():
        if domain not in config.rewards:
            nearest = closest(domain, config.rewards)
            hint = f"; the nearest is {nearest}" if nearest else ""
            rule = f"no such domain under rewards ({', '.join(config.rewards)}){hint}"
            checks.add(f"{key}.{domain}", share, rule)
        elif share < 0:
            checks.add(f"{key}.{domain}", share, "must be at least 0", 0.5)
    total = math.fsum(shares.values())
    if not checks.broken(key) and total <= 0:
        checks.add(key, shares, "no domain has a share above 0")
    elif not checks.broken(key) and abs(total - 1.0) > PROBABILITY_TOLERANCE:
        taken = ", ".join(f"{domain} {share / total:.4g}" for domain, share in shares.items())
        checks.note(key, f"sum to {total:g}, so they are taken as {taken}")
    for domain in config.rewards:
        if domain not in shares:
            checks.note(key, f"has no share for {domain}: its rows are never asked")


def note_sampling(config: RLVRConfig, checks: Checks) -> None:
    """Sampling settings that the trainer's log-probs cannot follow."""
    arguments, key = config.actor_infer.generating_args, "actor_infer.generating_args"
    why = "training log-probs are not comparable with the sampled ones"
    if arguments.top_p < 1:
        checks.note(f"{key}.top_p", f"{arguments.top_p:g} cuts the distribution: {why}; 1.0 is off")
    if arguments.top_k > 0:
        checks.note(f"{key}.top_k", f"{arguments.top_k} cuts the distribution: {why}; -1 is off")
    if arguments.min_p > 0:
        checks.note(f"{key}.min_p", f"{arguments.min_p:g} cuts the distribution: {why}; 0 is off")
    if arguments.repetition_penalty != 1:
        checks.note(f"{key}.repetition_penalty", f"{arguments.repetition_penalty:g} changes it: {why}; 1.0 is off")
    if (arguments.temperature == 0 or not arguments.do_sample) and config.num_return_sequences_in_group > 1:
        checks.note(f"{key}.temperature", "greedy decoding: all samples of a prompt are the same, so nothing is learnt")
    response = lengths(config)[0]
    if arguments.max_new_tokens is not None and arguments.max_new_tokens > response:
        checks.note(f"{key}.max_new_tokens", f"{arguments.max_new_tokens} is cut to the response length {response}")
    samples = arguments.num_return_sequences
    if samples is not None and samples not in (1, config.num_return_sequences_in_group):
        checks.note(f"{key}.num_return_sequences", "num_return_sequences_in_group decides in training")
