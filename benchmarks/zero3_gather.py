"""Gathering a model that ZeRO-3 has partitioned: one collective a parameter against one a bucket.

    python benchmarks/zero3_gather.py [--layers 8] [--hidden 256] [--ranks 2] [--bucket-mb 64]

prints collectives and milliseconds of a whole gather (what a weight transfer pays), on this machine's devices, the
median of five.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.strategies.base import create_strategy

REPEATS = 5
PARTITION_ALL = {"zero_stage": 3, "zero_optimization": {"stage3_param_persistence_threshold": 0}}


def write_model(folder: Path, layers: int, hidden: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def measure(rank: int, options: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    role = WorkerConfig(
        name="reference",
        model_args=ModelArguments(model_name_or_path=str(folder / "model"), dtype="fp32"),
        strategy_args=StrategyArguments("deepspeed_infer", PARTITION_ALL),
    )
    strategy: Any = create_strategy(role)
    strategy.initialize()
    rows = [
        ("a parameter, DeepSpeed's own", gather_all(lambda: one_by_one(strategy.model))),
        ("a parameter", gather_all(lambda: strategy.named_full_weights(1))),
        ("a bucket", gather_all(lambda: strategy.named_full_weights(options.bucket_mb * 2**20))),
    ]
    if rank == 0:
        size = sum(parameter.ds_numel for parameter in strategy.model.parameters())
        print(f"{size / 1e6:.1f}M parameters in float32, {options.ranks} ranks, buckets of {options.bucket_mb} MB")
        print(f"{'one collective for':<30}{'collectives':>12}{'ms':>10}")
        for name, (collectives, seconds) in rows:
            print(f"{name:<30}{collectives:>12}{1000 * seconds:>10.1f}")
        (_, (many, slow)), _, (_, (few, fast)) = rows
        print(f"ratio: {many / few:.1f} times fewer collectives, {slow / fast:.2f} times faster")
    dist.barrier()
    dist.destroy_process_group()


def one_by_one(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """``GatheredParameters`` around each parameter: the whole tensor on every rank, then a copy of it."""
    import deepspeed

    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.detach().clone()


def gather_all(weights: Callable[[], Iterable[object]]) -> tuple[int, float]:
    """Collectives and median seconds of a whole gather."""
    seconds, count = [], 0
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        count = sum(1 for _ in weights())
        seconds.append(time.perf_counter() - start)
    return count, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket-mb", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", options.layers, options.hidden)
        mp.start_processes(measure, (options, Path(folder)), nprocs=options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
