"""From a role's section to SGLang's server arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from roll.config.roles import WorkerConfig
from roll.config.strategies.sglang import SglangStrategyConfig
from roll.models.build import DTYPES
from roll.platforms import Platform
from roll.strategies.sglang.held_weights import LOADER, REPORTER
from roll.strategies.sglang.sampler import BACKEND

_MOST_CPU_CACHE_BYTES = 4 << 30
_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
_SPARE_TOKENS = 2
"""SGLang ends a sample so many tokens before its longest sequence."""


def engine_arguments(
    role: WorkerConfig,
    options: SglangStrategyConfig,
    model_config: Any,
    max_model_len: int,
    seed: int,
    platform: Platform,
) -> dict[str, Any]:
    """Keyword arguments of SGLang's ``ServerArgs``; what stays out is left to SGLang.

    Args:
        model_config: the model's Hugging Face config.
    """
    on_cpu = platform.device_type == "cpu"
    arguments: dict[str, Any] = {
        "model_path": role.model_args.model_name_or_path,
        "trust_remote_code": role.model_args.trust_remote_code,
        "dtype": str(DTYPES[role.model_args.dtype]).removeprefix("torch."),
        "random_seed": seed,
        "device": platform.device_type,
        "tp_size": options.tp_size,
        "context_length": max_model_len + _SPARE_TOKENS,
        "max_running_requests": options.max_num_seqs,
        "load_format": options.load_format,
        "disable_radix_cache": not options.enable_prefix_caching,
        "disable_cuda_graph": on_cpu if options.disable_cuda_graph is None else options.disable_cuda_graph,
        "skip_tokenizer_init": True,
        "sampling_backend": BACKEND,
        "grammar_backend": "none",
        "custom_weight_loader": [LOADER, REPORTER],
        # The sampler looks at the tokens of each step on the host.
        "disable_overlap_schedule": True,
        "stream_interval": 1,
        "log_level": "warning",
    }
    if role.model_args.model_config_kwargs:
        arguments["json_model_override_args"] = json.dumps(role.model_args.model_config_kwargs)
    wanted: dict[str, Any] = {
        "attention_backend": options.attention_backend or ("torch_native" if on_cpu else None),
        "max_total_tokens": options.max_total_tokens,
        "chunked_prefill_size": options.chunked_prefill_size,
        "mem_fraction_static": options.mem_fraction_static,
    }
    if on_cpu:
        wanted["max_total_tokens"] = options.max_total_tokens or _cpu_tokens(options, model_config, max_model_len)
    elif options.enable_memory_saver:
        wanted |= {"enable_memory_saver": True, "enable_weights_cpu_backup": options.sleep_level == 1}
    arguments |= {key: value for key, value in wanted.items() if value is not None}
    return arguments | options.engine_args


def _cpu_tokens(options: SglangStrategyConfig, model_config: Any, max_model_len: int) -> int:
    """A cache that is as large as it can be used; SGLang's own choice is a share of the host's memory."""
    text = model_config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token_bytes = 2 * text.num_hidden_layers * kv_heads * head_dim * 4  # float32 at most
    longest = max_model_len + _SPARE_TOKENS
    return max(min(options.max_num_seqs * longest, _MOST_CPU_CACHE_BYTES // token_bytes), longest)


@contextmanager
def bound_threads(num_ranks: int) -> Iterator[None]:
    """Give each rank that is started within cores of its own, on a CPU; SGLang would give each a NUMA node, and refuse
    more ranks than nodes. What the environment says comes first."""
    if _BINDING in os.environ:
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::num_ranks] or cores for rank in range(num_ranks)]
    os.environ[_BINDING] = "|".join(",".join(map(str, share)) for share in shares)
    try:
        yield
    finally:
        del os.environ[_BINDING]
