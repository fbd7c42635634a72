"""Rewards: rules that score responses, and the registry that finds them by name."""

from roll.rewards.base import RewardError as RewardError
from roll.rewards.base import RewardFunction as RewardFunction
from roll.rewards.base import RewardOptionError as RewardOptionError
from roll.rewards.base import RewardResult as RewardResult
from roll.rewards.base import RewardRule as RewardRule
from roll.rewards.base import RewardSample as RewardSample
from roll.rewards.base import apply_on_error as apply_on_error
from roll.rewards.base import failure_rates as failure_rates
from roll.rewards.registry import build_reward as build_reward
from roll.rewards.registry import build_section as build_section
from roll.rewards.registry import resolve_name as resolve_name
from roll.rewards.registry import reward_options as reward_options
