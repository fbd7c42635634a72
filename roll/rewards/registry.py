"""From the name in a YAML file to a reward function: short names, published class paths, and a user's own function."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from roll.config.names import PLANNED_REWARDS, PUBLISHED_REWARDS
from roll.rewards.base import RewardFunction, RewardNameError, RewardOptionError, RewardRule
from roll.rewards.custom import Limits

_RULES: dict[str, tuple[str, str]] = {
    "gsm8k_rule": ("roll.rewards.text_rules", "Gsm8kRule"),
    "math_rule": ("roll.rewards.math_rule", "MathRule"),
    "multiple_choice": ("roll.rewards.multiple_choice", "MultipleChoice"),
    "format": ("roll.rewards.text_rules", "FormatRule"),
    "exact_match": ("roll.rewards.text_rules", "ExactMatch"),
    "f1": ("roll.rewards.text_rules", "F1"),
    "detection": ("roll.rewards.detection", "Detection"),
    "reward_model": ("roll.rewards.http_reward", "RewardModelScore"),
    "ifeval": ("roll.rewards.ifeval", "IFEval"),
    "crossthinkqa": ("roll.rewards.multiple_choice", "CrossThinkQA"),
    "repetition_penalty": ("roll.rewards.text_rules", "RepetitionPenalty"),
    "length_penalty": ("roll.rewards.text_rules", "LengthPenalty"),
    "http_reward": ("roll.rewards.http_reward", "HttpReward"),
    "llm_judge": ("roll.rewards.judge", "LLMJudge"),
    "code_sandbox": ("roll.rewards.code_sandbox", "CodeSandbox"),
}
"""Short name to module and class; imported when chosen, so a worker loads only what it uses."""

_REGISTERED: dict[str, type[RewardRule]] = {}
_PUBLISHED = PUBLISHED_REWARDS
"""Class names behind ``roll.pipeline.rlvr.rewards.<module>.``, as ROLL's YAML files have them."""
_NOT_YET = PLANNED_REWARDS
_PUBLISHED_PREFIX = "roll.pipeline.rlvr.rewards."

R = TypeVar("R", bound=type)


def reward_names() -> list[str]:
    """The short names that ``worker_cls`` takes."""
    return sorted({*_RULES, *_REGISTERED})


def register_reward(name: str) -> Callable[[R], R]:
    """Give a :class:`RewardRule` dataclass of one's own a short name.

    Raises:
        ValueError: the name is taken.
    """

    def decorate(rule: R) -> R:
        if name in _RULES or name in _REGISTERED:
            raise ValueError(f"reward name {name!r} is taken")
        _REGISTERED[name] = rule
        return rule

    return decorate


def resolve_name(worker_cls: str) -> str:
    """A short name or a dotted path for what ``worker_cls`` says; published class paths become short names.

    Raises:
        RewardNameError: a published reward that this version does not have, or an unknown name without a dot.
    """
    if worker_cls in _RULES or worker_cls in _REGISTERED:
        return worker_cls
    known = ", ".join(reward_names())
    class_name = worker_cls.rpartition(".")[2]
    if worker_cls.startswith(_PUBLISHED_PREFIX) or class_name == worker_cls:
        if class_name in _PUBLISHED:
            return _PUBLISHED[class_name]
        if class_name in _NOT_YET or worker_cls in _NOT_YET.values():
            raise RewardNameError(f"worker_cls {worker_cls!r}: not available yet; available: {known}")
        near = difflib.get_close_matches(class_name, [*reward_names(), *_PUBLISHED], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RewardNameError(
            f"worker_cls {worker_cls!r}: no such reward; {hint}known: {known}, or the dotted path of your own function"
        )
    return worker_cls


def build_reward(
    worker_cls: str, options: Mapping[str, Any] | None = None, limits: Limits | None = None
) -> RewardFunction:
    """The reward function that ``worker_cls`` names, with its ``reward_kwargs``.

    Args:
        worker_cls: a short name (:func:`reward_names`), a class path as published by ROLL, or the dotted path of a
            function ``(prompt, response, ground_truth, **row) -> float | dict`` or of a :class:`RewardRule` class.
        options: the rule's fields, or keyword arguments of one's own function.
        limits: time and concurrency of one's own function; None: no time limit.  Rules have options for theirs.

    Raises:
        RewardOptionError: unknown name or option (with the nearest known one), or an option of the wrong type or value.
    """
    options = dict(options or {})
    name = resolve_name(worker_cls)
    target = load_target(name)
    if isinstance(target, type):
        return build_rule(name, target, options)
    from roll.rewards.custom import CustomReward

    return CustomReward(name, target, options, limits)


def option_names(worker_cls: str) -> set[str]:
    """The options of a rule; empty for a user's own function.

    Raises:
        RewardOptionError: the reward does not exist.
    """
    target = load_target(resolve_name(worker_cls))
    return {field.name for field in dataclasses.fields(target) if field.init} if isinstance(target, type) else set()


def load_target(name: str) -> Any:
    """The rule's class or the user's function behind a resolved name."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name in _RULES:
        module, class_name = _RULES[name]
        return getattr(importlib.import_module(module), class_name)
    target = load_dotted(name)
    if isinstance(target, type) and not (issubclass(target, RewardRule) and dataclasses.is_dataclass(target)):
        raise RewardNameError(f"worker_cls {name!r}: a class must be a dataclass derived from roll.rewards.RewardRule")
    return target


def load_dotted(path: str) -> Any:
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardNameError(f"worker_cls {path!r}: cannot import {module_name!r}: {error}") from error
    target = getattr(module, attribute, None)
    if not callable(target):
        raise RewardNameError(f"worker_cls {path!r}: {module_name!r} has no function or class {attribute!r}")
    return target


def build_rule(name: str, rule: type, options: Mapping[str, Any]) -> RewardFunction:
    """An instance of a rule's dataclass; every option is checked against the field's type."""
    fields = {field.name: field for field in dataclasses.fields(rule) if field.init}
    hints = typing.get_type_hints(rule)
    checked = {}
    for option, value in options.items():
        if option not in fields:
            near = difflib.get_close_matches(option, fields, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RewardOptionError(
                f"reward {name}: unknown option {option!r}; {hint}known: {', '.join(fields) or 'none'}"
            )
        checked[option] = check_option(name, option, value, hints[option])
    missing = [
        field.name
        for field in fields.values()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in options
    ]
    if missing:
        raise RewardOptionError(f"reward {name}: option {missing[0]!r} must be set in reward_kwargs")
    built: RewardFunction = rule(**checked)
    return built


def check_option(name: str, option: str, value: Any, hint: Any) -> Any:
    """``value`` if it fits ``hint`` (bool, int, float, str, Literal, list of str, or a union of those)."""
    if _fits(value, hint):
        return float(value) if hint is float else value
    wanted = getattr(hint, "__name__", None) or str(hint)
    if typing.get_origin(hint) is typing.Literal:
        wanted = "one of " + ", ".join(map(repr, typing.get_args(hint)))
    raise RewardOptionError(f"reward {name}: {option} = {value!r}: must be {wanted}")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in typing.get_args(hint))
    if origin is dict:
        return isinstance(value, dict)
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, (list, tuple)) and all(_fits(part, item) for part in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
