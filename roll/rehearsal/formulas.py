"""Sizes of a transformer from its ``config.json``, and what follows from them without running anything: states of
trainers, memory and time of generation engines. Torch-free.

``roll check`` prints :func:`quick_lines`, and refuses :func:`misfits` with ``--gpu``; ``roll rehearse`` uses the sizes
for engines, since vLLM and SGLang do not run on fake tensors, and checks the rest by running it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.config.lora import uses_lora
from roll.config.model_files import model_config
from roll.config.plan.plan import Plan, RolePlan
from roll.config.reading.errors import Problem
from roll.config.roles import EIGHT_BIT_BLOCK, WorkerConfig
from roll.config.strategies.base import ParallelDims, model_size
from roll.config.strategies.deepspeed import DeepSpeedStrategyConfig, plan_zero
from roll.config.strategies.engines import HfInferStrategyConfig, SglangStrategyConfig, VllmStrategyConfig
from roll.config.strategies.fsdp import Fsdp1StrategyConfig, Fsdp2StrategyConfig, frees_gathered
from roll.config.strategies.megatron import MegatronStrategyConfig
from roll.config.strategies.registry import backend_of, generation_strategies, trains, typed_strategy_config
from roll.platforms import current_platform
from roll.rehearsal.catalog import DEFAULT_GPU, GIB, GPUS, RUN_BYTES, WORKER_BYTES, Gpu, known_config

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


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
    layer: int  # weights of one layer, experts included
    active_layer: int  # those that one token is computed with
    embeddings: int  # weights of the input embeddings, and of the output matrix where that is another
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
    gradients: float  # while gradients of an optimizer step are summed
    optimizer: float  # moments, and master weights where they are not the parameters
    gathered: float = 0.0  # most that is put together of sharded parameters at once
    on_host: bool = False  # parameters, gradients and optimizer states are in host memory
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
    trained = weights
    if uses_lora(role.section.model_args):
        # Adapters on every linear layer of the decoder's layers.
        attention = 4 * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        per_rank = attention + 3 * (shape.hidden + shape.intermediate)
        trained = min(weights, float(shape.layers * role.section.model_args.lora_rank * per_rank))
    if isinstance(config, Fsdp1StrategyConfig | Fsdp2StrategyConfig):
        shards = config.parallel_dims(role.section, world).dp_shard
        master = BYTES[config.master_dtype] if learns else compute
        frees = config.reshard_after_forward
        if isinstance(frees, str):  # auto
            frees = frees_gathered(shape.total * compute, GPUS[DEFAULT_GPU].memory)
        # Two layers and the embeddings, and what is kept from the forward to the backward pass.
        kept = 0.0 if frees is True else shape.total / (frees or 1)
        gathered = min(weights, kept + 2 * shape.layer + shape.embeddings)
        return States(
            parameters=((weights - trained) * compute + trained * master) / shards,
            gradients=learns * trained * master / shards,
            optimizer=learns * trained * moment_bytes(role.section, master) / shards,
            gathered=gathered * compute if shards > 1 or compute < master else 0.0,
            on_host=config.offload_policy,
            optimizer_on_host=config.optimizer_cpu_offload,
        )
    if isinstance(config, DeepSpeedStrategyConfig):
        environ = {**os.environ, **role.section.system_envs}
        plan = plan_zero(config, environ, trains=learns, has_accelerator=True)
        masters = 4 if compute < 4 else 0
        return States(
            parameters=weights * compute / (world if plan.stage == 3 else 1),
            gradients=learns * trained * (4 if plan.stage else compute) / (world if plan.stage >= 2 else 1),
            optimizer=learns * trained * (8 + masters) / (world if plan.stage >= 1 else 1),
            gathered=(2 * shape.layer + shape.embeddings) * compute if plan.stage == 3 else 0.0,
            on_host=plan.offload_param != "none",
            optimizer_on_host=plan.offload_optimizer != "none",
        )
    if isinstance(config, MegatronStrategyConfig):
        return megatron_states(role, config, shape, learns)
    return States(weights * compute, 0.0, 0.0)


def megatron_states(role: RolePlan, config: MegatronStrategyConfig, shape: ModelShape, learns: bool) -> States:
    compute = BYTES[role.section.model_args.dtype]
    dims = config.parallel_dims(role.section, role.world_size)
    own = megatron_share(dims, shape)
    shard = dims.dp_replicate if config.use_distributed_optimizer else 1
    masters = 4 if compute < 4 else 0
    moments = 0.0 if config.optimizer_cpu_offload else moment_bytes(role.section)
    optimizer = learns * own * (moments + masters) / shard
    return States(parameters=own * compute, gradients=learns * own * 4, optimizer=optimizer)


def moment_bytes(section: WorkerConfig, itemsize: int = 4) -> float:
    """Bytes of a weight's two moments; in 8 bits a float32 scale of each block comes to them."""
    return 2 * (1 + 4 / EIGHT_BIT_BLOCK if section.training_args.optimizer.name == "adamw_8bit" else itemsize)


def megatron_share(dims: ParallelDims, shape: ModelShape) -> float:
    """Weights on the rank of the first pipeline stage: matrices over tensor-parallel ranks, experts over their own."""
    layers = -(-shape.layers // dims.pp)
    if shape.experts:
        experts = shape.layer - shape.active_layer * 1.0
        per_expert = experts / (shape.experts - shape.top_k)
        dense = shape.layer - shape.experts * per_expert
        layer = dense / dims.tp + shape.experts * per_expert / (dims.ep * dims.etp)
    else:
        layer = shape.layer / dims.tp
    ends = shape.embeddings if dims.pp == 1 else shape.vocabulary * shape.hidden
    return layers * layer + ends / dims.tp


def _known_shapes(plan: Plan) -> Iterator[tuple[RolePlan, ModelShape]]:
    """The roles that compute on devices of the run, where the sizes of their models are known."""
    for role in plan.roles.values():
        if role.strategy_name is None or backend_of(role.strategy_name).is_remote:
            continue
        config = model_config(role.model_path) or known_config(role.model_path or "")
        shape = model_shape(config) if config is not None else None
        if shape is not None:
            yield role, shape


def quick_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Role and sentence on its memory, by arithmetic alone, of every role whose model's sizes are known here; on a CPU
    host that has the models also on that of all processes."""
    together = float(RUN_BYTES + WORKER_BYTES * sum(role.world_size for role in plan.roles.values()))
    known = list(_known_shapes(plan))
    for role, shape in known:
        name = role.name
        weights = f"{shape.total / 1e9:.2f}B weights" if shape.total > 1e8 else f"{shape.total / 1e6:.3g}M weights"
        if role.strategy_name in generation_strategies():
            held = shape.total * BYTES[role.section.model_args.dtype] / role.num_gpus_per_worker
            per_token = shape.kv_bytes() / role.num_gpus_per_worker
            cache = f"{role.sequence_length:,} tokens of KV cache {size(role.sequence_length * per_token)} a sample"
            yield name, f"{weights}; {size(held)} a device, and for {cache}"
            # An engine on a CPU takes its whole cache when it starts, whatever device is given here.
            use = engine_use(role, shape, GPUS[DEFAULT_GPU])
            taken = use.weights + use.cache + use.workspace + fused_bytes(role, shape)
            together += role.dp_size * taken
            continue
        states = role_states(role, shape)
        if states is None:
            continue
        if name not in plan.training:
            yield name, f"{weights}; about {size(states.total)} a device"
            together += role.world_size * states.total
            continue
        training = plan.training[name]
        tokens = training.rule.max_tokens if training.rule is not None else None
        if tokens is None:
            tokens = training.micro_batch_size * role.sequence_length
        # Roughly the most that a micro-batch keeps: with recomputation a hidden state of each layer and the inside of
        # one, without it the inside of all. A gated MLP keeps about four tensors of its width, attention about six of
        # the model's.
        compute = BYTES[role.section.model_args.dtype]
        inside = tokens * compute * (8 * shape.hidden + 4 * shape.intermediate + 2 * shape.heads * shape.head_dim)
        activations = float(shape.layers * inside)
        if not role.section.model_args.disable_gradient_checkpointing:
            activations = float(shape.layers * tokens * shape.hidden * compute + 1.5 * inside)
        parts = [f"states {size(states.total - states.gathered)}"]
        parts += [f"gathered weights {size(states.gathered)}"] if states.gathered else []
        parts.append(f"activations {size(activations)}")
        yield name, f"{weights}; about {size(states.total + activations)} a device: {', '.join(parts)}"
        # malloc keeps about as much of what was freed as the activations take.
        together += role.world_size * (states.total + 2 * activations)
    # A file for GPUs that is only checked here names models that are elsewhere.
    here = all(os.path.exists(role.model_path or "") for role, _ in known)
    if here and current_platform().device_type == "cpu":
        yield "all processes", f"about {size(together)} on a CPU host, with Ray, whole KV caches and freed memory"


def size(num_bytes: float) -> str:
    """``3.5 GiB``, below one ``340 MiB``."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


# Engines


def fused_bytes(role: RolePlan, shape: ModelShape) -> float:
    """Bytes of the matrices that ``hf_infer`` has put together, whose own blocks malloc keeps."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 2 * shape.intermediate
    return float(shape.layers * shape.hidden * width * BYTES[role.section.model_args.dtype])


VLLM_SHARE, SGLANG_SHARE = 0.9, 0.85
"""Share of a device that the engines take where nothing is written; their own choice differs a little by version."""
ENGINE_WORKSPACE = 2.0 * 2**30
"""Part of that share for activations of a prefill, sampling and captured graphs. Assumed."""


@dataclass(frozen=True)
class EngineUse:
    """A rank of an engine."""

    weights: float
    cache: float  # bytes of the KV cache
    workspace: float
    tokens: int  # that the cache of the whole engine holds
    running: int  # samples that are generated at the same time
    problem: str = ""  # why it cannot run; empty: it can


def engine_use(role: RolePlan, shape: ModelShape, gpu: Gpu) -> EngineUse:
    """An engine with its cache as large as its keys make it."""
    config = typed_strategy_config(role.section.strategy_args)
    itemsize = BYTES[role.section.model_args.dtype]
    ranks = max(1, role.num_gpus_per_worker)
    weights = shape.total * itemsize / ranks
    per_token = shape.kv_bytes(itemsize) / min(ranks, shape.kv_heads)
    most = getattr(config, "max_num_seqs", 256)
    length = getattr(config, "max_model_len", None) or role.sequence_length
    if isinstance(config, VllmStrategyConfig | SglangStrategyConfig):
        usual = VLLM_SHARE if isinstance(config, VllmStrategyConfig) else SGLANG_SHARE
        share = config.gpu_memory_utilization or usual
        cache = share * gpu.memory - weights - ENGINE_WORKSPACE
        if isinstance(config, VllmStrategyConfig) and config.kv_cache_memory_bytes:
            cache = float(config.kv_cache_memory_bytes)
        if isinstance(config, SglangStrategyConfig) and config.max_total_tokens:
            cache = config.max_total_tokens * per_token
        tokens = max(0, int(cache // per_token))
        problem = ""
        if tokens < length:
            problem = (
                f"{role.name}: gpu_memory_utilization {share:g} x {size(gpu.memory)} = {size(share * gpu.memory)}, "
                f"less weights {size(weights)} and workspace {size(ENGINE_WORKSPACE)}, leaves room for {tokens:,} "
                f"tokens of KV cache ({per_token / 1024:.0f} KiB each); one sample has {length:,}"
            )
        running = max(1, min(most, tokens // max(1, length)))
        return EngineUse(weights, max(0.0, cache), ENGINE_WORKSPACE, tokens, running, problem)
    tokens = most * length
    if isinstance(config, HfInferStrategyConfig):
        tokens += config.prefix_cache_tokens
    return EngineUse(weights, tokens * per_token, shape.vocabulary * most * 4.0 * 2, tokens, most)


def misfits(plan: Plan, gpu: Gpu) -> list[Problem]:
    """Roles that cannot fit: engines without room for a sample, and models whose states alone, without a single
    activation, are larger than the device."""
    found = []
    for role, shape in _known_shapes(plan):
        path = role.model_path
        if role.strategy_name in generation_strategies():
            problem = engine_use(role, shape, gpu).problem
            if problem:
                found.append(Problem(role.key, path, f"cannot fit on {gpu.name}: {problem}"))
            continue
        states = role_states(role, shape)
        held = 0.0 if states is None else states.total - states.gathered
        if states is not None and held > gpu.memory:
            parts = {"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer}
            if states.optimizer_on_host:
                del parts["optimizer"]
            terms = " + ".join(f"{part} {size(number)}" for part, number in parts.items() if number)
            rule = (
                f"cannot fit on {gpu.name}, which has {size(gpu.memory)}: {shape.total / 1e9:.2f}B weights over "
                f"{role.world_size} ranks are {terms} = {size(held)} a device, without activations; `roll rehearse` "
                "looks for changes with which it fits"
            )
            found.append(Problem(role.key, path, rule))
    return found
