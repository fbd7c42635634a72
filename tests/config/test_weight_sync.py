"""The keys of weight sync: what is chosen by default, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.policy import WeightSyncConfig, transport_name, update_mode
from roll.config.reading.errors import ConfigError
from roll.preflight import check_parts
from tests.config.good import changed, load, mistakes

VLLM = {"actor_infer.strategy_args.strategy_name": "vllm"}
SGLANG = {"actor_infer.strategy_args.strategy_name": "sglang"}
LORA = {"actor_train.model_args.lora_target": "all-linear", "actor_train.model_args.lora_rank": 8}


@pytest.mark.parametrize(
    ("infer", "device_type", "expected"),
    [([0, 1], "cpu", "shared_memory"), ([0, 1], "cuda", "shared_memory"), ([2, 3], "cuda", "broadcast")],
)
def test_transport_by_placement(infer: list[int], device_type: str, expected: str) -> None:
    assert transport_name(WeightSyncConfig(), [0, 1], infer, device_type) == expected
    assert transport_name(WeightSyncConfig("safetensors"), [0, 1], infer, device_type) == "safetensors"


def test_mode_by_engine() -> None:
    assert update_mode(WeightSyncConfig(), "hf_infer") == "trained"
    assert update_mode(WeightSyncConfig(), "vllm") == "full"
    assert update_mode(WeightSyncConfig(mode="delta"), "hf_infer") == "delta"
    assert update_mode(WeightSyncConfig(), "sglang") == "full"
    assert update_mode(WeightSyncConfig(lora="adapter"), "vllm") == "trained"
    assert update_mode(WeightSyncConfig(lora="adapter"), "sglang") == "trained"


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (6, 8), (64, 64), (65, 128)])
def test_vllm_makes_room_for_the_adapter_that_it_is_sent(tmp_path: Path, rank: int, room: int) -> None:
    lora = LORA | {"actor_train.model_args.lora_rank": rank, "weight_sync.lora": "adapter"}
    options = {"actor_infer.strategy_args.strategy_config": {"engine_args": {"fully_sharded_loras": False}}}
    section = load(tmp_path, changed(VLLM | lora | options)).plan.roles["actor_infer"].section
    engine_args = section.strategy_args.strategy_config["engine_args"]
    expected = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "fully_sharded_loras": False}
    assert engine_args == expected
    section = load(tmp_path, changed(LORA | {"weight_sync.lora": "adapter"})).plan.roles["actor_infer"].section
    assert "engine_args" not in section.strategy_args.strategy_config


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_weights_that_no_update_brings_back_are_not_dropped(tmp_path: Path, engine: dict[str, Any]) -> None:
    options = {"actor_infer.strategy_args.strategy_config": {"sleep_level": 2}}
    assert mistakes(tmp_path, changed(engine | options | LORA)) == ()
    (problem,) = mistakes(tmp_path, changed(engine | options | LORA | {"weight_sync.lora": "adapter"}))
    assert problem.key.endswith("strategy_config.sleep_level") and problem.example == 1


def test_what_sglang_takes(tmp_path: Path) -> None:
    assert load(tmp_path, changed(SGLANG | LORA | {"weight_sync.lora": "adapter"})).config.weight_sync.lora == "adapter"
    assert mistakes(tmp_path, changed(SGLANG | {"weight_sync.mode": "trained"})) == ()


def test_cuda_ipc_is_refused_on_a_host_without_cuda(tmp_path: Path) -> None:
    devices = {"actor_infer.device_mapping": [0], "actor_train.device_mapping": [0]}
    loaded = load(tmp_path, changed({"weight_sync.transport": "cuda_ipc", **devices}))
    with pytest.raises(ConfigError, match=r"weight_sync.transport = 'cuda_ipc': needs CUDA devices, .* object_store"):
        check_parts(loaded)
