"""What a policy loss is, and the registry of them.

A policy loss is a function ``(inputs: LossInputs, options, metrics: MetricBuilder) -> Tensor (B, L)``: the loss of each
token, before aggregation, correction and sample weights, which :func:`roll.algorithms.actor_loss.actor_loss` adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from roll.algorithms.loss_types import LossInputs
from roll.algorithms.metric_builder import MetricBuilder
from roll.algorithms.options import PPOOptions
from roll.algorithms.registry import Registry

PolicyLoss = Callable[[LossInputs, Any, MetricBuilder], Tensor]

policy_losses: Registry[PolicyLoss] = Registry("pg_variant")
_options_classes: dict[PolicyLoss, type] = {}


def register_policy_loss(
    name: str, *, options: type = PPOOptions, aliases: tuple[str, ...] = ()
) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: make a policy loss selectable as ``pg_variant: name``; ``options`` is its dataclass of YAML keys."""

    def decorate(function: PolicyLoss) -> PolicyLoss:
        policy_losses.add(function, name, aliases)
        _options_classes[function] = options
        return function

    return decorate


def options_class_of(pg_variant: str) -> type:
    """The options dataclass of a variant; PPO's for a plain function found by dotted path."""
    return _options_classes.get(policy_losses.resolve(pg_variant), PPOOptions)
