"""Sections ``rewards.<name>`` as reward functions: one rule, or several that make one score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.config.rewards import RewardComponentConfig, RewardConfig, judge_sampling
from roll.rewards.base import GuardedReward, RewardFunction, RewardOptionError, RewardResult, RewardSample, is_timeout
from roll.rewards.custom import Limits
from roll.rewards.registry import build_reward, load_target, option_names, resolve_name

OWN_NUMBERS = ("score", "error_rate", "timeout_rate")
"""Logged of every component, besides the numbers that it returns itself."""


@dataclass(frozen=True, slots=True)
class Component:
    """One of the rewards, and its part in the score."""

    name: str
    reward: RewardFunction
    part: RewardComponentConfig = field(default_factory=RewardComponentConfig)


class CompositeReward:
    """``score = (sum of weight * score over the components) * (product over the gates)``.

    Every component's score, failures and numbers are among the metrics of a result as ``<component>/<number>``.  A
    sample fails when a component without ``error_value`` does, unless a closed gate (factor 0) has decided already.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = tuple(components)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names in the ``metrics`` of every result; empty if a component does not tell its own."""
        numbers = [getattr(component.reward, "numbers", ()) for component in self._components]
        if not all(numbers):
            return ()
        return tuple(
            f"{component.name}/{number}"
            for component, own in zip(self._components, numbers, strict=True)
            for number in (*OWN_NUMBERS, *own)
        )

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        columns = [component.reward(samples) for component in self._components]
        return [self.combined(row) for row in zip(*columns, strict=True)]

    def combined(self, results: Sequence[RewardResult]) -> RewardResult:
        """The result of a sample from those of its components, in their order."""
        total, factor = 0.0, 1.0
        metrics: dict[str, float] = {}
        errors = []
        for component, result in zip(self._components, results, strict=True):
            name, has_failed = component.name, result.error is not None
            score = component.part.error_value if has_failed else result.score
            # Averaged over samples, failures become rates.
            metrics |= {f"{name}/{number}": value for number, value in result.metrics.items()}
            metrics |= {} if score is None else {f"{name}/score": score}
            metrics |= {f"{name}/error_rate": float(has_failed), f"{name}/timeout_rate": float(is_timeout(result))}
            if score is None:
                errors.append(f"{name}: {result.error}")
            elif component.part.gate:
                threshold = component.part.gate_threshold
                factor *= score if threshold is None else float(score >= threshold)
            else:
                total += component.part.weight * score
        if errors and factor != 0:
            return RewardResult(None, metrics, "; ".join(errors))
        return RewardResult(total * factor if factor else 0.0, metrics)

    def check_host(self) -> None:
        for component in self._components:
            if isinstance(component.reward, GuardedReward):
                try:
                    component.reward.check_host()
                except RewardOptionError as error:
                    error.component = component.name
                    raise

    def prepare(self) -> str:
        parts = [component.reward for component in self._components]
        return "\n".join(filter(None, [part.prepare() for part in parts if isinstance(part, GuardedReward)]))

    def close(self) -> None:
        for component in self._components:
            component.reward.close()


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
    components = []
    for key, part in config.components.items():
        limits = Limits(part.timeout or config.timeout, config.concurrency)
        shared = section_options(name, config) | {"timeout": limits.timeout}
        try:
            reward = build_reward(*chosen_options(part.worker_cls or key, shared, part.reward_kwargs), limits)
        except RewardOptionError as error:
            error.component = key
            raise
        components.append(Component(key, GuardedReward(f"{name}.{key}", reward), part))
    return CompositeReward(components)


def reward_options(name: str, config: RewardConfig) -> tuple[str, dict[str, Any]]:
    """Arguments of :func:`roll.rewards.build_reward` for the section ``rewards.<name>`` without components.

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
    """The section's own keys under the names of the options that they set; those without a value are left out."""
    values = {option: getattr(config, key) for key, option in SECTION_KEYS.items()}
    if config.use_local:
        values["service_url"] = None
    return {option: value for option, value in values.items() if value is not None} | judge_sampling(name, config)


def chosen_options(worker_cls: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The reward and its options: ``shared`` ones that it has, then its ``own``."""
    accepted = option_names(worker_cls)
    return worker_cls, {**{option: value for option, value in shared.items() if option in accepted}, **own}
