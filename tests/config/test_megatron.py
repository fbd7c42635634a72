"""Megatron's options: what is checked before a start, and how a replica's ranks enter the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.plan.planning import data_parallel_size
from roll.config.roles import StrategyArguments, WorkerConfig
from roll.config.strategies.megatron import MegatronStrategyConfig
from roll.config.strategies.registry import typed_strategy_config
from tests.config.good import changed, load

STRATEGY = "actor_train.strategy_args"
SIZES = f"{STRATEGY}.strategy_config"


def test_options_are_read() -> None:
    written = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fsdp_size": 4}
    options = typed_strategy_config(StrategyArguments("megatron_train", written))
    assert options == MegatronStrategyConfig(tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("megatron_train", {}, 8),
        ("megatron_train", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 2),
        ("megatron_infer", {"context_parallel_size": 4}, 2),
        ("fsdp2_train", {"tensor_model_parallel_size": 2}, 8),
    ],
)
def test_a_replica_counts_once(name: str, config: dict[str, int], expected: int) -> None:
    role = WorkerConfig(strategy_args=StrategyArguments(name, config), device_mapping=list(range(8)))
    assert data_parallel_size(role) == expected


def test_the_plan_counts_replicas(tmp_path: Path) -> None:
    changes = {f"{STRATEGY}.strategy_name": "megatron_train", SIZES: {"tensor_model_parallel_size": 2}}
    loaded = load(tmp_path, changed({**changes, "actor_train.device_mapping": "list(range(0,4))"}))
    assert (loaded.plan.training["actor_train"].dp_size, loaded.plan.roles["actor_train"].world_size) == (2, 4)


def test_keys_of_published_files_are_accepted_and_explained(tmp_path: Path) -> None:
    published = {"moe_grouped_gemm": True, "ckpt_format": "torch_dist", "delay_grad_reduce": True, "bf16": True}
    written = {f"{STRATEGY}.strategy_name": "megatron_train", SIZES: published}
    said = {notice.key: notice.text for notice in load(tmp_path, changed(written)).warnings}
    assert {f"{SIZES}.{key}" for key in published} <= said.keys()
