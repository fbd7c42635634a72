"""Rewards: rules that score responses, and the registry that finds them by name."""

from roll.rewards.base import (
    RewardError,
    RewardFunction,
    RewardOptionError,
    RewardResult,
    RewardRule,
    RewardSample,
    apply_on_error,
    failure_rates,
)
from roll.rewards.composition import build_section, reward_options
from roll.rewards.registry import build_reward, resolve_name

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardOptionError",
    "RewardResult",
    "RewardRule",
    "RewardSample",
    "apply_on_error",
    "build_reward",
    "build_section",
    "failure_rates",
    "resolve_name",
    "reward_options",
]
