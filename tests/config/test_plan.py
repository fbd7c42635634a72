"""The plan: placement, batch arithmetic, passes, lengths, folders."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.plan.plan import TrainingPlan, divisors, explain_indivisible, working_values
from roll.config.plan.render import compact
from tests.config.good import changed, load


def test_frozen_and_picklable(tmp_path: Path) -> None:
    loaded = load(tmp_path, changed({}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.config.max_steps = 3
    again = pickle.loads(pickle.dumps(loaded))
    assert again.config == loaded.config and again.plan == loaded.plan


@given(
    prompts=st.integers(1, 300),
    group=st.integers(1, 16),
    micro=st.integers(1, 32),
    accumulation=st.integers(1, 16),
    ranks=st.integers(1, 16),
)
def test_suggested_values_work(prompts: int, group: int, micro: int, accumulation: int, ranks: int) -> None:
    plan = TrainingPlan(prompts * group, micro, accumulation, ranks)
    problem = explain_indivisible(plan, prompts, group)
    assert (problem is None) == ((prompts * group) % (micro * accumulation * ranks) == 0)
    if problem is None:
        return
    for suggestion in working_values(plan, prompts, group, "actor_train").split(", or "):
        key, value = suggestion.split(": ")
        fixed = {
            "rollout_batch_size": lambda new: TrainingPlan(new * group, micro, accumulation, ranks),
            "actor_train.training_args.gradient_accumulation_steps": lambda new: dataclasses.replace(
                plan, gradient_accumulation_steps=new
            ),
            "actor_train.training_args.per_device_train_batch_size": lambda new: dataclasses.replace(
                plan, micro_batch_size=new
            ),
        }[key](int(value))
        assert fixed.samples_per_step > 0 and fixed.samples_per_step % fixed.mini_batch_size == 0


@given(st.integers(1, 5_000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_compact() -> None:
    assert compact([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
