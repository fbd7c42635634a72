"""Time and memory that loading a model takes under every training strategy, next to a plain ``from_pretrained``.

    python -m benchmarks.loading --model 100M
    python -m benchmarks.loading --model 100M --dtype bf16 --only zero

From before the model is built until training could begin, weights, float32 masters and the optimizer (still without
moments) included; on a CPU the process's resident memory, of which pages of the model's files are a part.  The first
row is what transformers does by itself on every rank: the whole model, no optimizer.  Memory is that of the rank which
needs most; seconds are the slowest rank's, best of ``--repeats``, without imports, with the files in the page cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.train_step import SHAPES, Contender, write_model
from roll.config.roles import ModelArguments, StrategyArguments, TrainingArguments, WorkerConfig
from roll.strategies.base import create_strategy

CONTENDERS = [
    Contender("from_pretrained", None),
    Contender("fsdp2", "fsdp2_train"),
    Contender("fsdp", "fsdp_train"),
    *(Contender(f"deepspeed ZeRO-{stage}", "deepspeed_train", {"zero_stage": stage}) for stage in range(4)),
    Contender("megatron DP, distributed optimizer", "megatron_train", {"use_distributed_optimizer": True}),
    Contender("megatron TP", "megatron_train", {"tensor_model_parallel_size": 0}),
    Contender("megatron PP", "megatron_train", {"pipeline_model_parallel_size": 0}),
]
"""A size of 0: all ranks. No strategy: transformers alone."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def status(key: str) -> int:
    """Bytes by a key of this process's ``/proc`` status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def plain_loading(model: str, dtype: str) -> Callable[[], Any]:
    """The way of transformers: the whole model in ``dtype``, every weight read once, since files are mapped."""
    from transformers import AutoModelForCausalLM

    def whole() -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
        for weight in loaded.parameters():
            weight.detach().sum()
        return loaded

    return whole


def strategy_loading(contender: Contender, ranks: int, model: str, dtype: str) -> Callable[[], Any]:
    """A strategy up to the point where training could begin; what it imports is there already."""
    assert contender.strategy is not None
    config = {key: ranks if value == 0 and "parallel" in key else value for key, value in contender.config.items()}
    role = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(model_name_or_path=model, dtype=dtype),
        training_args=TrainingArguments(learning_rate=1e-5, per_device_train_batch_size=1),
        strategy_args=StrategyArguments(contender.strategy, config),
    )
    strategy = create_strategy(role)
    if contender.strategy == "deepspeed_train":
        from roll.strategies.deepspeed.strategy import join_process_group

        join_process_group(strategy.platform)
    return partial(strategy.initialize, num_training_steps=1)


def load(rank: int, ranks: int, store: str, contender: Contender, model: str, dtype: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    is_plain = contender.strategy is None
    begin = plain_loading(model, dtype) if is_plain else strategy_loading(contender, ranks, model, dtype)
    dist.barrier()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    began = time.perf_counter()
    loaded = begin()
    dist.barrier()  # as long as the slowest rank takes
    results.put((status("VmHWM") - before, status("VmRSS") - before, time.perf_counter() - began))
    del loaded
    dist.barrier()
    results.close()
    results.join_thread()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="100M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--only", default="", help="strategies whose name contains this")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| strategy | ranks | type | seconds | peak (MiB) | afterwards (MiB) |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES[args.model])
        for number, contender in enumerate(one for one in CONTENDERS if args.only.lower() in one.name.lower()):
            rounds = []
            for repeat in range(args.repeats):
                results = context.Queue()
                store = f"{folder}/store{number}-{repeat}"
                shared = (args.ranks, store, contender, folder, args.dtype, results)
                processes = [context.Process(target=load, args=(rank, *shared)) for rank in range(args.ranks)]
                for process in processes:
                    process.start()
                rounds.append([results.get(timeout=300) for _ in processes])
                for process in processes:
                    process.join()
            peak, after = (max(rank[place] for ranks in rounds for rank in ranks) / 2**20 for place in (0, 1))
            seconds = min(max(rank[2] for rank in ranks) for ranks in rounds)
            cells = [contender.name, str(args.ranks), args.dtype, f"{seconds:.2f}", f"{peak:.0f}", f"{after:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
