"""The torch-free lists of names agree with the registries of the packages that implement them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from roll.algorithms.registry import Registry
from roll.config import algorithm, choices, data, rewards, run
from roll.config.checks.keys import REFUSALS
from roll.config.reading.fields import Table
from roll.config.reading.legacy_keys import DEAD_KEYS
from roll.config.reading.schema import schema_paths
from roll.config.strategies.registry import BACKENDS
from roll.methods.sft_keys import SFTConfig
from roll.pipelines.agentic.config import AgenticConfig
from roll.pipelines.rlvr.config import RLVRConfig


def ours(registry: Registry[Any]) -> set[str]:
    """Names and aliases, without those that other tests have registered for functions of their own."""
    return {name for name, function in registry._entries.items() if function.__module__.startswith("roll.")}


def shipped(table: Table[Any]) -> set[str]:
    return {name for name in table if not table.is_own(name)}


def test_policy_losses() -> None:
    from roll.algorithms import losses  # noqa: F401  (importing it registers every loss)
    from roll.algorithms.policy_losses import policy_losses

    assert shipped(choices.POLICY_LOSSES) == ours(policy_losses)


def test_advantage_estimators() -> None:
    from roll.algorithms.advantages import advantage_estimators

    assert shipped(choices.ADV_ESTIMATORS) == ours(advantage_estimators)


def test_kl_and_aggregation() -> None:
    from roll.algorithms.aggregation import aggregation_modes
    from roll.algorithms.kl import kl_estimators

    assert set(algorithm.KL_PENALTIES) - {"full"} == ours(kl_estimators), "of the whole vocabulary: refused by name"
    assert set(algorithm.LOSS_AGG_MODES) == ours(aggregation_modes)


def test_templates_and_trackers() -> None:
    from roll.datasets.templates import TEMPLATES
    from roll.tracking.trackers import OPTIONS

    assert set(data.TEMPLATES) == set(TEMPLATES)
    assert set(run.TRACKERS) == set(OPTIONS)


def test_rewards() -> None:
    from roll.rewards.registry import load_target

    assert all(dataclasses.is_dataclass(load_target(name)) for name in rewards.REWARDS)


def test_group_filters() -> None:
    from roll.rollout.flow import build_filter, group_filters

    assert set(rewards.FILTER_ARGUMENTS) == set(group_filters.names)
    for kind, arguments in rewards.FILTER_ARGUMENTS.items():
        build_filter(kind, dict.fromkeys(arguments, 0.5))


@pytest.mark.parametrize("names_of_kind", [algorithm.KL_PENALTIES, algorithm.LOSS_AGG_MODES, algorithm.NORM_TYPES])
def test_lists_have_no_doubles(names_of_kind: tuple[str, ...]) -> None:
    assert len(set(names_of_kind)) == len(names_of_kind)


def test_every_refusal_can_happen() -> None:
    """No pattern of the table is a dead letter: each names a key of the schema."""
    known = {*schema_paths(RLVRConfig), *schema_paths(SFTConfig), *schema_paths(AgenticConfig)}
    known |= {path for options in {backend.options for backend in BACKENDS.values()} for path in schema_paths(options)}
    known |= {"backend_name", "proxy_type", *(key for keys in DEAD_KEYS.values() for key in keys)}
    for refusal in REFUSALS:
        last = refusal.pattern.rsplit(".", 1)[-1]
        assert last in known or "*" in last, refusal.pattern
