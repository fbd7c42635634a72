"""Keys that nothing reads are named, and what the fields declare of their readers is what the losses really read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.algorithms.advantages import AdvantageInputs, advantage_estimators
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import LossInputs, policy_losses
from roll.config.algorithm import ADV_ESTIMATORS
from roll.config.choices import POLICY_LOSSES, GdpoOptions
from roll.config.reading.errors import ConfigError
from roll.config.reading.schema import nested_section, rules_of, type_hints
from roll.config.strategies.registry import BACKENDS
from roll.methods.sft_keys import SFTConfig
from roll.pipelines.rlvr.config import RLVRConfig
from tests.config.good import GOOD, load
from tests.support.names import ADVANTAGE_NAMES


def loss_inputs() -> LossInputs:
    generator = torch.Generator().manual_seed(0)
    log_probs, old, rollout, reference = (-torch.rand(4, 6, generator=generator) * 3 for _ in range(4))
    advantages = torch.randn(4, 6, generator=generator)
    mask = torch.ones(4, 6, dtype=torch.bool)
    return LossInputs(log_probs.requires_grad_(), advantages, mask, old, rollout, reference)


def recorded(options: Any, read: set[str]) -> Any:
    """The options with every field that is read added to ``read``."""
    cls = type(options)

    def look(self: Any, name: str) -> Any:
        if name in names:
            read.add(name)
        return object.__getattribute__(self, name)

    names = {item.name for item in fields(options)}
    watched = type(cls.__name__, (cls,), {"__getattribute__": look})
    return watched(**{name: getattr(options, name) for name in names})


@pytest.mark.parametrize("variant", [name for name in policy_losses.names if name in POLICY_LOSSES])
def test_policy_losses_read_their_options(variant: str) -> None:
    read: set[str] = set()
    own: Any = POLICY_LOSSES[variant].options
    given = {item.name for item in fields(own)} & {"clip_low", "clip_high", "dual_clip"}
    for values in ({}, {name: {"dual_clip": True}.get(name, 0.1) for name in given}):
        policy_losses.resolve(variant)(loss_inputs(), recorded(own(**values), read), MetricBuilder())
    assert read == {item.name for item in fields(own)}


@pytest.mark.parametrize("estimator", ADVANTAGE_NAMES)
def test_estimators_read_their_options(estimator: str) -> None:
    read: set[str] = set()
    rewards = torch.zeros(4, 3)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 0.5, 0.0])
    inputs = AdvantageInputs(
        rewards,
        torch.ones(4, 3, dtype=torch.bool),
        torch.tensor([0, 0, 1, 1]),
        values=torch.zeros(4, 3),
        baseline_rewards=torch.zeros(4),
        scores=rewards.sum(-1),
        reward_components=torch.rand(4, 2),
        old_log_probs=torch.full((4, 3), -1.0),
        old_sum_of_squares=torch.full((4, 3), 0.5),
        step_returns=torch.zeros(4, 3),
        state_ids=torch.zeros(4, 3, dtype=torch.long),
    )
    own: Any = ADV_ESTIMATORS[estimator].options
    advantage_estimators.resolve(estimator)(
        inputs, recorded(own(**{GdpoOptions: {"weights": {"a": 1.0, "b": 2.0}}}.get(own, {})), read)
    )
    # The return of a step is computed before the estimator is called, for the episodes of a batch.
    assert read == {item.name for item in fields(own)} - {"step_gamma"}


def sections(cls: type) -> Iterator[type]:
    yield cls
    for hint in type_hints(cls).values():
        inner = nested_section(hint)
        if inner is not None:
            yield from sections(inner)


def test_conditions_name_keys_that_there_are() -> None:
    effective = {"critic", "reference"}
    for root in (RLVRConfig, SFTConfig, *(backend.options for backend in BACKENDS.rows)):
        top = {item.name for item in fields(root)}
        for section in sections(root):
            assert is_dataclass(section)
            near = {item.name for item in fields(section)}
            for item in fields(section):
                others = rules_of(item).read_if
                assert set(others) <= near | top | effective, (section.__name__, item.name)


def test_a_new_section_of_the_command_line_is_attributed_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"command line: foo = "):
        load(tmp_path, GOOD, "+foo.bar=1")
