"""An optimizer step under every training strategy and in a bare PyTorch loop: tokens per second and peak memory.

    python -m benchmarks.train_step --model 10M
    python -m benchmarks.train_step --model 100M --groups 1 --micro-batch 4 --repeats 2
    python -m benchmarks.train_step --model 136k --groups 32 --prompt 42 --response 28 --micro-batch 64
    python -m benchmarks.train_step --model qwen2.5-1.5B --dtype bf16 --packed --prompt 1024 --response 1024 \\
        --groups 4 --micro-batch 4 --ranks 1 --peak-tflops 989 --only fsdp2             # on a GPU: adds the MFU column

The bare loop does what one would write by hand: padded micro-batches with an attention mask, logits of the response
part only, log_softmax, ``clip_grad_norm_``, AdamW on weights of the compute type.  Models are random.  A step is timed
from start to end on the slowest rank, the best of several; CPU time is summed over ranks.  The peak is that of the rank
which needs most, from before the model is built (on a CPU the process's resident memory, imported modules included).

A step's cost is its seconds on all devices; on a CPU its CPU seconds, which other work on the machine changes little.
``relative to bare``: the bare loop's cost over this one's.  ``communication``: the share of the cost that is not that
of a step on one rank with the same optimizer, by fsdp2 or by Megatron: collectives, on GPUs waiting for them, and what
every rank computes again.

``MFU``: model FLOPs over ``--peak-tflops``: 6 for each weight and token, and 6 x layers x width x length for each
token's causal attention (arXiv 2204.02311, appendix B, halved for causality); recomputation does not count.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from roll.config.roles import ModelArguments, OptimizerConfig, StrategyArguments, TrainingArguments, WorkerConfig
from roll.distributed.nodes import HEAP_DEFAULTS, environment
from roll.platforms import VISIBLE_DEVICES, current_platform
from roll.protocol.metrics import Metrics
from roll.strategies.base import Output, TensorBatch, create_strategy

if TYPE_CHECKING:
    from transformers import Qwen2Config

SHAPES: dict[str, dict[str, int]] = {
    "136k": {"vocab": 448, "hidden": 64, "intermediate": 192, "layers": 2, "heads": 4, "kv_heads": 4},
    "10M": {"vocab": 1024, "hidden": 320, "intermediate": 1280, "layers": 6, "heads": 4, "kv_heads": 4},
    "30M": {"vocab": 4096, "hidden": 512, "intermediate": 2048, "layers": 7, "heads": 8, "kv_heads": 8},
    "100M": {"vocab": 16384, "hidden": 768, "intermediate": 2048, "layers": 12, "heads": 12, "kv_heads": 12},
    "qwen2.5-1.5B": {
        "vocab": 151936,
        "hidden": 1536,
        "intermediate": 8960,
        "layers": 28,
        "heads": 12,
        "kv_heads": 2,
    },
    "qwen2.5-7B": {
        "vocab": 152064,
        "hidden": 3584,
        "intermediate": 18944,
        "layers": 28,
        "heads": 28,
        "kv_heads": 4,
    },
}


@dataclass(frozen=True)
class Contender:
    name: str
    strategy: str | None
    """None: the bare loop."""
    config: dict[str, Any] = field(default_factory=dict)
    role: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """Keys of ``model_args``."""
    one_rank: bool = False
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    package: str | None = None

    @property
    def family(self) -> tuple[bool, str]:
        """What computes the same, whatever exchanges it: Megatron has kernels of its own."""
        return self.strategy == "megatron_train", self.optimizer


def _deepspeed(stage: int, name: str = "", **options: Any) -> Contender:
    config = {"zero_stage": stage}
    return Contender(f"deepspeed ZeRO-{stage}{name}", "deepspeed_train", config, package="deepspeed", **options)


def _megatron(name: str, one_rank: bool = False, optimizer: Any = "adamw", **config: Any) -> Contender:
    return Contender(
        f"megatron{name}", "megatron_train", config, one_rank=one_rank, optimizer=optimizer, package="megatron.core"
    )


CONTENDERS = [
    Contender("bare loop", None, one_rank=True),
    Contender("fsdp2", "fsdp2_train", one_rank=True),
    Contender("fsdp2, shared prompts", "fsdp2_train", role={"use_prefix_sharing": True}, one_rank=True),
    Contender("fsdp2, weights freed", "fsdp2_train", {"reshard_after_forward": True}),
    Contender("fsdp2, Liger", "fsdp2_train", model={"use_liger_kernel": True}, one_rank=True, package="liger_kernel"),
    Contender("fsdp2, compiled", "fsdp2_train", model={"compile": True}, one_rank=True),
    Contender("fsdp2", "fsdp2_train"),
    Contender("fsdp2, Muon", "fsdp2_train", optimizer="muon", one_rank=True),
    Contender("fsdp2, Muon", "fsdp2_train", optimizer="muon"),
    Contender("fsdp2, 8-bit AdamW", "fsdp2_train", optimizer="adamw_8bit", one_rank=True),
    Contender("fsdp", "fsdp_train"),
    _deepspeed(2, one_rank=True),
    *(_deepspeed(stage) for stage in range(4)),
    _deepspeed(2, ", Muon", optimizer="muon"),
    _megatron("", one_rank=True),
    _megatron(" DP", use_distributed_optimizer=True),
    _megatron(" TP2", tensor_model_parallel_size=2),
    _megatron(" PP2", pipeline_model_parallel_size=2),
    _megatron(", Muon", one_rank=True, optimizer="muon"),
    _megatron(" DP, Muon", optimizer="muon"),
]
LARGE = [
    Contender("fsdp2, LoRA", "fsdp2_train", model={"lora_rank": 16, "lora_target": "all-linear"}),
    Contender(
        "deepspeed ZeRO-3, offload",
        "deepspeed_train",
        {"zero_stage": 3, "offload": "cpu", "offload_param": True},
        package="deepspeed",
    ),
]
"""How models are trained that need more than a device has."""


@dataclass(frozen=True)
class Measured:
    seconds: float
    """Of the best step."""
    cpu_seconds: float
    """Of the best step, over all ranks."""
    peak_bytes: int

    def cost(self, ranks: int) -> float:
        return self.cpu_seconds if current_platform().device_type == "cpu" else ranks * self.seconds


def model_config(shape: dict[str, int]) -> Qwen2Config:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )


def write_model(folder: Path, shape: dict[str, int], dtype: torch.dtype = torch.float32) -> int:
    """A random Qwen2 model with tied embeddings; the number of its weights."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    with current_platform().device():
        model = Qwen2ForCausalLM(model_config(shape)).to(dtype)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_batch(args: argparse.Namespace) -> TensorBatch:
    """``groups`` x ``group_size`` rows; prompts and responses up to three tokens shorter than their longest."""
    random = torch.Generator().manual_seed(0)
    rows = args.groups * args.group_size
    prompts = args.prompt - torch.randint(0, 4, (args.groups,), generator=random).repeat_interleave(args.group_size)
    lengths = prompts + args.response - torch.randint(0, 4, (rows,), generator=random)
    columns = torch.arange(args.prompt + args.response)
    ids = torch.randint(0, SHAPES[args.model]["vocab"], (rows, len(columns)), generator=random)
    shared = ids[:: args.group_size].repeat_interleave(args.group_size, 0)
    ids = torch.where(columns < prompts[:, None], shared, ids)
    attention_mask = columns < lengths[:, None]
    response_mask = attention_mask & (columns >= prompts[:, None])
    return {
        "input_ids": ids * attention_mask,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "advantages": torch.randn(rows, 1, generator=random) * response_mask,
        "num_tokens": response_mask.sum().expand(rows),
    }


def loss_fn(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    return -(outputs["log_probs"] * batch["advantages"]).sum() / batch["num_tokens"][0], {}


def bare_step(model: Any, optimizer: torch.optim.Optimizer, batch: TensorBatch, args: argparse.Namespace) -> None:
    # A prompt that is three tokens shorter begins its response three columns earlier.
    keep = args.response + 4
    for start in range(0, len(batch["input_ids"]), args.micro_batch):
        part = {name: column[start : start + args.micro_batch] for name, column in batch.items()}
        logits = model(
            input_ids=part["input_ids"], attention_mask=part["attention_mask"].long(), logits_to_keep=keep + 1
        ).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(2, part["input_ids"][:, -keep:, None])[..., 0]
        tail = {name: column[:, -keep:] if column.ndim == 2 else column for name, column in part.items()}
        loss_fn({"log_probs": log_probs}, tail)[0].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def build_bare(folder: Path, args: argparse.Namespace) -> Callable[[], object]:
    from transformers import AutoModelForCausalLM

    from roll.models.build import DTYPES

    device = current_platform().device()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[args.dtype])
    model.to(device)
    batch = {name: column.to(device) for name, column in make_batch(args).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return partial(bare_step, model, optimizer, batch, args)


def build_strategy(contender: Contender, folder: Path, args: argparse.Namespace) -> Callable[[], object]:
    assert contender.strategy is not None
    role = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(
            str(folder), dtype=args.dtype, disable_gradient_checkpointing=not args.recompute, **contender.model
        ),
        training_args=TrainingArguments(
            learning_rate=1e-5,
            optimizer=OptimizerConfig(contender.optimizer),
            per_device_train_batch_size=args.micro_batch,
        ),
        strategy_args=StrategyArguments(contender.strategy, dict(contender.config)),
        use_sequence_packing=args.packed and not contender.strategy.startswith("megatron"),
        **contender.role,
    )
    strategy = create_strategy(role, max_grad_norm=1.0)
    assert strategy.trains
    strategy.initialize(num_training_steps=1000)
    info = strategy.rank_info
    own = {name: column.chunk(info.dp_size)[info.dp_rank] for name, column in make_batch(args).items()}
    return partial(strategy.train_step, own, loss_fn, (Output.LOG_PROBS,))


def run_rank(
    rank: int, ranks: int, contender: Contender, folder: Path, args: argparse.Namespace, to: Connection
) -> None:
    """Send wall and CPU seconds of each step, and the peak."""
    platform = current_platform()
    if platform.device_type == "cpu":
        torch.set_num_threads(1)
    else:
        os.environ.update(dict.fromkeys(VISIBLE_DEVICES, str(rank)))
    platform.set_device()
    store = folder / f"store_{contender.name}_{ranks}".replace(" ", "_")
    dist.init_process_group(platform.process_group_backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    platform.reset_peak_memory()
    step = build_bare(folder, args) if contender.strategy is None else build_strategy(contender, folder, args)
    seconds = []
    for _ in range(args.repeats + 1):
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        step()
        platform.synchronize()
        seconds.append((time.perf_counter() - begin, time.process_time() - cpu_begin))
    to.send((seconds[1:], platform.memory_stats()["peak"]))
    dist.destroy_process_group()


def measure(contender: Contender, folder: Path, args: argparse.Namespace) -> Measured:
    context = multiprocessing.get_context("spawn")
    ranks = 1 if contender.one_rank else args.ranks
    links = []
    heap = HEAP_DEFAULTS if contender.strategy and current_platform().device_type == "cpu" else {}
    with environment(heap):  # as a run's workers have it, and a loop written by hand has not
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            context.Process(target=run_rank, args=(rank, ranks, contender, folder, args, theirs), daemon=True).start()
            theirs.close()
            links.append(ours)
    results = [link.recv() for link in links]
    steps = list(zip(*(seconds for seconds, _ in results), strict=True))
    return Measured(
        seconds=min(max(wall for wall, _ in step) for step in steps),
        cpu_seconds=min(sum(cpu for _, cpu in step) for step in steps),
        peak_bytes=max(peak for _, peak in results),
    )


def model_flops(args: argparse.Namespace, weights: int) -> float:
    shape, lengths = SHAPES[args.model], make_batch(args)["attention_mask"].sum(-1).double()
    attention = 6.0 * shape["layers"] * shape["hidden"] * lengths.square().sum()
    return float(6.0 * weights * lengths.sum() + attention)


def report(args: argparse.Namespace, contenders: list[Contender], folder: Path) -> None:
    weights = write_model(folder, SHAPES[args.model])
    tokens = int(make_batch(args)["attention_mask"].sum())
    flops = model_flops(args, weights)
    print(f"{args.model}: {weights:,} weights, {tokens:,} tokens a step, {args.dtype}\n")
    heads = ["", "ranks", "s / step", "CPU-s / step", "tokens / s", "relative to bare", "peak GiB", "communication"]
    heads += ["MFU"] * bool(args.peak_tflops)
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    bare = None
    alone: dict[tuple[bool, str], float] = {}
    for contender in contenders:
        result = measure(contender, folder, args)
        ranks = 1 if contender.one_rank else args.ranks
        cost = result.cost(ranks)
        if contender.strategy is None:
            bare = cost
        elif contender.one_rank:
            alone.setdefault(contender.family, cost)  # the first of a family is the plain one
        base = alone.get(contender.family)
        cells = [
            contender.name,
            str(ranks),
            f"{result.seconds:.3f}",
            f"{result.cpu_seconds:.3f}",
            f"{tokens / result.seconds:,.0f}",
            f"{bare / cost:.2f}" if bare else "",
            f"{result.peak_bytes / 2**30:.2f}",
            f"{1 - base / cost:.0%}" if base and ranks > 1 else "",
        ]
        if args.peak_tflops:
            cells.append(f"{flops / result.seconds / (ranks * args.peak_tflops * 1e12):.1%}")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="10M")
    parser.add_argument("--only", default="", help="contenders whose name contains this (and the bare loop)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--packed", action="store_true", help="use_sequence_packing (not under Megatron)")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing (not in the bare loop)")
    parser.add_argument("--peak-tflops", type=float, help="of one device in this type; adds the MFU column")
    counts = {"ranks": 2, "groups": 4, "group-size": 8, "prompt": 64, "response": 64, "micro-batch": 16, "repeats": 4}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    chosen = [c for c in CONTENDERS if c.strategy is None or args.only in c.name]
    if args.ranks == 1:
        chosen = [c for c in chosen if c.one_rank]
    if current_platform().device_type == "cpu":  # which has none of Liger's kernels
        chosen = [c for c in chosen if c.package != "liger_kernel"]
    for package in sorted({c.package for c in chosen if c.package and not _is_installed(c.package)}):
        print(f"left out: strategies that need {package}")
        chosen = [c for c in chosen if c.package != package]
    with tempfile.TemporaryDirectory() as folder:
        report(args, chosen, Path(folder))


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.partition(".")[0]) is not None


if __name__ == "__main__":
    main()
