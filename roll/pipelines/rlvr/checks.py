"""Checks of an RLVR configuration across keys: lengths, batches and sets; and the reward domains, which reward scores
which rows, from what components, and what is filtered."""

from __future__ import annotations

import math
import re

from roll.config.checks.base import Checks, check_columns, check_data_files, check_schedule, check_template_file
from roll.config.checks.keys import note_unread
from roll.config.checks.roles import check_engine_length, check_roles, note_positions
from roll.config.choices import traits
from roll.config.data import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.installation import offered
from roll.config.losses import SCORE_INPUT
from roll.config.model_files import model_config
from roll.config.plan.plan import explain_indivisible, working_values
from roll.config.plan.planning import shares_devices
from roll.config.reading.errors import closest
from roll.config.reading.fields import DOTTED_PATH, dotted
from roll.config.rewards import (
    CLASSIFIER,
    CLUSTER,
    FILTER_ARGUMENTS,
    INFERENCE,
    JUDGE_KEYS,
    JUDGE_ROLE,
    LLM_JUDGE,
    PLANNED_REWARDS,
    PUBLISHED_PREFIX,
    PUBLISHED_REWARDS,
    REWARD_MODEL,
    REWARDS,
    WHY_PLANNED,
    FilterConfig,
    RewardConfig,
    generates_otherwise,
    judge_types,
    judged_domains,
    judges_of,
    model_inputs,
    own_judges,
    section_of,
)
from roll.config.strategies.base import StrategyConfig
from roll.methods.policy_plan import check_method, is_async, policy_training_plans
from roll.pipelines.policy_checks import check_policy
from roll.pipelines.rlvr.config import RLVRConfig, max_new_tokens, sharing_roles, started_roles
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


def check_reward_model(config: RLVRConfig, checks: Checks) -> None:
    """The role ``reward_model`` and the rewards that ask it."""
    askers, role = model_inputs(config.rewards), config.reward_model
    if askers and role is None:
        rule = f"is needed by rewards.{next(iter(askers))}: the model that scores, and its devices"
        checks.missing("reward_model", rule, f"reward_model.model_args.model_type: {CLASSIFIER}")
    elif askers and role is not None and role.model_args.model_type != CLASSIFIER:
        key = "reward_model.model_args.model_type"
        checks.add(key, role.model_args.model_type, f"must be {CLASSIFIER} for the reward reward_model", CLASSIFIER)
    elif askers and judged_domains(config.rewards):
        rule = f"is a reward model: rewards.{judged_domains(config.rewards)[0]} needs a judge on the same role"
        checks.add("reward_model.model_args.model_type", CLASSIFIER, rule)
    elif askers and role is not None:
        # A model of the `rm` pipeline scores the kind of tokens that it was trained on.
        _, path = checks.pipeline.model(config, REWARD_MODEL, role)
        trained_on = (model_config(path) or {}).get(SCORE_INPUT)
        for name, score_input in askers.items():
            if trained_on is not None and score_input != trained_on:
                rule = f"must be {trained_on}: {path} was trained on it (score_input)"
                checks.add(f"rewards.{name}.reward_kwargs.input", score_input, rule, trained_on)
    elif role is not None and not askers and role.model_args.model_type == CLASSIFIER:
        checks.note("reward_model", "not started: no reward asks it")


def check_rewards(config: RLVRConfig, checks: Checks) -> None:
    if not config.rewards:
        checks.missing("rewards", "is needed: at least one reward domain", "rewards.math.worker_cls: math_rule")
    check_reward_model(config, checks)
    owners: dict[str, str] = {}
    for name, reward in config.rewards.items():
        key = f"rewards.{name}"
        if reward.components:
            check_components(key, reward, checks)
        else:
            check_reward_name(key, name, reward.worker_cls, checks)
        check_own_keys(key, name, reward, checks)
        check_filter(f"{key}.query_filter_config", reward.query_filter_config, checks)
        check_filter(f"{key}.response_filter_config", reward.response_filter_config, checks)
        if reward.response_filter_config.type == "std_filter":
            rule = "has no meaning for a single response: its score has no spread"
            checks.add(f"{key}.response_filter_config.type", "std_filter", rule, "mean_filter")
        if reward.device_mapping is None and reward.num_gpus_per_worker != 1:
            checks.add(f"{key}.num_gpus_per_worker", reward.num_gpus_per_worker, "has no devices to take them from", 1)
        if not reward.tag_included and len(config.rewards) > 1:
            checks.missing(f"{key}.tag_included", "is needed with several rewards: the tags of its rows", f"[{name}]")
        for tag in reward.tag_included or ():
            if tag in owners:
                checks.add(
                    f"{key}.tag_included", reward.tag_included, f"tag {tag} belongs to rewards.{owners[tag]} already"
                )
            owners.setdefault(tag, name)


def check_components(key: str, reward: RewardConfig, checks: Checks) -> None:
    """Every component names a reward; something is added up; gates are gates."""
    if reward.worker_cls is not None:
        rule = "does not go with components: make it one of them"
        checks.add(f"{key}.worker_cls", reward.worker_cls, rule, "~")
    if reward.reward_kwargs:
        rule = "belong to the rewards under components, each to its own"
        checks.add(f"{key}.reward_kwargs", reward.reward_kwargs, rule, "{}")
    for name, part in reward.components.items():
        path = f"{key}.components.{name}"
        if "/" in name:
            checks.add(
                path, name, "must not contain a slash: names of metrics are made from it", name.replace("/", "_")
            )
        check_reward_name(path, name, part.worker_cls, checks)
        if part.gate and part.weight != 1.0:
            checks.add(f"{path}.weight", part.weight, "has no meaning for a gate, which multiplies the sum", 1.0)
    if all(part.gate for part in reward.components.values()):
        path = f"{key}.components.{next(reversed(reward.components))}.gate"
        checks.add(path, True, "at least one component must not be a gate: gates multiply the sum of the others", False)


def check_own_keys(key: str, name: str, reward: RewardConfig, checks: Checks) -> None:
    """Keys of the section that only one reward has."""
    written = {part.worker_cls or component for component, part in reward.components.items()} or {
        reward.worker_cls or name
    }
    used = {PUBLISHED_REWARDS.get(each.rpartition(".")[2], each) for each in written}
    if "code_sandbox" in used and not reward.use_local and not reward.code_url:
        rule = "is needed with use_local: false: the service that runs programs (python -m roll.rewards.service)"
        checks.missing(f"{key}.code_url", rule, "http://127.0.0.1:9000/score")
    if reward.code_url and "code_sandbox" not in used:
        checks.note(f"{key}.code_url", "has no effect: it is an option of code_sandbox")
    if "crossthinkqa" in used:
        return
    if reward.response_length_penalty_coef:
        text = "has no effect: it is an option of crossthinkqa; other rewards take a component length_penalty"
        checks.note(f"{key}.response_length_penalty_coef", text)
    if reward.reward_type is not None:
        checks.note(f"{key}.reward_type", "has no effect: it is an option of crossthinkqa")


def check_reward_name(key: str, section: str, name: str | None, checks: Checks) -> None:
    """``worker_cls`` of the section ``key``, or ``section``, its last part, in its place."""
    path = f"{key}.worker_cls"
    if name is None:
        if section in PLANNED_REWARDS.values():
            checks.problems.not_available(key, section, *WHY_PLANNED[section])
        elif section not in REWARDS:
            rule = f"is needed (a section named {', '.join(REWARDS)} may leave it out): which reward scores responses"
            checks.missing(path, rule, "math_rule")
        return
    class_name = name.rpartition(".")[2]
    # A name without a dot cannot be a user's own: those are dotted paths.
    published = name.startswith(PUBLISHED_PREFIX) or class_name == name
    is_file = "/" in name or ":" in name
    if name in PLANNED_REWARDS.values() or (published and class_name in PLANNED_REWARDS):
        checks.problems.not_available(path, name, *WHY_PLANNED[PLANNED_REWARDS.get(class_name, name)])
    elif is_file or not (published or DOTTED_PATH.fullmatch(name)):
        example = dotted(name) if is_file else next(iter(REWARDS))
        checks.add(path, name, "must be a short name or a dotted path such as my_package.rewards.score", example)
    elif published and name not in (*REWARDS, *offered("rewards")) and class_name not in PUBLISHED_REWARDS:
        known = (*REWARDS, *offered("rewards"))
        nearest = closest(class_name, (*known, *PUBLISHED_REWARDS)) or next(iter(REWARDS))
        rule = f"must be one of {', '.join(known)}, or the dotted path of your own function"
        checks.add(path, name, rule, nearest)


def check_filter(key: str, config: FilterConfig, checks: Checks) -> None:
    known = FILTER_ARGUMENTS.get(config.type)
    if known is None:
        return
    for name, value in config.filter_args.items():
        path = f"{key}.filter_args.{name}"
        if name not in known:
            nearest = closest(name, known)
            hint = f"; the nearest known one is {nearest}" if nearest else ""
            checks.add(path, value, f"unknown argument of {config.type}{hint}; known: {', '.join(known) or 'none'}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            checks.add(path, value, "must be a number", 0.5)
    low, high = config.filter_args.get("threshold_down", 0.0), config.filter_args.get("threshold_up", 1.0)
    if config.type == "mean_filter" and not checks.broken(key) and low >= high:
        rule = f"must be less than threshold_up {high}, or no group is ever kept"
        checks.add(f"{key}.filter_args.threshold_down", low, rule, 0.0 if high > 0 else high - 1)


def check_judges(config: RLVRConfig, checks: Checks) -> None:
    """The roles of judges that some reward asks exist, and have the devices that they need."""
    for name, section in config.rewards.items():
        if not list(judges_of(name, section)):
            for key in JUDGE_KEYS:
                if getattr(section, key):
                    checks.note(f"rewards.{name}.{key}", f"has no effect: it is an option of {LLM_JUDGE}")
        # The reward workers of a domain know one address.
        if {CLUSTER, INFERENCE} <= judge_types(name, section):
            asked = f"either the role {JUDGE_ROLE} ({CLUSTER}) or its own engines ({INFERENCE})"
            rule = f"the judges of a domain ask {asked}"
            checks.add(f"rewards.{name}.judge_model_type", section.judge_model_type, rule, CLUSTER)
    for name in own_judges(config.rewards):
        check_free_devices(config, name, checks)
    domains, role = judged_domains(config.rewards), config.reward_model
    if not domains:
        if role is not None and role.model_args.model_type is None:
            checks.note(JUDGE_ROLE, f"not started: no {LLM_JUDGE} has judge_model_type: cluster")
        return
    if role is None:
        rule = f"is needed by rewards.{domains[0]} (judge_model_type: cluster): the judge's model, engine and devices"
        checks.missing(JUDGE_ROLE, rule, f"{JUDGE_ROLE}.device_mapping: [0]")
        return
    key = f"{JUDGE_ROLE}.generating_args"
    if generates_otherwise(role):
        checks.note(key, f"has no effect: temperature, top_p and max_tokens are options of {LLM_JUDGE}")
    check_free_devices(config, JUDGE_ROLE, checks)


def check_free_devices(config: RLVRConfig, name: str, checks: Checks) -> None:
    """In an asynchronous run a judge's role shares its devices with no other role."""
    key = f"{section_of(name)}.device_mapping"
    if not is_async(config) or checks.broken(key):
        return
    roles = started_roles(config)
    sharing = [other for other in roles if other != name and shares_devices(roles[name], roles[other])]
    if sharing:
        rule = f"must share no device with {', '.join(sharing)}: answers are judged at any time"
        checks.add(key, roles[name].device_mapping, rule)
