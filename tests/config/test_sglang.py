"""Options of the sglang strategy, which is checked and planned without SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.config.roles import StrategyArguments
from roll.config.strategies.registry import typed_strategy_config
from roll.config.strategies.sglang import SglangStrategyConfig
from tests.config.good import changed, load

NAME = "actor_infer.strategy_args.strategy_name"
OPTIONS = "actor_infer.strategy_args.strategy_config"
DEVICES, PER_WORKER = "actor_infer.device_mapping", "actor_infer.num_gpus_per_worker"
PUBLISHED = {
    "mem_fraction_static": 0.7,
    "load_format": "dummy",
    "tp_size": 1,
    "dp_size": 1,
    "max_running_requests": 128,
    "context_length": 256,
    "attention_backend": "triton",
    "disable_cuda_graph": True,
    "enable_memory_saver": True,
    "grpc_mode": False,
}


def with_options(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return changed({NAME: "sglang", OPTIONS: options, **changes})


def test_options_of_published_files_are_read() -> None:
    options = typed_strategy_config(StrategyArguments("sglang", PUBLISHED))
    assert isinstance(options, SglangStrategyConfig)
    assert (options.max_num_seqs, options.max_model_len, options.gpu_memory_utilization) == (128, 256, 0.7)


def test_a_whole_configuration_loads(tmp_path: Path) -> None:
    loaded = load(tmp_path, with_options(PUBLISHED))
    assert loaded.plan.roles["actor_infer"].strategy_name == "sglang"


def test_an_engine_takes_the_devices_of_its_ranks(tmp_path: Path) -> None:
    """``tp_size`` and ``num_gpus_per_worker`` say the same; one of them is enough, as in ROLL's files."""
    for options, changes in (
        ({"tensor_parallel_size": 2}, {}),
        ({"tp_size": 2}, {PER_WORKER: 2}),
        ({}, {PER_WORKER: 2}),
    ):
        loaded = load(tmp_path, with_options(options, **{DEVICES: [0, 1, 2, 3], **changes}))
        plan = loaded.plan.roles["actor_infer"]
        assert (plan.world_size, plan.num_gpus_per_worker) == (2, 2)
        role = plan.section
        assert typed_strategy_config(role.strategy_args).devices_per_worker == 2
