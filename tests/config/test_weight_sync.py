"""The keys of weight sync: what is chosen by default, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.reading.errors import ConfigError
from roll.config.run import WeightSyncConfig, transport_name, update_mode
from roll.preflight import check_parts
from tests.config.good import changed, load


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


def test_cuda_ipc_is_refused_on_a_host_without_cuda(tmp_path: Path) -> None:
    devices = {"actor_infer.device_mapping": [0], "actor_train.device_mapping": [0]}
    loaded = load(tmp_path, changed({"weight_sync.transport": "cuda_ipc", **devices}))
    with pytest.raises(ConfigError, match=r"weight_sync.transport = 'cuda_ipc': needs CUDA devices, .* object_store"):
        check_parts(loaded)
