"""Peak memory and time of loading a model under ``fsdp2_train``: each rank its own rows, or whole and then sharded.

    python benchmarks/model_loading.py                       # 400M parameters in bfloat16 files, 2 ranks
    python benchmarks/model_loading.py --ranks 4 --layers 16

Memory is a rank's peak resident size beyond what the process had before (Python, torch, transformers), the largest over
all ranks; the float32 shard that remains is a part of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.models.build import build_model
from roll.strategies.fsdp.fsdp2 import Fsdp2Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIB = 2**20


class WholeLoading(Fsdp2Strategy):
    """Every rank loads the whole model before it is sharded."""

    def _build_language_model(self, storage_dtype: torch.dtype) -> PreTrainedModel:
        self._meta = None
        return build_model(self.role.model_args, self.head.value, storage_dtype)


METHODS = {"whole, then sharded": WholeLoading, "its own rows": Fsdp2Strategy}


def write_model(folder: Path, args: argparse.Namespace) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e6:.0f}M parameters: {4 * size / MIB:.0f} MiB in float32, {args.ranks} ranks", flush=True)
    model.save_pretrained(folder)


def run_rank(rank: int, method: str, folder: Path, ranks: int) -> None:
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401, so that importing it is not measured

    torch.set_num_threads(1)
    store = folder / f"store_{METHODS[method].__name__}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    role = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(str(folder), dtype="bf16"),
        strategy_args=StrategyArguments("fsdp2_train", {}),
    )
    before, begin = _peak_bytes(), time.perf_counter()
    strategy = METHODS[method](role)
    strategy.initialize()
    measured = torch.tensor([_peak_bytes() - before, time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{method:24s} {measured[0] / MIB:8.0f} MiB {measured[1]:8.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 2, "layers": 20, "hidden": 1024, "vocabulary": 64000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        writer = context.Process(target=write_model, args=(Path(folder), args))
        writer.start()
        writer.join()
        for method in METHODS:
            ranks = [
                context.Process(target=run_rank, args=(rank, method, Path(folder), args.ranks))
                for rank in range(args.ranks)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()


if __name__ == "__main__":
    main()
