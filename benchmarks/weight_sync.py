"""Weight sync: seconds and bytes per second by transport and by training strategy, and of raw copies.

    python -m benchmarks.weight_sync --model 10M
    python -m benchmarks.weight_sync --model 100M --only transports         # one sending process, one engine
    python -m benchmarks.weight_sync --model 100M --only strategies         # gathered from two ranks of each
    python -m benchmarks.weight_sync --model 10M --dtype bf16 --delta       # bytes of changed elements

An update is timed from the first message until every tensor is verified, checksums on both sides included.  ``memcpy``
is one copy between buffers that exist, ``gloo`` a broadcast of as many bytes between two processes; they run in turn
with what they are compared with, and a ratio is the median of those within a round.  The first round is left out (it
forms connections and touches memory for the first time).  CPU time is that of the whole process tree: sender, engine
and Ray.  Memory is what the sender's resident set grows by at its peak, shared memory included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.raw_transfers import raw_transfers
from benchmarks.rlvr_step import tree_cpu_seconds
from roll.config.roles import ModelArguments, StrategyArguments, TrainingArguments, WorkerConfig
from roll.config.run import TransportName
from roll.distributed import Cluster, ResourceManager, ray_runtime
from roll.platforms import current_platform
from roll.protocol.metrics import to_floats
from roll.weight_sync.encoding import DeltaEncoder, SyncOptions, Update, iter_buckets
from roll.weight_sync.sender import RayEngines, WeightSender, WeightSync, build_transport
from roll.workers import GENERATION_WORKER, TRAIN_WORKER
from roll.workers.generation import GenerationWorker
from roll.workers.model import TrainWorker

MIB = 2**20
SHAPES = {
    "10M": {"vocab_size": 1024, "hidden_size": 384, "intermediate_size": 896, "num_hidden_layers": 6},
    "100M": {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
    "1B": {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 18},
}
STRATEGIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "fsdp2, 1 rank": ("fsdp2_train", {}, 1),
    "fsdp2": ("fsdp2_train", {}, 2),
    "fsdp": ("fsdp_train", {}, 2),
    "deepspeed ZeRO-1": ("deepspeed_train", {"zero_stage": 1}, 2),
    "deepspeed ZeRO-3": ("deepspeed_train", {"zero_stage": 3}, 2),
    "megatron TP2": ("megatron_train", {"tensor_model_parallel_size": 2}, 2),
    "megatron PP2": ("megatron_train", {"pipeline_model_parallel_size": 2}, 2),
}
DEADLINE = 300.0


def write_model(folder: Path, name: str, dtype: str, with_weights: bool) -> int:
    """A random Qwen2 and a tokenizer; the number of its weights."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    heads = SHAPES[name]["hidden_size"] // 64
    config = Qwen2Config(**SHAPES[name], num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True)
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(folder)
    with torch.device("cpu" if with_weights else "meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype))
    if with_weights:
        model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def torch_dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "fp32" else torch.bfloat16


def random_weights(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """By the names of the model in ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch_dtype(dtype))
    return {name: torch.empty(p.shape, dtype=p.dtype).normal_(0, 0.02) for name, p in shapes.named_parameters()}


@dataclass
class Cost:
    """Of one repetition."""

    seconds: float
    cpu_seconds: float
    """Of this process and all below it, Ray's and the engine's included."""


def interleaved(contestants: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Cost]]:
    """Run all in turn, ``repeats`` times after one round that does not count, so that other work on the machine meets
    them alike."""
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    for _ in range(repeats + 1):
        for name, run in contestants.items():
            cpu, begin = tree_cpu_seconds(os.getpid()), time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
            costs[name].append(Cost(seconds, tree_cpu_seconds(os.getpid()) - cpu))
    return {name: of_one[1:] for name, of_one in costs.items()}


def engine_role(folder: Path, dtype: Any) -> WorkerConfig:
    options = {"max_num_seqs": 1, "max_model_len": 16, "load_format": "dummy"}
    return WorkerConfig(
        name="actor_infer",
        model_args=ModelArguments(model_name_or_path=str(folder), dtype=dtype),
        strategy_args=StrategyArguments("hf_infer", options),
        device_mapping=[0],
    )


@contextmanager
def engine(folder: Path, options: argparse.Namespace) -> Iterator[tuple[ResourceManager, Cluster]]:
    store_bytes = 3 * options.bucket_mb * MIB + 2**28
    with ray_runtime(2, object_store_bytes=store_bytes):
        resources = ResourceManager(2)
        role = engine_role(folder, options.dtype)
        cluster = Cluster("actor_infer", GENERATION_WORKER, resources, role, rpc_timeout=DEADLINE)
        cluster.call_all(GenerationWorker.initialize).result()
        yield resources, cluster
        cluster.shutdown()
        resources.close()


def print_rows(costs: Mapping[str, list[Cost]], num_bytes: int, memory: Mapping[str, int]) -> None:
    """Medians, and medians of the ratios to the raw transfers of the same round."""

    def ratio(raw: str, name: str, attribute: str) -> float:
        pairs = zip(costs[raw], costs[name], strict=True)
        return statistics.median(getattr(r, attribute) / max(1e-3, getattr(c, attribute)) for r, c in pairs)

    for name, of_one in costs.items():
        seconds = statistics.median(cost.seconds for cost in of_one)
        cpu = statistics.median(cost.cpu_seconds for cost in of_one)
        ratios = " | ".join(f"{ratio(r, name, a):.2f}" for a in ("seconds", "cpu_seconds") for r in ("memcpy", "gloo"))
        peak = f"{memory[name] / MIB:,.0f}" if name in memory else ""
        print(
            f"| {name} | {seconds:.3f} | {cpu:.3f} | {num_bytes / seconds / 1e9:.2f} | {ratios} | {peak} |", flush=True
        )


class Transfer:
    """One update after another of an engine, from this process."""

    def __init__(
        self,
        transport: TransportName,
        weights: dict[str, torch.Tensor],
        engines: Cluster,
        folder: str,
        options: argparse.Namespace,
    ) -> None:
        self._sender = WeightSender(build_transport(transport, folder, "gloo", "127.0.0.1"))
        self._bucket_bytes = SyncOptions(options.bucket_mb * MIB, DEADLINE, DEADLINE, transport).bucket_bytes
        self._weights = weights
        self._engines = RayEngines({0: engines.workers[0]})
        self.memory = 0

    def __call__(self) -> None:
        platform = current_platform()
        platform.reset_peak_memory()
        before = platform.memory_stats()["used"]
        self._sender.send(iter_buckets(self._weights.items(), self._bucket_bytes), self._engines, Update(1, DEADLINE))
        self.memory = max(self.memory, platform.memory_stats()["peak"] - before)


def by_transport(
    weights: dict[str, torch.Tensor],
    engines: Cluster,
    raw: Mapping[str, Callable[[], Any]],
    options: argparse.Namespace,
) -> None:
    with tempfile.TemporaryDirectory() as files:
        transfers = {name: Transfer(name, weights, engines, files, options) for name in options.transports}
        costs = interleaved({**raw, **transfers}, options.repeats)
        memory = {name: transfer.memory for name, transfer in transfers.items()}
        print_rows(costs, sum(tensor.nbytes for tensor in weights.values()), memory)


class StrategyUpdate:
    """One update after another from a trainer's ranks."""

    def __init__(self, sync: WeightSync) -> None:
        self._sync = sync
        self._version = 0
        self.num_bytes = 0

    def __call__(self) -> None:
        metrics = to_floats(self._sync.sync(self._version))
        self._version += 1
        self.num_bytes = int(metrics["model_update/bytes"])


def by_strategy(
    folder: Path,
    resources: ResourceManager,
    engines: Cluster,
    raw: Mapping[str, Callable[[], Any]],
    options: argparse.Namespace,
) -> None:
    for name in options.strategies:
        strategy, config, ranks = STRATEGIES[name]
        role = WorkerConfig(
            name="actor_train",
            model_args=ModelArguments(model_name_or_path=str(folder), dtype=options.dtype),
            training_args=TrainingArguments(lr_scheduler_type="constant"),
            strategy_args=StrategyArguments(strategy, config),
            device_mapping=list(range(ranks)),
        )
        trainer = Cluster("actor_train", TRAIN_WORKER, resources, role, rpc_timeout=DEADLINE)
        trainer.call_all(TrainWorker.initialize, 0 if options.no_optimizer else 1).result()
        sync_options = SyncOptions(options.bucket_mb * MIB, DEADLINE, options.transports[0])
        update = StrategyUpdate(WeightSync(trainer, engines, sync_options))
        costs = interleaved({**raw, name: update}, options.repeats)
        print_rows(costs, update.num_bytes, {})
        trainer.shutdown()


def changed_shares(folder: Path, options: argparse.Namespace) -> None:
    """Train on random rows, and encode the weights after every step as ``delta`` would send them."""
    from roll.strategies.base import Output, create_strategy

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    torch.manual_seed(0)
    ids = torch.randint(0, SHAPES[options.model]["vocab_size"], (8, 64))
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = {"input_ids": ids, "attention_mask": mask, "response_mask": mask.clone().index_fill_(1, torch.tensor(0), 0)}
    advantages = torch.randn(8, 1)
    print("| learning rate | elements changed in a step | bytes of a whole update |\n|---|---|---|")
    for learning_rate in options.learning_rates:
        role = WorkerConfig(
            name="actor_train",
            model_args=ModelArguments(model_name_or_path=str(folder), dtype=options.dtype),
            training_args=TrainingArguments(learning_rate=learning_rate, lr_scheduler_type="constant"),
            strategy_args=StrategyArguments("fsdp2_train", {}),
        )
        strategy: Any = create_strategy(role)
        strategy.initialize(num_training_steps=options.repeats + 1)
        encoder, changed, sent, total = DeltaEncoder(), 0, 0, 0
        for step in range(options.repeats + 1):
            strategy.train_step(
                batch, lambda outputs, _: (-(outputs[Output.LOG_PROBS] * advantages).mean(), {}), [Output.LOG_PROBS]
            )
            for bucket in strategy.named_full_weights(options.bucket_mb * MIB):
                for name, tensor in bucket:
                    parts = encoder.encode(name, tensor)
                    if step:
                        total += tensor.nbytes
                        sent += sum(part.nbytes for part in parts.values())
                        values = [part for key, part in parts.items() if not key.endswith("#indices")]
                        changed += sum(part.nbytes for part in values)
        print(f"| {learning_rate:g} | {changed / total:.2%} | {sent / total:.2%} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="10M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    transports = ["shared_memory", "object_store", "broadcast", "safetensors"]
    parser.add_argument("--transports", nargs="+", default=transports, help="strategies are measured with the first")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--no-optimizer", action="store_true", help="trainers that hold weights alone")
    parser.add_argument("--only", nargs="+", choices=["transports", "strategies"], default=["transports", "strategies"])
    parser.add_argument("--delta", action="store_true", help="count the elements that training changes, instead")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 1e-4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        count = write_model(folder, options.model, options.dtype, options.delta or "strategies" in options.only)
        print(f"{count / 1e6:,.0f} million weights, {options.dtype}, buckets of {options.bucket_mb} MiB")
        if options.delta:
            changed_shares(folder, options)
        else:
            compare(folder, options)


def compare(folder: Path, options: argparse.Namespace) -> None:
    weights = random_weights(folder, options.dtype)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    with raw_transfers(num_bytes, options.bucket_mb * MIB) as raw, engine(folder, options) as (resources, cluster):
        print("| | s | CPU-s | GB/s | s: of memcpy | of gloo | CPU-s: of memcpy | of gloo | peak MiB |")
        print("|---|---|---|---|---|---|---|---|---|")
        if "transports" in options.only:
            by_transport(weights, cluster, raw, options)
        del weights
        if "strategies" in options.only:
            by_strategy(folder, resources, cluster, raw, options)


if __name__ == "__main__":
    main()
