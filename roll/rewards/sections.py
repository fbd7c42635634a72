"""From a section ``rewards.<name>`` to the reward function that its workers call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.config.rewards import RewardComponentConfig, RewardConfig, judge_sampling
from roll.rewards.base import RewardOptionError
from roll.rewards.composition import Component, CompositeReward
from roll.rewards.deadline import Limits
from roll.rewards.guard import GuardedReward
from roll.rewards.registry import build_reward, load_target, option_names, resolve_name

SECTION_KEYS = {
    "timeout": "timeout",
    "concurrency": "concurrency",
    "format_pattern": "pattern",
    "reward_type": "reward_type",
    "response_length_penalty_coef": "length_penalty_coef",
    "judge_model_type": "model_type",
    "judge_model_name": "model",
    "judge_api_url": "base_url",
    "judge_api_key": "api_key",
    "judge_prompt": "prompt",
    "code_url": "service_url",
}
"""Keys of a reward section that are options of some rewards: each is handed to a reward that has the option, unless
``reward_kwargs`` sets it."""


def build_section(name: str, config: RewardConfig) -> GuardedReward | CompositeReward:
    """The reward of a domain: the one that ``worker_cls`` names, or all of ``components`` as one.

    Raises:
        RewardOptionError: a reward that does not exist, or an option that it does not have or cannot use.
    """
    if not config.components:
        limits = Limits(config.timeout, config.concurrency)
        return GuardedReward(name, build_reward(*reward_options(name, config), limits))
    return CompositeReward([_component(name, key, part, config) for key, part in config.components.items()])


def _component(domain: str, name: str, part: RewardComponentConfig, config: RewardConfig) -> Component:
    limits = Limits(part.timeout or config.timeout, config.concurrency)
    shared = section_options(domain, config) | {"timeout": limits.timeout}
    try:
        reward = build_reward(*chosen_options(part.worker_cls or name, shared, part.reward_kwargs), limits)
    except RewardOptionError as error:
        error.component = name
        raise
    guarded = GuardedReward(f"{domain}.{name}", reward)
    return Component(name, guarded, part.weight, part.gate, part.gate_threshold, part.error_value)


def reward_options(name: str, config: RewardConfig) -> tuple[str, dict[str, Any]]:
    """What :func:`roll.rewards.build_reward` needs for the section ``rewards.<name>`` without components.

    Without ``worker_cls`` the section's name is the reward's.

    Raises:
        RewardOptionError: the reward does not exist.
    """
    return chosen_options(config.worker_cls or name, section_options(name, config), config.reward_kwargs)


def concurrent_calls(name: str, config: RewardConfig) -> int:
    """Calls that a worker of the section takes at a time: ``max_concurrency``, else what its reward can do.

    Components are called one after the other, so that each sees one thread at a time.
    """
    if config.max_concurrency is not None or config.components:
        return config.max_concurrency or 1
    return int(getattr(load_target(resolve_name(config.worker_cls or name)), "concurrent_calls", 1))


def section_options(name: str, config: RewardConfig) -> dict[str, Any]:
    """The section's own keys under the names of the options that they stand for; those without a value are left out."""
    values = {option: getattr(config, key) for key, option in SECTION_KEYS.items()}
    if config.use_local:
        values["service_url"] = None
    return {option: value for option, value in values.items() if value is not None} | judge_sampling(name, config)


def chosen_options(worker_cls: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The reward and its options: ``shared`` ones that it has, then its ``own``."""
    taken = option_names(worker_cls)
    return worker_cls, {**{option: value for option, value in shared.items() if option in taken}, **own}
