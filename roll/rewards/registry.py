"""Resolves the name in a YAML file to a reward: short names, published class paths, and a user's own function."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from roll.config.installation import dotted_path, offered
from roll.config.reading.errors import did_you_mean
from roll.config.reading.schema import Mismatch, convert
from roll.config.rewards import PLANNED_REWARDS, PUBLISHED_REWARDS, REWARDS
from roll.rewards.base import RewardFunction, RewardNameError, RewardOptionError, RewardRule
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


def option_names(worker_cls: str) -> set[str]:
    """The options of a rule; empty for a user's own function. Raises ``RewardOptionError``: the reward does not
    exist."""
    target = load_target(resolve_name(worker_cls))
    return {field.name for field in dataclasses.fields(target) if field.init} if isinstance(target, type) else set()


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
        module = importlib.import_module(module_name)
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
