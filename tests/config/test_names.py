"""The torch-free lists of names agree with the registries of the packages that implement them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from roll.algorithms.registry import Registry
from roll.config import names
from roll.pipelines.rlvr.config import RLVRConfig


def ours(registry: Registry[Any]) -> set[str]:
    """Names and aliases, without those that other tests have registered for functions of their own."""
    return {name for name, function in registry._entries.items() if function.__module__.startswith("roll.")}


def test_policy_losses() -> None:
    from roll.algorithms import losses  # noqa: F401  (importing it registers every loss)
    from roll.algorithms.loss_types import policy_losses

    assert set(names.PG_VARIANTS) == ours(policy_losses)


def test_advantage_estimators() -> None:
    from roll.algorithms.advantages import advantage_estimators

    assert {*names.ADV_ESTIMATORS, *names.PLANNED_ADV_ESTIMATORS} == ours(advantage_estimators)


def test_norms_kl_and_aggregation() -> None:
    from roll.algorithms.aggregation import AGGREGATION_MODES
    from roll.algorithms.kl import KL_ESTIMATORS
    from roll.algorithms.losses import value_losses
    from roll.algorithms.samples import NORM_TYPES

    assert set(names.NORM_TYPES) | {None} == set(NORM_TYPES)
    assert set(names.KL_PENALTIES) == set(KL_ESTIMATORS)
    assert set(names.LOSS_AGG_MODES) == set(AGGREGATION_MODES)
    assert set(names.VALUE_LOSSES) == set(value_losses.names)


def test_options_of_policy_losses_are_keys_with_the_same_defaults() -> None:
    from roll.algorithms import options

    keys = {item.name: item for item in dataclasses.fields(RLVRConfig)}
    for name in dir(options):
        cls = getattr(options, name)
        if not name.endswith("Options") or not dataclasses.is_dataclass(cls) or name == "CorrectionOptions":
            continue
        for item in dataclasses.fields(cls):
            if item.name in ("pg", "correction"):
                continue
            assert item.name in keys, f"{name}.{item.name} is no key of the configuration"
            if item.default is not dataclasses.MISSING:
                assert keys[item.name].default == item.default, f"default of {item.name}"


def test_corrections() -> None:
    from roll.algorithms.corrections import CORRECTION_PRESETS

    assert set(names.CORRECTION_PRESETS) == set(CORRECTION_PRESETS)


def test_templates() -> None:
    from roll.datasets.templates import TEMPLATES

    assert set(names.TEMPLATES) == set(TEMPLATES)


def test_rewards() -> None:
    from roll.rewards.registry import load_target

    assert all(dataclasses.is_dataclass(load_target(name)) for name in names.REWARDS)


def test_trackers() -> None:
    from roll.tracking.trackers import OPTIONS

    assert set(names.TRACKERS) == set(OPTIONS)


def test_group_filters() -> None:
    from roll.rollout.filters import build_filter, group_filters

    assert set(names.FILTER_ARGUMENTS) == set(group_filters.names)
    for kind, arguments in names.FILTER_ARGUMENTS.items():
        build_filter(kind, dict.fromkeys(arguments, 0.5))


@pytest.mark.parametrize("names_of_kind", [names.KL_PENALTIES, names.LOSS_AGG_MODES, names.NORM_TYPES])
def test_lists_have_no_doubles(names_of_kind: tuple[str, ...]) -> None:
    assert len(set(names_of_kind)) == len(names_of_kind)
