"""Memory and time of generation engines by arithmetic: no fake tensor can stand in for vLLM or SGLang. Torch-free.

And which roles of a plan cannot fit on a device, whatever their micro-batches (``roll check --gpu``).
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.model_files import model_config
from roll.config.plan.plan import Plan, RolePlan
from roll.config.reading.errors import Problem
from roll.config.strategies.registry import HfInferStrategyConfig, generation_strategies, typed_strategy_config
from roll.config.strategies.sglang import SglangStrategyConfig
from roll.config.strategies.vllm import VllmStrategyConfig
from roll.rehearsal.formulas import BYTES, ModelShape, model_shape, role_states, size
from roll.rehearsal.hardware import Gpu
from roll.rehearsal.models import known_config

VLLM_SHARE, SGLANG_SHARE = 0.9, 0.85
"""Share of a device that the engines take where nothing is written; their own choice differs a little by version."""
ENGINE_WORKSPACE = 2.0 * 2**30
"""Of that share: activations of a prefill, sampling and captured graphs. Assumed."""


@dataclass(frozen=True)
class EngineUse:
    """A rank of an engine."""

    weights: float
    cache: float
    """Bytes of the KV cache."""
    workspace: float
    tokens: int
    """That the cache of the whole engine holds."""
    running: int
    """Samples that are generated at the same time."""
    problem: str = ""
    """Why it cannot run; empty: it can."""


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
        share, key = VLLM_SHARE, "gpu_memory_utilization"
        if isinstance(config, SglangStrategyConfig):
            share, key = config.mem_fraction_static or SGLANG_SHARE, "mem_fraction_static"
        elif config.gpu_memory_utilization is not None:
            share = config.gpu_memory_utilization
        cache = share * gpu.memory - weights - ENGINE_WORKSPACE
        if isinstance(config, VllmStrategyConfig) and config.kv_cache_memory_bytes:
            cache = float(config.kv_cache_memory_bytes)
        if isinstance(config, SglangStrategyConfig) and config.max_total_tokens:
            cache = config.max_total_tokens * per_token
        tokens = max(0, int(cache // per_token))
        problem = ""
        if tokens < length:
            problem = (
                f"{role.name}: {key} {share:g} x {size(gpu.memory)} = {size(share * gpu.memory)}, less weights "
                f"{size(weights)} and workspace {size(ENGINE_WORKSPACE)}, leaves room for {tokens:,} tokens of "
                f"KV cache ({per_token / 1024:.0f} KiB each); one sample has {length:,}"
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
    for role in plan.roles.values():
        path = role.model_path if role.strategy_name is not None else None
        config = model_config(path) or known_config(path or "")
        shape = model_shape(config) if config is not None else None
        if shape is None:
            continue
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


@dataclass(frozen=True)
class GenerationTime:
    """Lower bound of the time in which an engine makes its samples, every one of full length."""

    compute: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory)


def generation_time(
    role: RolePlan, shape: ModelShape, use: EngineUse, gpu: Gpu, samples: int, group: int, prompt: int, response: int
) -> GenerationTime:
    """Prompts are computed once a group; each decoding step reads the weights once (of experts those that its tokens
    choose, all equally often) and the keys and values of every running sample."""
    itemsize, ranks = BYTES[role.section.model_args.dtype], max(1, role.num_gpus_per_worker)
    speed = gpu.half if itemsize == 2 else gpu.single
    own = samples / max(1, role.dp_size)
    tokens = own * response + own / max(1, group) * prompt
    attention = 2.0 * shape.layers * shape.heads * shape.head_dim * (response + 2 * prompt) * own * response
    flops = 2.0 * shape.active * tokens + attention
    running = min(use.running, max(1.0, own))
    steps = response * own / running
    read = shape.total if not shape.experts else _read_weights(shape, running)
    cached = running * (prompt + response / 2) * shape.kv_bytes(itemsize)
    return GenerationTime(
        compute=flops / ranks / speed, memory=steps * (read * itemsize + cached) / ranks / gpu.bandwidth
    )


def _read_weights(shape: ModelShape, tokens: float) -> float:
    """Weights that so many tokens use together: an expert is used by none with probability (1 - k/E)^tokens."""
    per_expert = (shape.layer - shape.active_layer) / (shape.experts - shape.top_k)
    used = shape.experts * (1.0 - (1.0 - shape.top_k / shape.experts) ** tokens)
    dense = shape.layer - shape.experts * per_expert
    return float(shape.layers * (dense + used * per_expert) + shape.embeddings)
