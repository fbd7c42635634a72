"""Checks of judges whose engines the run starts itself."""

from __future__ import annotations

from roll.config.checks import Checks
from roll.config.judges import (
    CLUSTER,
    INFERENCE,
    JUDGE_KEYS,
    JUDGE_ROLE,
    LLM_JUDGE,
    generates_otherwise,
    judge_types,
    judged_domains,
    judges_of,
    own_judges,
    section_of,
)
from roll.config.planning import shares_devices
from roll.config.rlvr import RLVRConfig
from roll.pipelines.rlvr.planning import is_async, started_roles


def check_judges(config: RLVRConfig, checks: Checks) -> None:
    """The judges' roles are there, where they are asked, and have the devices that they need."""
    note_idle_keys(config, checks)
    check_one_judge(config, checks)
    for name in own_judges(config):
        check_free_devices(config, name, checks)
    domains, role = judged_domains(config), config.reward_model
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


def check_one_judge(config: RLVRConfig, checks: Checks) -> None:
    """A domain's judges ask one role at most: its reward workers know one address."""
    for name, section in config.rewards.items():
        if {CLUSTER, INFERENCE} <= judge_types(name, section):
            rule = (
                f"the judges of a domain ask either the role {JUDGE_ROLE} ({CLUSTER}) or its own engines ({INFERENCE})"
            )
            checks.add(f"rewards.{name}.judge_model_type", section.judge_model_type, rule, CLUSTER)


def check_free_devices(config: RLVRConfig, name: str, checks: Checks) -> None:
    """In an asynchronous run a judge's role shares its devices with nobody."""
    key = f"{section_of(name)}.device_mapping"
    if not is_async(config) or checks.broken(key):
        return
    roles = started_roles(config)
    sharing = [other for other in roles if other != name and shares_devices(roles[name], roles[other])]
    if sharing:
        rule = f"must share no device with {', '.join(sharing)}: answers are judged at any time"
        checks.add(key, roles[name].device_mapping, rule)


def note_idle_keys(config: RLVRConfig, checks: Checks) -> None:
    """Keys of judges where no judge reads them."""
    for name, section in config.rewards.items():
        if list(judges_of(name, section)):
            continue
        for key in JUDGE_KEYS:
            if getattr(section, key):
                checks.note(f"rewards.{name}.{key}", f"has no effect: it is an option of {LLM_JUDGE}")
