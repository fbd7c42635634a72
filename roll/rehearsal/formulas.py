"""Sizes of a transformer from its ``config.json``, and what follows from them without running anything. Torch-free.

``roll check`` prints :func:`quick_lines`; ``roll rehearse`` uses the sizes for engines, which no fake tensor can stand
in for, and checks the rest by running it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.config.lora import uses_lora
from roll.config.model_files import model_config
from roll.config.plan.plan import Plan, RolePlan
from roll.config.strategies.base import model_size
from roll.config.strategies.fsdp import ShardedStrategyConfig
from roll.config.strategies.registry import (
    DeepSpeedStrategyConfig,
    MegatronStrategyConfig,
    backend_of,
    generation_strategies,
    trains,
    typed_strategy_config,
)
from roll.rehearsal.models import known_config

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
GIB = 2**30


@dataclass(frozen=True)
class ModelShape:
    """Weights of a decoder by where they are."""

    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layer: int
    """Weights of one layer, experts included."""
    active_layer: int
    """Those that one token is computed with."""
    embeddings: int
    """Weights of the input embeddings, and of the output matrix where that is another."""
    experts: int
    top_k: int

    @property
    def total(self) -> int:
        return self.layers * self.layer + self.embeddings + self.hidden

    @property
    def active(self) -> int:
        """Weights that a token is multiplied with: without the look-up in the input embeddings."""
        return self.layers * self.active_layer + self.vocabulary * self.hidden

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The sizes of a decoder-only model of the usual build (attention and a gated MLP, or experts); None where the keys
    are missing or it is built otherwise."""
    text = config.get("text_config")
    section = text if isinstance(text, Mapping) else config
    family = str(section.get("model_type", config.get("model_type", "")))
    hidden, layers = model_size(section, "hidden_size"), model_size(section, "num_hidden_layers")
    heads, vocabulary = model_size(section, "num_attention_heads"), model_size(section, "vocab_size")
    intermediate = model_size(section, "intermediate_size")
    if not (hidden and layers and heads and vocabulary) or "kv_lora_rank" in section:
        return None
    kv_heads = model_size(section, "num_key_value_heads") or heads
    head_dim = model_size(section, "head_dim") or hidden // heads
    biases = (heads + 2 * kv_heads) * head_dim if family.startswith("qwen2") else 0
    norms = 2 * head_dim if family.startswith("qwen3") else 0
    attention = 2 * hidden * (heads + kv_heads) * head_dim + biases + norms
    experts = model_size(section, "num_experts") or model_size(section, "num_local_experts")
    top_k = model_size(section, "num_experts_per_tok")
    width = model_size(section, "moe_intermediate_size") or intermediate
    if experts > 1:
        expert, router = 3 * hidden * width, hidden * experts
        shared = 3 * hidden * model_size(section, "shared_expert_intermediate_size")
        mlp, active_mlp = experts * expert + router + shared, top_k * expert + router + shared
    else:
        mlp = active_mlp = 3 * hidden * intermediate
    tied = bool(config.get("tie_word_embeddings", section.get("tie_word_embeddings", True)))
    return ModelShape(
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=top_k * width if experts > 1 else intermediate,
        layer=attention + mlp + 2 * hidden,
        active_layer=attention + active_mlp + 2 * hidden,
        embeddings=vocabulary * hidden * (1 if tied else 2),
        experts=experts if experts > 1 else 0,
        top_k=top_k,
    )


@dataclass(frozen=True)
class States:
    """Bytes that a rank of a role holds between its passes."""

    parameters: float
    """On the device between passes: master weights where the strategy computes with casts of them."""
    gradients: float
    """While gradients of an optimizer step are summed."""
    optimizer: float
    """Moments, and master weights where they are not the parameters."""
    gathered: float = 0.0
    """Most that is put together of sharded parameters at once."""
    on_host: bool = False
    """Parameters, gradients and optimizer states are in host memory."""
    optimizer_on_host: bool = False

    @property
    def total(self) -> float:
        own = 0.0 if self.on_host else self.parameters + self.gradients
        return own + (0.0 if self.on_host or self.optimizer_on_host else self.optimizer) + self.gathered


def role_states(role: RolePlan, shape: ModelShape) -> States | None:
    """The states of one rank by the arithmetic of its strategy; None for roles without a strategy of their own here."""
    config = typed_strategy_config(role.section.strategy_args)
    learns, world = trains(str(role.strategy_name)), role.world_size
    compute, weights = BYTES[role.section.model_args.dtype], float(shape.total)
    trained = float(_lora_weights(role, shape)) if uses_lora(role.section.model_args) else weights
    if isinstance(config, ShardedStrategyConfig):
        shards = world if config.fsdp_size <= 1 or config.fsdp_size >= world else config.fsdp_size
        master = BYTES[config.master_dtype] if learns else compute
        base = compute if trained < weights else master
        return States(
            parameters=(
                (weights - (trained if trained < weights else 0)) * base + (trained < weights) * trained * master
            )
            / shards,
            gradients=learns * trained * master / shards,
            optimizer=learns * 2 * trained * master / shards,
            gathered=(2 * shape.layer + shape.embeddings) * compute if shards > 1 or compute < master else 0.0,
            on_host=config.offload_policy,
        )
    if isinstance(config, DeepSpeedStrategyConfig):
        return _zero_states(role, config, shape, weights, trained, learns)
    if isinstance(config, MegatronStrategyConfig):
        return _megatron_states(role, config, shape, learns)
    return States(weights * compute, 0.0, 0.0)


def _lora_weights(role: RolePlan, shape: ModelShape) -> int:
    """Of adapters on every linear layer of the decoder's layers."""
    rank = role.section.model_args.lora_rank
    ends = 2 * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    attention = 2 * shape.hidden + ends
    return shape.layers * rank * (attention + 3 * (shape.hidden + shape.intermediate))


def _zero_states(
    role: RolePlan,
    config: DeepSpeedStrategyConfig,
    shape: ModelShape,
    weights: float,
    trained: float,
    learns: bool,
) -> States:
    import os

    from roll.config.strategies.deepspeed import plan_zero

    environ = {**os.environ, **role.section.system_envs}
    plan = plan_zero(config, environ, trains=learns, has_accelerator=True)
    compute, ranks = BYTES[role.section.model_args.dtype], role.world_size
    masters = 4 if compute < 4 else 0
    shard = ranks if plan.stage >= 1 else 1
    return States(
        parameters=weights * compute / (ranks if plan.stage == 3 else 1),
        gradients=learns * trained * (4 if plan.stage else compute) / (ranks if plan.stage >= 2 else 1),
        optimizer=learns * trained * (8 + masters) / shard,
        gathered=(2 * shape.layer + shape.embeddings) * compute if plan.stage == 3 else 0.0,
        on_host=plan.offload_param != "none",
        optimizer_on_host=plan.offload_optimizer != "none",
    )


def _megatron_states(role: RolePlan, config: MegatronStrategyConfig, shape: ModelShape, learns: bool) -> States:
    compute = BYTES[role.section.model_args.dtype]
    own = megatron_share(config, shape)
    copies = max(1, role.world_size // (config.tensor_model_parallel_size * config.pipeline_model_parallel_size))
    shard = copies if config.use_distributed_optimizer else 1
    masters = 4 if compute < 4 else 0
    return States(
        parameters=own * compute,
        gradients=learns * own * 4,
        optimizer=learns * own * (8 + masters) / shard,
    )


def megatron_share(config: MegatronStrategyConfig, shape: ModelShape) -> float:
    """Weights on the rank of the first pipeline stage: matrices over tensor-parallel ranks, experts over their own."""
    tensor, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    layers = -(-shape.layers // stages)
    if shape.experts:
        experts = shape.layer - shape.active_layer * 1.0
        per_expert = experts / (shape.experts - shape.top_k)
        dense = shape.layer - shape.experts * per_expert
        layer = dense / tensor + shape.experts * per_expert / config.expert_ranks
    else:
        layer = shape.layer / tensor
    ends = shape.embeddings if stages == 1 else shape.vocabulary * shape.hidden
    return layers * layer + ends / tensor


def activation_bytes(role: RolePlan, shape: ModelShape, tokens: int) -> float:
    """The most that one micro-batch of a training role keeps, roughly: with recomputation a hidden state of each layer
    and the inside of one; without, the inside of all. A gated MLP keeps about four tensors as wide as it is, attention
    about six as wide as the model."""
    compute = BYTES[role.section.model_args.dtype]
    inside = tokens * compute * (8 * shape.hidden + 4 * shape.intermediate + 2 * shape.heads * shape.head_dim)
    if role.section.model_args.disable_gradient_checkpointing:
        return float(shape.layers * inside)
    return float(shape.layers * tokens * shape.hidden * compute + 1.5 * inside)


def micro_batch_tokens(plan: Plan, role: RolePlan) -> int:
    """Most tokens of one micro-batch of a role that trains."""
    training = plan.training[role.name]
    if training.rule is not None and training.rule.max_tokens is not None:
        return training.rule.max_tokens
    return training.micro_batch_size * role.sequence_length


def quick_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Role and sentence on its memory, by arithmetic alone, of every role whose model's sizes are known here."""
    for name, role in plan.roles.items():
        name_of = role.strategy_name
        path = None if name_of is None or backend_of(name_of).is_remote else role.model_path
        config = model_config(path) or known_config(path or "")
        shape = model_shape(config) if config is not None else None
        if shape is None:
            continue
        weights = f"{shape.total / 1e9:.2f}B weights" if shape.total > 1e8 else f"{shape.total / 1e6:.3g}M weights"
        if role.strategy_name in generation_strategies():
            held = shape.total * BYTES[role.section.model_args.dtype] / role.num_gpus_per_worker
            per_token = shape.kv_bytes() / role.num_gpus_per_worker
            cache = f"{role.sequence_length:,} tokens of KV cache {size(role.sequence_length * per_token)} a sample"
            yield name, f"{weights}; {size(held)} a device, and for {cache}"
            continue
        states = role_states(role, shape)
        if states is None:
            continue
        if name not in plan.training:
            yield name, f"{weights}; about {size(states.total)} a device"
            continue
        activations = activation_bytes(role, shape, micro_batch_tokens(plan, role))
        parts = [f"states {size(states.total - states.gathered)}"]
        parts += [f"gathered layers {size(states.gathered)}"] if states.gathered else []
        parts.append(f"activations {size(activations)}")
        yield name, f"{weights}; about {size(states.total + activations)} a device: {', '.join(parts)}"


def size(num_bytes: float) -> str:
    """``3.5 GiB``, below one ``340 MiB``."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
