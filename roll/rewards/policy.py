"""What becomes of samples whose reward failed, and the numbers that make failures visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from roll.config.rewards import RewardConfig
from roll.rewards.base import RewardResult
from roll.rewards.registry import option_names

OnError = Literal["raise", "mask", "value"]

SECTION_KEYS = {"timeout": "timeout", "format_pattern": "pattern"}
"""Keys of a reward section that are options of some rules."""


class RewardError(RuntimeError):
    """A reward failed and the configuration says ``on_error: raise``."""


def apply_on_error(
    results: Sequence[RewardResult], on_error: OnError, error_value: float = 0.0, name: str = "reward"
) -> list[RewardResult]:
    """``mask`` leaves failed samples without a score, ``value`` scores them ``error_value``; both keep the error text.

    Raises:
        RewardError: with ``raise``, for the first failure.
    """
    failed = [result for result in results if result.error is not None]
    if failed and on_error == "raise":
        raise RewardError(f"{name}: {len(failed)} of {len(results)} samples failed, the first with: {failed[0].error}")
    if on_error == "value":
        return [result if result.error is None else replace(result, score=error_value) for result in results]
    return list(results)


def failure_rates(results: Sequence[RewardResult]) -> dict[str, float]:
    """``error_rate`` (all failures) and ``timeout_rate`` of a batch, 0..1; empty for an empty batch."""
    if not results:
        return {}
    errors = [result.error for result in results if result.error is not None]
    timeouts = sum("timeout:" in error for error in errors)
    return {"error_rate": len(errors) / len(results), "timeout_rate": timeouts / len(results)}


def reward_options(name: str, config: RewardConfig) -> tuple[str, dict[str, Any]]:
    """What :func:`roll.rewards.build_reward` needs for the section ``rewards.<name>``.

    Without ``worker_cls`` the section's name is the reward's.  The options are ``reward_kwargs``, and the section's own
    keys ``timeout`` and ``format_pattern`` for rules that have such an option.

    Raises:
        RewardOptionError: the reward does not exist.
    """
    worker_cls = config.worker_cls or name
    taken = option_names(worker_cls)
    values = {option: getattr(config, key) for key, option in SECTION_KEYS.items() if option in taken}
    options = {option: value for option, value in values.items() if value is not None}
    return worker_cls, {**options, **config.reward_kwargs}
