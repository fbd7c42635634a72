"""Memory and time that the recipes for real models need, computed from their plans: nothing here is measured.

    python -m benchmarks.recipe_costs                       # print the table
    python -m benchmarks.recipe_costs --write               # put it into examples/README.md

Memory of a device: weights, gradients and optimizer state of the trainer as its strategy holds and shards them, the
engine's weights, the reference's weights; activations, CUDA's context and the layer gathered at the moment come on
top.  Time of a step: 6 FLOPs per parameter and trained token (2 more with gradient checkpointing, which runs the
forward pass twice; 2 fewer with LoRA, where the base has no gradient), 2 per scored token and per token of a prompt,
with causal attention, at :data:`SHARE` of the device's peak; decoding reads the engine's weights and the cache of its
running samples once per token. Transfers, waiting for the longest response, loading, rewards, validation and the
optimizer are left out, so a real step takes longer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from roll.config.loader import LoadedConfig, load_config
from roll.config.roles import WorkerConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "examples/README.md"
BEGIN, END = "<!-- recipe costs -->", "<!-- end of recipe costs -->"

PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 SXM."""
BANDWIDTH = 3.35e12
"""Bytes per second of its memory."""
SHARE = 0.4
"""Share of the peak that matrix products are taken to reach."""
PROMPT_TOKENS = 200
FILLED = 0.5
"""A response's length, as a share of the longest allowed."""
GB = 1e9


@dataclass(frozen=True)
class Shape:
    """A dense decoder, as its config.json has it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    qkv_bias: bool
    """Qwen2's biases; else Qwen3's norms of queries and keys."""

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, query), (self.hidden, key), (self.hidden, key), (query, self.hidden)]
        return [*attention, *[(self.hidden, self.intermediate)] * 2, (self.intermediate, self.hidden)]

    @property
    def parameters(self) -> int:
        small = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 2 * self.head_dim
        layer = sum(a * b for a, b in self.matrices) + 2 * self.hidden + small
        return self.layers * layer + self.hidden + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def computed(self) -> int:
        """Parameters that a token is multiplied with: looking up an embedding multiplies nothing."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA on all matrices of the layers."""
        return self.layers * sum(rank * (a + b) for a, b in self.matrices)

    def forward(self, length: float) -> float:
        """FLOPs of one token of a sequence, half of which it attends to on average."""
        return 2 * self.computed + 2 * self.layers * self.heads * self.head_dim * length


SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(896, 24, 14, 2, 64, 4864, 151936, True, True),
    "Qwen/Qwen2.5-1.5B-Instruct": Shape(1536, 28, 12, 2, 128, 8960, 151936, True, True),
    "Qwen/Qwen2.5-7B-Instruct": Shape(3584, 28, 28, 4, 128, 18944, 152064, False, True),
    "Qwen/Qwen3-8B": Shape(4096, 36, 32, 8, 128, 12288, 151936, False, False),
}


@dataclass(frozen=True)
class Costs:
    """Bytes on one device, and seconds of a step."""

    trainer: float
    host: float
    """Of the trainer, in host memory for each device all the time."""
    engine: float
    cache: float
    """The room that ``gpu_memory_utilization`` of 80 GB (24 where the recipe says so) leaves for keys and values."""
    reference: float
    generating: float
    scoring: float
    training: float
    step: float


def recipes() -> list[Path]:
    """Configurations for real models."""
    return [ROOT / "examples/gsm8k/rlvr_config.yaml", *sorted((ROOT / "examples").glob("qwen*-rlvr_*/*.yaml"))]


def trainer_bytes(role: WorkerConfig, shape: Shape, ranks: int) -> tuple[float, float]:
    """On a device, and in host memory."""
    options, size = role.strategy_args.strategy_config, shape.parameters
    if role.model_args.lora_target:
        shards = options.get("fsdp_size") or ranks
        return (2 * size + 16 * shape.adapters(role.model_args.lora_rank)) / shards, 0
    if role.strategy_args.strategy_name == "fsdp2_train":
        return 16 * size / (options.get("fsdp_size") or ranks), 0  # float32: weights, gradients, two moments
    if role.strategy_args.strategy_name == "deepspeed_train":
        stage = options.get("zero_stage") or options.get("zero_optimization", {}).get("stage")
        assert stage in (2, 3), stage
        weights = 2 * size / (ranks if stage == 3 else 1)
        rest = 16 * size / ranks  # float32: gradients, master weights, two moments
        return (weights, rest) if options.get("offload") == "cpu" else (weights + rest, 0)
    assert role.strategy_args.strategy_name == "megatron_train" and options["use_distributed_optimizer"]
    cut = options.get("tensor_model_parallel_size", 1) * options.get("pipeline_model_parallel_size", 1)
    return 6 * size / cut + 12 * size / ranks, 0  # bf16 weights and float32 gradients of every replica


def reference_bytes(role: WorkerConfig, shape: Shape, ranks: int) -> float:
    options = role.strategy_args.strategy_config
    if role.strategy_args.strategy_name == "megatron_infer":
        cut = options.get("tensor_model_parallel_size", 1) * options.get("pipeline_model_parallel_size", 1)
        return 2 * shape.parameters / cut
    if role.strategy_args.strategy_name == "deepspeed_infer":
        stage = options.get("zero_stage") or options.get("zero_optimization", {}).get("stage")
        return 2 * shape.parameters / (ranks if stage == 3 else 1)
    return 2 * shape.parameters / (options.get("fsdp_size") or ranks)


def costs(loaded: LoadedConfig[Any]) -> Costs:
    config = loaded.config
    plan: Any = loaded.plan
    shape, roles = SHAPES[config.pretrain], plan.roles
    actor, engine, training = roles["actor_train"], roles["actor_infer"], plan.training["actor_train"]
    response = FILLED * plan.response_length
    length, samples = PROMPT_TOKENS + response, plan.samples_per_step
    forward, tokens = shape.forward(length), samples * length

    passes = 2 if config.actor_train.model_args.lora_target else 3
    passes += not config.actor_train.model_args.disable_gradient_checkpointing
    train = training.epochs * tokens * forward * passes / (SHARE * PEAK * len(actor.device_mapping))
    score = 0.0
    for name, wanted in (("reference", plan.needs_reference), ("actor_train", plan.needs_old_log_probs)):
        if wanted:
            devices = len(roles[name if name in roles else "actor_train"].device_mapping)
            score += tokens * forward / (SHARE * PEAK * devices)

    options = config.actor_infer.strategy_args.strategy_config
    parallel = len(engine.device_mapping) // engine.dp_size
    each = ceil(samples / engine.dp_size)
    together = min(each, options["max_num_seqs"])
    read = 2 * shape.computed + together * shape.cache_bytes * (PROMPT_TOKENS + response / 2)
    decode = max(read / BANDWIDTH, together * forward / (SHARE * PEAK)) / parallel
    prompts = plan.prompts_per_step * PROMPT_TOKENS * forward / (SHARE * PEAK * len(engine.device_mapping))
    generate = prompts + each / together * response * decode

    weights = 2 * shape.parameters / parallel
    card = 24 if "24 GB" in Path(loaded.source).read_text(encoding="utf-8").partition("\npipeline")[0] else 80
    on_device, on_host = trainer_bytes(config.actor_train, shape, len(actor.device_mapping))
    of_reference = 0.0
    if "reference" in roles:
        of_reference = reference_bytes(config.reference, shape, len(roles["reference"].device_mapping))
    step = max(generate, score + train) if plan.is_async else generate + score + train
    cache = options["gpu_memory_utilization"] * card * GB - weights
    return Costs(on_device, on_host, weights, cache, of_reference, generate, score, train, step)


def rows() -> Iterator[str]:
    yield "| recipe | trainer | reference | engine: weights + cache | generate | score | train | a step |"
    yield "|---|---|---|---|---|---|---|---|"
    for file in recipes():
        found = costs(load_config(None, file, check_files=False))
        host = f" + {found.host / GB:.1f} on the host" if found.host else ""
        seconds = (found.generating, found.scoring, found.training, found.step)
        cells = [
            f"{file.parent.name} `{file.stem}`",
            f"{found.trainer / GB:.1f}{host}",
            f"{found.reference / GB:.1f}" if found.reference else "none",
            f"{found.engine / GB:.1f} + {found.cache / GB:.0f}",
            *(f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" for value in seconds),
        ]
        yield f"| {' | '.join(cells)} |"


def table() -> str:
    return "\n".join(rows())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into examples/README.md")
    if not parser.parse_args().write:
        print(table())
        return
    head, found, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE}: no place for the table: {BEGIN}")
    PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
