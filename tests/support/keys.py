"""Configurations from keys as files have them, flat names of losses' and estimators' options included."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from roll.algorithms.losses import ActorLossOptions, actor_loss_options
from roll.config.algorithm import PPOConfig
from roll.config.reading.errors import Problems
from roll.config.reading.schema import SchemaReader, rules_of

C = TypeVar("C", bound=PPOConfig)


def config_of(cls: type[C], **keys: Any) -> C:
    """
    Raises:
        ValueError: the first mistake in a choice.
    """
    problems, choices, left = Problems(), dict[str, Any](), dict(keys)
    for item in fields(cls):
        if rules_of(item).table is not None:
            choices[item.name], others = SchemaReader(problems).read_choice(item, left)
            left = dict(others)
    if problems.errors:
        raise ValueError(str(problems.errors[0]))
    return cls(**left, **choices)


def algorithm(**keys: Any) -> PPOConfig:
    return config_of(PPOConfig, **keys)


def loss_options(keys: dict[str, Any]) -> ActorLossOptions:
    return actor_loss_options(algorithm(**keys))
