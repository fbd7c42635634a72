"""Rewards: rules that score responses, and the registry that finds them by name."""

from roll.rewards.base import RewardFunction, RewardOptionError, RewardResult, RewardRule, RewardSample
from roll.rewards.registry import build_reward, register_reward, resolve_name, reward_names

__all__ = [
    "RewardFunction",
    "RewardOptionError",
    "RewardResult",
    "RewardRule",
    "RewardSample",
    "build_reward",
    "register_reward",
    "resolve_name",
    "reward_names",
]
