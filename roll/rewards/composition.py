"""Sections ``rewards.<name>`` as reward functions: one rule, or several that make one score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.config.rewards import RewardComponentConfig, RewardConfig, judge_sampling
from roll.rewards.base import TIMEOUT_MARK, GuardedReward, RewardFunction, RewardOptionError, RewardResult, RewardSample
from roll.rewards.custom import Limits
from roll.rewards.registry import build_reward, load_target, option_names, resolve_name

OWN_NUMBERS = ("score", "error_rate", "timeout_rate")
"""Logged of every component, besides the numbers that it returns itself."""


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    reward: RewardFunction
    part: RewardComponentConfig = field(default_factory=RewardComponentConfig)


@dataclass(eq=False)
class CompositeReward(RewardFunction):
    """``score = (sum of weight * score over the components) * (product over the gates)``.

    Every component's score, failures and numbers are among the metrics of a result as ``<component>/<number>``.  A
    sample fails when a component without ``error_value`` does, unless a closed gate (factor 0) has decided already.
    """

    components: Sequence[Component]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names in the ``metrics`` of every result; empty if a component does not tell its own."""
        numbers = [getattr(component.reward, "numbers", ()) for component in self.components]
        if not all(numbers):
            return ()
        return tuple(
            f"{component.name}/{number}"
            for component, own in zip(self.components, numbers, strict=True)
            for number in (*OWN_NUMBERS, *own)
        )

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        columns = [component.reward(samples) for component in self.components]
        combined = []
        for results in zip(*columns, strict=True):
            total, factor = 0.0, 1.0
            metrics: dict[str, float] = {}
            errors = []
            for component, result in zip(self.components, results, strict=True):
                name, has_failed = component.name, result.error is not None
                score = component.part.error_value if has_failed else result.score
                # Averaged over samples, failures become rates.
                metrics |= {f"{name}/{number}": value for number, value in result.metrics.items()}
                metrics |= {} if score is None else {f"{name}/score": score}
                timed_out = TIMEOUT_MARK in (result.error or "")
                metrics |= {f"{name}/error_rate": float(has_failed), f"{name}/timeout_rate": float(timed_out)}
                if score is None:
                    errors.append(f"{name}: {result.error}")
                elif component.part.gate:
                    factor *= score
                else:
                    total += component.part.weight * score
            if errors and factor != 0:
                combined.append(RewardResult(None, metrics, "; ".join(errors)))
            else:
                combined.append(RewardResult(total * factor if factor else 0.0, metrics))
        return combined

    def check_host(self) -> None:
        for component in self.components:
            try:
                component.reward.check_host()
            except RewardOptionError as error:
                error.component = component.name
                raise

    def prepare(self) -> str:
        return "\n".join(filter(None, [component.reward.prepare() for component in self.components]))

    def close(self) -> None:
        for component in self.components:
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
"""Keys of a reward section, and the options of some rewards that they set."""


def build_section(name: str, config: RewardConfig) -> GuardedReward | CompositeReward:
    """The reward of a domain: the one that ``worker_cls`` names, or all of ``components`` as one. Raises
    ``RewardOptionError``: a reward that does not exist, or an option that it does not have or cannot use."""
    if not config.components:
        limits = Limits(config.timeout, config.concurrency)
        return GuardedReward(name, build_reward(*reward_options(name, config), limits))
    components = []
    for key, part in config.components.items():
        limits = Limits(part.timeout or config.timeout, config.concurrency)
        try:
            reward = build_reward(*reward_options(name, config, key), limits)
        except RewardOptionError as error:
            error.component = key
            raise
        components.append(Component(key, GuardedReward(f"{name}.{key}", reward), part))
    return CompositeReward(components)


def reward_options(name: str, config: RewardConfig, component: str = "") -> tuple[str, dict[str, Any]]:
    """Arguments of :func:`roll.rewards.build_reward` for the section ``rewards.<name>``, or one of its components.

    Without ``worker_cls`` the name of the component or the section is the reward's. The section's own keys are handed
    to rewards that have the option; ``reward_kwargs`` takes precedence. Raises ``RewardOptionError``: the reward does
    not exist.
    """
    part = config.components[component] if component else config
    worker_cls = part.worker_cls or component or name
    accepted = option_names(worker_cls)
    values = {option: getattr(config, key) for key, option in SECTION_KEYS.items()}
    values |= {"timeout": part.timeout or config.timeout} | ({"service_url": None} if config.use_local else {})
    given = {option: value for option, value in values.items() if value is not None} | judge_sampling(name, config)
    return worker_cls, {option: value for option, value in given.items() if option in accepted} | part.reward_kwargs


def concurrent_calls(name: str, config: RewardConfig) -> int:
    """Calls that a worker of the section takes at a time: ``max_concurrency``, else what its reward can do.

    Components are called one after the other, so that each sees one thread at a time.
    """
    if config.max_concurrency is not None or config.components:
        return config.max_concurrency or 1
    return int(getattr(load_target(resolve_name(config.worker_cls or name)), "concurrent_calls", 1))
