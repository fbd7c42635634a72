"""Options of the ``sglang`` strategy, and what a plan and the checks need to know of it. Needs no SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from roll.config.installation import install_command
from roll.config.reading.errors import Problems
from roll.config.reading.fields import setting
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import Backend, Package, PackagedEngineConfig


@dataclass(frozen=True)
class SglangStrategyConfig(PackagedEngineConfig):
    """``sglang``: generation by SGLang, on GPUs or on a CPU."""

    decided: ClassVar[Mapping[str, str]] = {
        "model_path": "model_args.model_name_or_path",
        "tokenizer_path": "model_args.model_name_or_path",
        "dtype": "model_args.dtype",
        "trust_remote_code": "model_args.trust_remote_code",
        "random_seed": "the run's seed",
        "device": "the host",
        "disable_cuda_graph": "enforce_eager",
        "mem_fraction_static": "gpu_memory_utilization",
        "skip_tokenizer_init": "the strategy (token ids go in and out)",
        "sampling_backend": "the strategy (its own sampler)",
        "custom_weight_loader": "the weight transfer",
        "speculative_algorithm": "the strategy (SGLang would verify drafts without its sampler, on a CPU greedily)",
    }
    tensor_size_key: ClassVar[str] = "tp_size"
    passes_through = ("engine_args", ("chunked_prefill_size", "attention_backend"))

    max_num_seqs: int = setting(256, ge=1, aliases=("max_running_requests",))
    """Samples that are generated at the same time; further ones wait."""
    max_model_len: int | None = setting(None, ge=2, aliases=("context_length",))
    """Longest prompt plus response; responses end there. null: the pipeline's longest sequence."""
    max_total_tokens: int | None = setting(None, ge=1)
    """Tokens of the KV cache. null: on a GPU what ``gpu_memory_utilization`` leaves; on a CPU room for ``max_num_seqs``
    full sequences, at most 4 GiB."""
    tp_size: int = setting(1, ge=1, aliases=("tensor_parallel_size",))
    """Ranks over which every matrix is sharded; a worker takes so many devices. Left out: ``num_gpus_per_worker``."""
    enable_memory_saver: bool = True
    """Release the memory of a GPU while other roles use it. No effect on a CPU."""

    @property
    def devices_per_worker(self) -> int:
        return self.tp_size

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        super().check(name, role, world_size, trains, problems)
        path = f"{name}.strategy_args.strategy_config"
        if self.gpu_memory_utilization == 1:
            problems.add(f"{path}.gpu_memory_utilization", 1, "must be less than 1 for SGLang", 0.9)
        if role.num_gpus_per_worker not in (1, self.tp_size):
            rule = f"must be the devices of one engine, {path}.tp_size ({self.tp_size}): leave one of them out"
            problems.add(f"{name}.num_gpus_per_worker", role.num_gpus_per_worker, rule, self.tp_size)


SGLANG = Backend(
    "sglang",
    SglangStrategyConfig,
    generates="roll.strategies.sglang.SglangStrategy",
    package=Package(
        "sglang",
        f"on GPUs {install_command('sglang')}; see docs/sglang.md",
        title="SGLang",
        tested=("0.5.23", "0.5.24"),
    ),
    size_keys=("tp_size", "tensor_parallel_size"),
    updates=("full", "trained"),
)
