"""The keys of weight sync: what is chosen by default, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.errors import ConfigError
from roll.config.weight_sync import WeightSyncConfig, transport_name, update_mode
from roll.preflight import check_parts
from tests.config.good import changed, load, mistakes

VLLM = {"actor_infer.strategy_args.strategy_name": "vllm"}
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


@pytest.mark.parametrize(
    ("changes", "key", "rule", "works"),
    [
        (VLLM | {"weight_sync.mode": "delta"}, "mode", "vllm takes whole layers only", "full"),
        (VLLM | LORA | {"weight_sync.lora": "adapter"}, "lora", "vllm takes whole layers only", "merged"),
        ({"weight_sync.lora": "adapter"}, "lora", "actor_train has no adapters", "merged"),
        (LORA | {"weight_sync": {"lora": "adapter", "mode": "delta"}}, "mode", "A and B are sent whole", "trained"),
        ({"weight_sync.transport": "carrier_pigeon"}, "transport", "object_store", None),
        (
            {"weight_sync.transport": "cuda_ipc", "actor_infer.device_mapping": [0, 1]},
            "transport",
            "needs every engine on the GPU of actor_train's first rank, device 0",
            "object_store",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], key: str, rule: str, works: str | None) -> None:
    (problem,) = mistakes(tmp_path, changed(changes))
    assert problem.key == f"weight_sync.{key}"
    assert rule in problem.rule
    assert works is None or problem.example == works


def test_cuda_ipc_is_refused_on_a_host_without_cuda(tmp_path: Path) -> None:
    devices = {"actor_infer.device_mapping": [0], "actor_train.device_mapping": [0]}
    loaded = load(tmp_path, changed({"weight_sync.transport": "cuda_ipc", **devices}))
    with pytest.raises(ConfigError, match=r"weight_sync.transport = 'cuda_ipc': needs CUDA devices, .* object_store"):
        check_parts(loaded)
