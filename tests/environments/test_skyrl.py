"""SkyRL-Gym's own environments behind ``skyrl:ID``, where the package is installed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from roll.environments.base import EnvironmentOptionError, make_environment

pytest.importorskip("skyrl_gym")
pytest.importorskip("func_timeout")


def test_a_task_of_mathematics() -> None:
    """The ground truth comes with the row: one environment plays several tasks."""
    environment = make_environment("skyrl:gsm8k")
    for truth in ("4", "7"):
        row = {"prompt": [{"role": "user", "content": "?"}], "reward_spec": {"ground_truth": truth}}
        observation, _ = environment.reset(seed=0, task=row)
        assert observation == row["prompt"]
        _, reward, terminated, truncated, _ = environment.step("#### 7")
        assert (reward, terminated, truncated) == (float(truth == "7"), True, False)


def test_a_database_over_turns(tmp_path: Path) -> None:
    """Its section and ``extras`` of the entry, columns of the row, observations of a tool."""
    folder = tmp_path / "spider/database/shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.execute("create table items (name text)")
        database.execute("insert into items values ('lamp')")
    options = {"env_config": {"db_path": str(tmp_path)}, "extras": {"max_turns": 3}}
    environment = make_environment("skyrl:text2sql", options)
    row = {"prompt": "Which item?", "db_id": "shop", "data": "spider"}
    row["reward_spec"] = {"ground_truth": "select name from items"}  # type: ignore[assignment]
    environment.reset(seed=0, task=row)
    observation, reward, terminated, _, _ = environment.step("<think>look</think><sql>select * from items</sql>")
    assert "lamp" in observation[0]["content"] and not terminated and reward == 0.0
    answer = "<think>so</think><solution>select name from items</solution>"
    _, reward, terminated, _, _ = environment.step(answer)
    assert terminated and reward == 1.0


def test_an_environment_that_is_not_there() -> None:
    with pytest.raises(EnvironmentOptionError, match="did you mean 'text2sql'"):
        make_environment("skyrl:text2sq")
