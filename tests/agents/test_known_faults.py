"""Faults of other agentic pipelines that no other file keeps out; docs/verification.md has them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from roll.agents.chat_ids import ChatTemplate
from roll.methods.episodes import EpisodeMethod
from roll.pipelines.agentic.config import AgenticConfig, AgenticPlan
from roll.pipelines.agentic.players import TaskSource
from roll.pipelines.model_calls import even_mini_batches
from roll.rollout.episodes import build_episode_batch
from tests.agents.playing import Recorded, opened
from tests.config.good import LAKE, load
from tests.conftest import ROOT
from tests.support.episodes import random_groups
from tests.support.keys import config_of


def test_fault_09_rows_are_duplicated_to_make_them_divide() -> None:
    groups = random_groups(np.random.default_rng(0), groups=2, episodes=4)
    batch = build_episode_batch(groups, "trajectory", 0)
    EpisodeMethod(config_of(AgenticConfig, adv_estimator="grpo"), ("auto", "auto"), 100).credit(batch)
    batch.non_tensor_batch["images"] = np.array([{"pixels": row} for row in range(len(batch))], dtype=object)
    assert len(batch) % 3, "a number that does not divide"
    even = even_mini_batches(batch, 2, 3)
    assert len(even) % 6 == 0
    for name in ("response_mask", "loss_mask"):
        assert int(even.batch[name].sum()) == int(batch.batch[name].sum()), name
    sampled = even.batch["response_mask"].any(-1)
    assert not sampled.all(), "rows that fill up"
    for name, column in even.batch.items():
        first = column[~sampled].flatten(1)[:, 1:] if name == "attention_mask" else column[~sampled]
        assert not (column.dtype == torch.bool or column.is_floating_point()) or not first.any(), name
    for name, objects in even.non_tensor_batch.items():
        assert all(one is None or isinstance(one, str | int | float) for one in objects[~sampled.numpy()]), name
    assert sorted(even.non_tensor_batch["sample_id"][sampled.numpy()]) == sorted(batch.non_tensor_batch["sample_id"])


def test_fault_14_every_validation_plays_other_tasks(tmp_path: Path) -> None:
    """Those of training come again in another run of the same seed, and in it by their number."""
    plan = load(tmp_path, LAKE).plan
    assert isinstance(plan, AgenticPlan) and plan.validation is not None
    first, second = (TaskSource(plan.validation, "validation", {}) for _ in range(2))
    assert [first.task(number) for number in range(8)] == second.draw(8)
    train = TaskSource(plan.train, "train/7", {})
    train.draw(3)
    assert train.draw(2) == [TaskSource(plan.train, "train/7", {}).task(number) for number in (3, 4)]
    assert TaskSource(plan.train, "train/8", {}).draw(2) != TaskSource(plan.train, "train/7", {}).draw(2)


@pytest.mark.asyncio
async def test_fault_17_an_endpoint_without_a_secret_that_serves_late_requests(template: ChatTemplate) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    async with (
        opened(Recorded(template, lambda _: "left")) as (endpoint, session),
        httpx.AsyncClient(base_url=endpoint.url) as client,
    ):

        async def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code

        key = session.key
        assert httpx.URL(endpoint.url).host == "127.0.0.1" and len(key) > 40 and await status(key) == 200
        assert [await status(other) for other in ("0", "sk-wrong", key[:-1])] == [401] * 3
        endpoint.retire(session)
        assert await status(key) == 410


def test_fault_18_optional_packages_are_imported_with_the_pipeline() -> None:
    """And engines with the configuration."""
    packages = ("sglang", "vllm", "gem", "imageio", "textarena", "mcp", "openai", "torch", "ray")
    modules = ("agents.episode", "agents.environment_agent", "pipelines.agentic.definition", "environments.base")
    imports = ", ".join(f"roll.{name}" for name in modules)
    code = f"import sys, {imports}; print([name for name in {packages} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_fault_20_members_of_a_group_get_different_maps() -> None:
    """In processes with hashes of their own."""
    code = "from roll.environments.frozen_lake import FrozenLake; print(FrozenLake().reset(5)[0])"
    maps = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PYTHONHASHSEED": salt}
        ).stdout
        for salt in ("1", "2")
    ]
    assert maps[0] == maps[1] != ""
