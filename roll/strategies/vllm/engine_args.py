"""From a role's section to vLLM's engine arguments."""

from __future__ import annotations

from typing import Any

import torch

from roll.config.roles import WorkerConfig
from roll.config.strategies.vllm import VllmStrategyConfig
from roll.models.build import DTYPES
from roll.platforms import Platform

WORKER_EXTENSION = "roll.strategies.vllm.worker_extension.WeightReceiver"

_MOST_CPU_CACHE_BYTES = 4 << 30
_CPU_BATCHED_TOKENS = 8192
_CPU_BLOCK = 32  # the CPU attention kernels want blocks of a multiple of this


def engine_arguments(
    role: WorkerConfig,
    options: VllmStrategyConfig,
    model_config: Any,
    max_model_len: int,
    seed: int,
    platform: Platform,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs``; what stays out is left to vLLM.

    Args:
        model_config: the model's Hugging Face config.

    Raises:
        ValueError: a model that vLLM cannot compute on a CPU.
    """
    on_cpu = platform.device_type == "cpu"
    arguments: dict[str, Any] = {
        "model": role.model_args.model_name_or_path,
        "trust_remote_code": role.model_args.trust_remote_code,
        "dtype": str(DTYPES[role.model_args.dtype]).removeprefix("torch."),
        "seed": seed,
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "load_format": options.load_format,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "disable_custom_all_reduce": options.disable_custom_all_reduce,
        "disable_log_stats": True,
        # What the token was sampled from, temperature and filters included; vLLM's default is the bare model's.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        **_ranks(options),
        # The model's own sampling defaults would mix with the request's.
        "generation_config": "vllm",
        "hf_overrides": dict(role.model_args.model_config_kwargs),
    }
    wanted: dict[str, Any] = {
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "optimization_level": options.optimization_level,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "block_size": options.block_size,
    }
    if on_cpu:
        wanted |= _on_cpu(options, model_config, max_model_len, DTYPES[role.model_args.dtype])
    else:
        wanted |= {
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "cudagraph_capture_sizes": options.cudagraph_capture_sizes,
            "enable_sleep_mode": True,
        }
    arguments |= {key: value for key, value in wanted.items() if value is not None}
    return arguments | options.engine_args


def _ranks(options: VllmStrategyConfig) -> dict[str, Any]:
    """One rank computes in the engine's own process; several are processes of their own."""
    if options.devices_per_worker == 1:
        return {"distributed_executor_backend": "uni"}
    return {
        "distributed_executor_backend": "mp",
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        # Else the ranks would be at work on the next tokens when weights arrive, and these were of the old ones.
        "async_scheduling": False,
    }


def _on_cpu(options: VllmStrategyConfig, model_config: Any, max_model_len: int, dtype: torch.dtype) -> dict[str, Any]:
    """A cache that is as large as it can be used; vLLM's own choice is nearly all memory of the host."""
    block = _up_to_multiple(options.block_size, _CPU_BLOCK) if options.block_size is not None else 128
    text = model_config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    _check_head_size(head_dim, text)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    # Of one rank: the cache is cut like the model.
    layers, heads = (
        _cut(text.num_hidden_layers, options.pipeline_parallel_size),
        _cut(kv_heads, options.tensor_parallel_size),
    )
    token_bytes = 2 * layers * heads * head_dim * dtype.itemsize
    sequence_bytes = _up_to_multiple(max_model_len, block) * token_bytes
    # One block more: vLLM keeps one for itself.
    wanted = options.max_num_seqs * sequence_bytes + block * token_bytes
    cache = max(min(wanted, _MOST_CPU_CACHE_BYTES), sequence_bytes + block * token_bytes)
    return {
        "block_size": block,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes or cache,
        # vLLM takes back the random number of a prompt that is half computed, which torch's CPU generators cannot do:
        # prompts are computed whole.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(options.max_num_batched_tokens or _CPU_BATCHED_TOKENS, max_model_len),
    }


def _check_head_size(head_dim: int, text_config: Any) -> None:
    """Told at start; vLLM itself only says so at the first token."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in sizes and not hasattr(text_config, "kv_lora_rank"):
        raise ValueError(
            f"vLLM on a CPU has no attention for heads of size {head_dim}, only {', '.join(map(str, sizes))}: take "
            "another model, or strategy_name: hf_infer"
        )


def _up_to_multiple(number: int, of: int) -> int:
    return _cut(number, of) * of


def _cut(number: int, parts: int) -> int:
    """The largest part."""
    return -(-number // parts)
