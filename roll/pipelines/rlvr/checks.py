"""Checks of an RLVR configuration across keys."""

from __future__ import annotations

import math
import re

from roll.config.checks.base import Checks, check_columns, check_data_files, check_schedule, check_template_file
from roll.config.checks.keys import note_unread
from roll.config.checks.roles import check_engine_length, check_roles, note_positions
from roll.config.choices import traits
from roll.config.data import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.plan.plan import explain_indivisible, working_values
from roll.config.reading.errors import closest
from roll.config.rewards import section_of
from roll.config.strategies.base import StrategyConfig
from roll.methods.policy_plan import check_method, is_async, policy_training_plans
from roll.pipelines.policy_checks import check_policy
from roll.pipelines.rlvr.checks_rewards import check_judges, check_rewards
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.plan import max_new_tokens, sharing_roles, started_roles
from roll.serving.harness import HarnessConfig

PROBABILITY_TOLERANCE = 1e-6
SET_NAME = re.compile(r"[A-Za-z0-9][\w-]*")


def check_rlvr(config: RLVRConfig, checks: Checks) -> None:
    options = check_roles(config, checks)
    check_method(config, checks, config.actor_infer.generating_args, "actor_infer.generating_args", "rlvr")
    check_lengths(config, options, checks.pipeline.model(config, "actor_train", config.actor_train)[1], checks)
    check_batches(config, checks)
    check_rewards(config, checks)
    check_judges(config, checks)
    check_data_files("actor_train.data_args", config.actor_train.data_args, checks)
    check_columns("actor_train.data_args", config.actor_train.data_args, checks)
    check_validation(config, checks)
    check_shares(config, checks)
    check_templates(config, checks)
    if traits(config.estimator).works_in_turns:
        rule = "looks at the turns of episodes, which only the agentic pipeline (custom_envs, train_env_manager) has"
        checks.add("estimator", config.estimator.name, rule, "grpo")
    if config.router_args.router_name == "EnvAffinityRouter":
        checks.problems.not_available("router_args.router_name", "EnvAffinityRouter", "this router", "~")
    check_policy(config, max_new_tokens(config), checks)
    # Sampling settings that others override.
    arguments, key = config.actor_infer.generating_args, "actor_infer.generating_args"
    response = config.response_and_sequence[0]
    if arguments.max_new_tokens is not None and arguments.max_new_tokens > response:
        checks.note(f"{key}.max_new_tokens", f"{arguments.max_new_tokens} is cut to the response length {response}")
    if arguments.num_return_sequences not in (None, 1, config.num_return_sequences_in_group):
        checks.note(f"{key}.num_return_sequences", "num_return_sequences_in_group decides in training")
    note_unread(config, options, checks)


def check_lengths(config: RLVRConfig, options: dict[str, StrategyConfig], model: str | None, checks: Checks) -> None:
    """A response has room behind its prompt, and engines (``options`` of :func:`check_roles`) and ``model`` have
    positions for the longest sequence."""
    keys = ("prompt_length", "response_length", "sequence_length")
    if not checks.broken(*keys, "val_prompt_length", "val_sequence_length"):
        prompt, response, sequence = config.prompt_length, config.response_length, config.sequence_length
        if response is None and sequence is None:
            checks.missing("response_length", "is needed (or sequence_length): the longest response in tokens", prompt)
        elif response is None and sequence is not None and sequence <= prompt:
            rule = f"must be greater than prompt_length {prompt}, or no response fits"
            checks.add("sequence_length", sequence, rule, prompt * 2)
        elif response is not None and sequence is not None and sequence != prompt + response:
            rule = f"must be prompt_length {prompt} + response_length {response} where all three are set"
            checks.add("sequence_length", sequence, rule, prompt + response)
        check_pair("val_", config.val_prompt_length, config.val_sequence_length, config, checks)
    if checks.broken(*keys):
        return
    sets = config.validation.sets.values() if config.validation is not None else ()
    prompts = (config.prompt_length, config.val_prompt_length, *(one.prompt_length for one in sets))
    sequences = (config.longest_sequence, config.val_sequence_length, *(one.sequence_length for one in sets))
    prompt, longest = (max(length or 0 for length in lengths) for lengths in (prompts, sequences))
    check_engine_length(options, config.actor_infer, model, prompt, longest, checks)
    note_positions("pretrain", model, longest, checks)


def check_pair(key: str, prompt: int | None, sequence: int | None, config: RLVRConfig, checks: Checks) -> None:
    """Lengths of prompt and sequence of a validation, whose keys begin with ``key``, are both set or neither, and a
    response fits."""
    keys = f"{key}prompt_length", f"{key}sequence_length"
    names = [key.rpartition(".")[2] for key in keys]
    if prompt is None and sequence is not None:
        checks.missing(keys[0], f"goes with {names[1]}: set both or none", config.prompt_length)
    elif prompt is not None and sequence is None:
        checks.missing(keys[1], f"goes with {names[0]}: set both or none", prompt * 2)
    elif prompt is not None and sequence is not None and sequence <= prompt:
        checks.add(keys[1], sequence, f"must be greater than {names[0]} {prompt}, or no response fits", prompt * 2)


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
        check_schedule(name, getattr(config, name), plan.total_optimizer_steps, checks)


def check_templates(config: RLVRConfig, checks: Checks) -> None:
    check_template_file("global_template", config.global_template, checks)
    for tag, template in config.tag_to_template.items():
        if template not in TEMPLATES and not template.endswith(TEMPLATE_ENDINGS):
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


def check_validation(config: RLVRConfig, checks: Checks) -> None:
    """Files, columns, lengths and names of all sets."""
    section = config.validation
    if section is None:
        return
    if section.data_args.file_name or not section.sets:
        check_data_files("validation.data_args", section.data_args, checks)
    check_columns("validation.data_args", section.data_args, checks)
    # Roles that answer and score during training share their devices with no other role.
    for name, others in sharing_roles(started_roles(config)).items() if section.concurrent else ():
        if not checks.broken(f"{section_of(name)}.device_mapping"):
            rule = f"needs devices of its own for {name}, which shares some with {', '.join(others)}"
            checks.add("validation.concurrent", True, rule, False)
    if section.harness is not None:
        check_harness(config, section.harness, checks)
    for name, one in section.sets.items():
        key = f"validation.sets.{name}"
        if not SET_NAME.fullmatch(name) or name in ("sampled", "greedy"):
            rule = "a set's name is part of the metrics' names: letters, digits, - and _, and not sampled or greedy"
            checks.add(key, name, rule)
        check_data_files(f"{key}.data_args", one.data_args, checks)
        check_columns(f"{key}.data_args", one.data_args, checks)
        check_pair(f"{key}.", one.prompt_length, one.sequence_length, config, checks)


def check_harness(config: RLVRConfig, harness: HarnessConfig, checks: Checks) -> None:
    """A harness has tasks, and the engines to itself."""
    key = "validation.harness"
    if not harness.tasks:
        rule = "is needed: names of tasks (lm_eval) or task files (inspect)"
        checks.missing(f"{key}.tasks", rule, "[my_task]")
    if is_async(config):
        rule = (
            "has the engines to itself, and with async_generation_ratio they always work on samples; leave it out "
            "and run roll evaluate --harness on the checkpoints"
        )
        checks.add(key, harness.name, rule, "~")
    elif config.validation is not None and config.validation.concurrent:
        rule = "does not go with validation.harness, which has the engines to itself"
        checks.add("validation.concurrent", True, rule, False)
