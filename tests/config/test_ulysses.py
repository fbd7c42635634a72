"""Ranks that share sequences: what a plan makes of them, and sizes that do not fit."""

from __future__ import annotations

from pathlib import Path

from roll.pipelines.rlvr.plan import RLVRPlan
from tests.config.good import changed, load, mistakes

SIZE = "actor_train.model_args.ulysses_size"


def test_fewer_ranks_have_rows_of_their_own(tmp_path: Path) -> None:
    changes = {SIZE: 2, "actor_train.device_mapping": "list(range(0,8))", "rollout_batch_size": 256}
    plan = load(tmp_path, changed(changes)).plan
    assert isinstance(plan, RLVRPlan)
    assert (plan.roles["actor_train"].world_size, plan.roles["actor_train"].dp_size) == (8, 4)
    assert plan.training["actor_train"].mini_batch_size == 8 * 8 * 4


def test_the_default_strategy_has_it(tmp_path: Path) -> None:
    data = changed({SIZE: 2})
    del data["actor_train"]["strategy_args"]
    assert mistakes(tmp_path, data) == ()


def test_the_size_divides_the_ranks(tmp_path: Path) -> None:
    (problem,) = mistakes(tmp_path, changed({SIZE: 4, "actor_train.device_mapping": "list(range(0,6))"}))
    assert problem.key == SIZE and "must divide the role's 6 ranks" in problem.rule and problem.example == 3
