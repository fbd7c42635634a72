"""Checks of the reward domains: which reward scores which rows, from what components, and what is filtered."""

from __future__ import annotations

from roll.config.checks.base import Checks
from roll.config.installation import offered
from roll.config.losses import SCORE_INPUT
from roll.config.model_files import model_config
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
from roll.methods.policy_plan import is_async
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.plan import started_roles


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
