"""Options of the vllm strategy, which is checked and planned without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.roles import StrategyArguments
from roll.config.strategies.registry import typed_strategy_config
from roll.config.strategies.vllm import VllmStrategyConfig
from tests.config.good import changed, load

NAME = "actor_infer.strategy_args.strategy_name"
OPTIONS = "actor_infer.strategy_args.strategy_config"
PUBLISHED = {
    "VLLM_USE_V1": 1,
    "gpu_memory_utilization": 0.8,
    "block_size": 16,
    "load_format": "auto",
    "max_model_len": 256,
    "max_num_batched_tokens": 8192,
    "tensor_parallel_size": 1,
    "enforce_eager": False,
    "sleep_level": 2,
    "cuda_graph_sizes": [1, 8],
    "distributed_executor_backend": "ray",
}


def with_options(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return changed({NAME: "vllm", OPTIONS: options, **changes})


def test_options_of_published_files_are_read() -> None:
    options = typed_strategy_config(StrategyArguments("vllm", PUBLISHED))
    assert isinstance(options, VllmStrategyConfig)
    assert (options.gpu_memory_utilization, options.block_size, options.sleep_level) == (0.8, 16, 2)
    assert options.cudagraph_capture_sizes == [1, 8] and options.enforce_eager is False


def test_a_whole_configuration_loads(tmp_path: Path) -> None:
    loaded = load(tmp_path, with_options(PUBLISHED))
    assert loaded.plan.roles["actor_infer"].strategy_name == "vllm"
    assert any("distributed_executor_backend: has no effect" in str(notice) for notice in loaded.warnings)


def test_an_engine_shorter_than_the_sequences_ends_responses(tmp_path: Path) -> None:
    loaded = load(tmp_path, with_options({"max_model_len": 200}))
    assert any("200 is less than prompt plus response (256): responses end there" in str(n) for n in loaded.warnings)


DEVICES, PER_WORKER = "actor_infer.device_mapping", "actor_infer.num_gpus_per_worker"


@pytest.mark.parametrize("written", [{}, {PER_WORKER: 4}])
def test_engines_of_several_ranks(tmp_path: Path, written: dict[str, Any]) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    loaded = load(tmp_path, with_options(sizes, **{DEVICES: "list(range(0,8))", **written}))
    role = loaded.plan.roles["actor_infer"]
    assert (role.world_size, role.num_gpus_per_worker, role.dp_size) == (2, 4, 2)
    assert role.section.num_gpus_per_worker == 4


@pytest.mark.parametrize(
    ("options", "per_worker", "ranks"),
    [({}, 4, (4, 1)), ({"pipeline_parallel_size": 2}, 4, (2, 2)), ({"tensor_parallel_size": 2}, 4, (2, 1))],
)
def test_num_gpus_per_worker_is_the_size_of_an_engine(
    tmp_path: Path, options: dict[str, Any], per_worker: int, ranks: tuple[int, int]
) -> None:
    """As in ROLL's files: it cuts the matrices unless ``strategy_config`` says how many ranks do, which then counts."""
    loaded = load(tmp_path, with_options(options, **{DEVICES: "list(range(0,8))", PER_WORKER: per_worker}))
    role = loaded.plan.roles["actor_infer"].section
    engine = typed_strategy_config(role.strategy_args)
    assert isinstance(engine, VllmStrategyConfig)
    assert (engine.tensor_parallel_size, engine.pipeline_parallel_size) == ranks
    size = ranks[0] * ranks[1]
    assert (role.num_gpus_per_worker, loaded.plan.roles["actor_infer"].world_size) == (size, 8 // size)
    noted = [notice.key for notice in loaded.warnings if notice.key == PER_WORKER]
    assert noted == ([PER_WORKER] if per_worker != size else [])


def test_an_engine_of_another_dtype_is_noted(tmp_path: Path) -> None:
    loaded = load(tmp_path, with_options({}, **{"actor_infer.model_args.dtype": "fp16"}))
    assert any("fp16 with bf16 in training" in str(notice) for notice in loaded.warnings)
