"""An optimizer step of a Qwen3-MoE under fsdp2 on several ranks: layers as units, experts as units of their own
(``wrap_policy.moe_experts``), and experts divided over ranks (``ep_size``).

    python -m benchmarks.expert_parallel
    python -m benchmarks.expert_parallel --model mid --ranks 2 --tokens 1024 --repeats 3

Float32, one thread a rank, random weights.  CPU seconds are the best step's, summed over ranks; they contain the
copying of collectives (gloo), not the waiting for other ranks.  ``held`` is what a rank keeps between steps, weights
and AdamW's moments; ``peak`` the most that its process needed beyond what it had before the model was built.  ``moved``
is what a rank receives in a step: gathers of weights, sums of gradients, exchanged tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring import clock, peak_bytes
from roll.config.roles import ModelArguments, StrategyArguments, TrainingArguments, WorkerConfig
from roll.protocol.metrics import Metrics
from roll.strategies.base import Output, TensorBatch, create_strategy
from roll.strategies.training.optimizer import local_tensor, state_tensors

VOCABULARY, LENGTH = 512, 64
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "intermediate": 64, "layers": 2, "experts": 8, "top_k": 2},
    "mid": {"hidden": 256, "intermediate": 256, "layers": 4, "experts": 32, "top_k": 4},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "layers as units": {},
    "experts as units": {"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}},
    "ep_size": {"ep_size": 0},
}
"""Name to ``strategy_config``; 0 stands for the number of ranks."""


@dataclass(frozen=True)
class Measured:
    """One rank."""

    cpu_seconds: float
    held_bytes: int
    peak_bytes: int
    moved_bytes: int


def write_model(folder: Path, shape: dict[str, int]) -> int:
    """A random model; the number of its weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is an attribute without a field
        vocab_size=VOCABULARY,
        hidden_size=shape["hidden"],
        intermediate_size=2 * shape["hidden"],
        moe_intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=shape["hidden"] // 4,
        num_experts=shape["experts"],
        num_experts_per_tok=shape["top_k"],
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def loss(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    return -(outputs["log_probs"] * batch["response_mask"]).mean(), {}


def measure(rank: int, args: argparse.Namespace, model: str, folder: str, options: dict[str, Any], found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=args.ranks)
    role = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(model_name_or_path=model, dtype="fp32", disable_gradient_checkpointing=True),
        training_args=TrainingArguments(per_device_train_batch_size=args.tokens // LENGTH, learning_rate=1e-5),
        strategy_args=StrategyArguments("fsdp2_train", options),
    )
    before = peak_bytes(torch.device("cpu"))
    strategy: Any = create_strategy(role)
    strategy.initialize(num_training_steps=100)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCABULARY, (args.tokens // LENGTH, LENGTH), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = {"input_ids": ids, "attention_mask": mask, "response_mask": mask & (torch.arange(LENGTH) > 0)}
    seconds = []
    for _ in range(args.repeats + 1):
        begin = clock(torch.device("cpu"))
        strategy.train_step(batch, loss, (Output.LOG_PROBS,))
        seconds.append(clock(torch.device("cpu")) - begin)
    with _counting() as moved:
        strategy.train_step(batch, loss, (Output.LOG_PROBS,))
    states = [*strategy.model.parameters(), *state_tensors(strategy.optimizer)]
    held = sum(local_tensor(tensor.detach()).nbytes for tensor in states)
    found.put((rank, Measured(min(seconds[1:]), held, peak_bytes(torch.device("cpu")) - before, moved.bytes)))
    dist.barrier()
    dist.destroy_process_group()


class _counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes that collectives bring to this rank from others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            share = 1 - 1 / dist.get_world_size()
            name = func.name().removeprefix("c10d::").rstrip("_")
            if name.startswith("recv"):
                self.bytes += _nbytes(args[0])
            elif name.startswith(("_allgather_base", "allgather", "alltoall")):
                self.bytes += int(share * _nbytes(args[0]))
            elif name.startswith(("_reduce_scatter_base", "reduce_scatter")):
                self.bytes += int(share * _nbytes(args[1]))
            elif name.startswith("allreduce"):
                self.bytes += int(2 * share * _nbytes(args[0]))
        return result


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_nbytes(one) for one in value) if isinstance(value, list | tuple) else 0


def run(args: argparse.Namespace, model: str, options: dict[str, Any]) -> list[Measured]:
    """One variant, by rank, in processes of its own."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    own = {key: args.ranks if key == "ep_size" else value for key, value in options.items()}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure, args=(rank, args, model, folder, own, found)) for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        results = dict(found.get(timeout=600) for _ in ranks)
        for process in ranks:
            process.join()
    return [results[rank] for rank in sorted(results)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), action="append")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank in a step")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    mib = 2**20
    print("| model | variant | CPU s a step | held MiB | peak MiB | moved MiB |\n|---|---|---|---|---|---|")
    for name in args.model or sorted(SHAPES, reverse=True):
        with tempfile.TemporaryDirectory() as folder:
            weights = write_model(Path(folder), SHAPES[name])
            for variant, options in VARIANTS.items():
                ranks = run(args, folder, options)
                cells = [
                    f"{name} ({weights / 1e6:.1f}M)",
                    f"{variant} {args.ranks}" if variant == "ep_size" else variant,
                    f"{sum(one.cpu_seconds for one in ranks):.2f}",
                    f"{max(one.held_bytes for one in ranks) / mib:.1f}",
                    f"{max(one.peak_bytes for one in ranks) / mib:.0f}",
                    f"{max(one.moved_bytes for one in ranks) / mib:.1f}",
                ]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
