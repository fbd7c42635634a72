"""Reward functions of a configuration: by the name in a YAML file (short names, published class paths, a user's own
function), and of sections ``rewards.<name>``: one rule, or several that make one score."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.installation import dotted_path, offered
from roll.config.objects import own_module
from roll.config.reading.errors import did_you_mean
from roll.config.reading.schema import Mismatch, convert
from roll.config.rewards import (
    PLANNED_REWARDS,
    PUBLISHED_REWARDS,
    REWARDS,
    RewardComponentConfig,
    RewardConfig,
    judge_sampling,
)
from roll.rewards.base import (
    TIMEOUT_MARK,
    GuardedReward,
    RewardFunction,
    RewardNameError,
    RewardOptionError,
    RewardResult,
    RewardRule,
    RewardSample,
)
from roll.rewards.custom import BATCH_ARGUMENT, CustomReward, Limits

_PUBLISHED_PREFIX = "roll.pipeline.rlvr.rewards."


def resolve_name(worker_cls: str) -> str:
    """A short name or a dotted path for what ``worker_cls`` says; published class paths become short names. Raises
    ``RewardNameError``: a published reward that this version does not have, or an unknown name without a dot."""
    if worker_cls in REWARDS:
        return worker_cls
    known = ", ".join((*sorted(REWARDS), *offered("rewards")))
    worker_cls = dotted_path("rewards", worker_cls)
    class_name = worker_cls.rpartition(".")[2]
    if worker_cls.startswith(_PUBLISHED_PREFIX) or class_name == worker_cls:
        if class_name in PUBLISHED_REWARDS:
            return PUBLISHED_REWARDS[class_name]
        if class_name in PLANNED_REWARDS or worker_cls in PLANNED_REWARDS.values():
            raise RewardNameError(f"worker_cls {worker_cls!r}: not available yet; available: {known}")
        hint = did_you_mean(class_name, (*REWARDS, *PUBLISHED_REWARDS))
        raise RewardNameError(
            f"worker_cls {worker_cls!r}: no such reward; {hint}known: {known}, or the dotted path of your own function"
        )
    return worker_cls


def build_reward(
    worker_cls: str, options: Mapping[str, Any] | None = None, limits: Limits | None = None
) -> RewardFunction:
    """The reward function that ``worker_cls`` names, with its ``reward_kwargs``.

    Args:
        worker_cls: a short name, a class path as published by ROLL, or the dotted path of a function ``(prompt,
            response, ground_truth, **row) -> float | dict`` or of a :class:`RewardRule` class.
        options: the rule's fields, or keyword arguments of one's own function.
        limits: time and concurrency of one's own function; None: no time limit.  Rules have options for theirs.

    Raises:
        RewardOptionError: unknown name or option (with the nearest known one), or an option of the wrong type or value.
    """
    options = dict(options or {})
    name = resolve_name(worker_cls)
    target = load_target(name)
    if not isinstance(target, type):
        return CustomReward(name, target, options, limits)
    fields = {field.name: field for field in dataclasses.fields(target) if field.init}
    hints = typing.get_type_hints(target)
    checked = {}
    for option, value in options.items():
        if option not in fields:
            hint = did_you_mean(option, fields)
            raise RewardOptionError(
                f"reward {name}: unknown option {option!r}; {hint}known: {', '.join(fields) or 'none'}"
            )
        try:
            checked[option] = convert(value, hints[option])
        except Mismatch as error:
            raise RewardOptionError(f"reward {name}: {option} = {value!r}: {error.rule}") from None
    unset = dataclasses.MISSING
    for option, field in fields.items():
        if field.default is unset and field.default_factory is unset and option not in options:
            raise RewardOptionError(f"reward {name}: option {option!r} must be set in reward_kwargs")
    built: RewardFunction = target(**checked)
    return built


def needed_columns(worker_cls: str) -> set[str]:
    """Columns, or options in their place, without which the reward cannot score a row."""
    name = resolve_name(worker_cls)
    if name in REWARDS:
        return {"ground_truth"} if REWARDS[name].needs_truth else set()
    target = load_target(name)
    if isinstance(target, type) or BATCH_ARGUMENT in (parameters := inspect.signature(target).parameters):
        return set()
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {key for key, one in parameters.items() if one.kind in plain and one.default is one.empty}
    return needed - {"prompt", "response", "finish_reason"}


def load_target(name: str) -> Any:
    """The rule's class or the user's function of a resolved name."""
    path = REWARDS[name].target if name in REWARDS else name
    module_name, _, attribute = path.rpartition(".")
    try:
        module = own_module(module_name)
    except ImportError as error:
        raise RewardNameError(f"worker_cls {path!r}: cannot import {module_name!r}: {error}") from error
    target = getattr(module, attribute, None)
    if not callable(target):
        own = [one for one, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        rule = f"{module_name!r} has no function or class {attribute!r}; it has {', '.join(own) or 'none'}"
        raise RewardNameError(f"worker_cls {path!r}: {rule}")
    if isinstance(target, type) and not (issubclass(target, RewardRule) and dataclasses.is_dataclass(target)):
        raise RewardNameError(f"worker_cls {name!r}: a class must be a dataclass derived from roll.rewards.RewardRule")
    return target


OWN_NUMBERS = ("score", "error_rate", "timeout_rate")
"""Logged of every component, besides the numbers that it returns itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Component:
    name: str
    reward: RewardFunction
    part: RewardComponentConfig = dataclasses.field(default_factory=RewardComponentConfig)


@dataclasses.dataclass(eq=False)
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
    target = load_target(resolve_name(worker_cls))
    accepted = {field.name for field in dataclasses.fields(target) if field.init} if isinstance(target, type) else set()
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
