"""Options of the ``vllm`` strategy, and what a plan and the checks need to know of it. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.config.installation import install_command
from roll.config.reading.errors import Problems
from roll.config.reading.fields import setting
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import Backend, Package, PackagedEngineConfig

SPECULATIONS = ("ngram", "suffix")  # methods of speculative decoding whose drafts come from tokens alone
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks of adapters that an engine can make room for


def adapter_engine_args(rank: int) -> dict[str, Any]:
    """Engine arguments with which vLLM computes with one adapter of this rank or a lower one."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(r for r in VLLM_LORA_RANKS if r >= rank)}


@dataclass(frozen=True)
class VllmStrategyConfig(PackagedEngineConfig):
    """``vllm``: generation by vLLM, on GPUs or on a CPU."""

    decided: ClassVar[Mapping[str, str]] = {
        "model": "model_args.model_name_or_path",
        "tokenizer": "model_args.model_name_or_path",
        "dtype": "model_args.dtype",
        "trust_remote_code": "model_args.trust_remote_code",
        "seed": "the run's seed",
        "logprobs_mode": "always processed_logprobs",
        "worker_extension_cls": "the weight transfer",
    }
    tensor_size_key: ClassVar[str] = "tensor_parallel_size"
    passes_through = ("engine_args", ("optimization_level", "disable_custom_all_reduce"))

    max_num_batched_tokens: int | None = setting(None, ge=1)
    """Tokens computed in one step, prompts in chunks; null: vLLM's choice."""
    tensor_parallel_size: int = setting(1, ge=1)
    """Ranks over which every matrix is sharded. An engine takes so many devices, times ``pipeline_parallel_size``. Left
    out: what ``num_gpus_per_worker`` gives."""
    pipeline_parallel_size: int = setting(1, ge=1)
    """Stages into which the layers are divided."""
    kv_cache_memory_bytes: int | None = setting(None, ge=1, example=1 << 30)
    """Bytes of the KV cache. null: on a GPU what ``gpu_memory_utilization`` leaves; on a CPU room for ``max_num_seqs``
    full sequences, at most 4 GiB."""
    block_size: int | None = setting(None, ge=1)
    """Tokens of a block of the KV cache; null: vLLM's choice. On a CPU rounded up to a multiple of 32."""
    cudagraph_capture_sizes: list[int] | None = setting(None, aliases=("cuda_graph_sizes",))
    """Batch sizes for which CUDA graphs are captured; null: vLLM's choice."""
    limit_mm_per_prompt: dict[Literal["image", "video"], int] = field(default_factory=dict)
    """``{image: n, video: m}``: most images and videos of a prompt; null or left out: vLLM's choice."""

    speculative_config: dict[str, Any] | None = setting(None, example={"method": "ngram", "num_speculative_tokens": 4})
    """Speculative decoding: drafts of ``method: ngram`` (from the sequence itself) or ``suffix`` (also from earlier
    responses; needs ``arctic-inference``) are verified in one pass, which leaves the distribution of samples as it is.
    Further keys are those of vLLM's ``SpeculativeConfig``."""

    @property
    def devices_per_worker(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        super().check(name, role, world_size, trains, problems)
        path = f"{name}.strategy_args.strategy_config"
        ranks = self.devices_per_worker
        if role.num_gpus_per_worker not in (1, ranks):
            text = (
                f"has no effect: strategy_config makes engines of {ranks} devices (tensor_parallel_size "
                f"{self.tensor_parallel_size} x pipeline_parallel_size {self.pipeline_parallel_size})"
            )
            problems.note(f"{name}.num_gpus_per_worker", text)
        if role.router_replay.mode == "R3" and self.pipeline_parallel_size > 1:
            rule = "must be 1 with router_replay.mode: R3: vLLM returns the experts of tokens without stages only"
            problems.add(f"{path}.pipeline_parallel_size", self.pipeline_parallel_size, rule, 1)
        if role.router_replay.mode == "R3" and not self.enable_prefix_caching:
            rule = "must be on with router_replay.mode: R3: vLLM keeps the experts of a prompt with its blocks"
            problems.add(f"{path}.enable_prefix_caching", False, rule, True)
        if self.pipeline_parallel_size > 1 and self.in_flight_update == "keep":
            rule = (
                "needs an engine without stages: some tokens of a batch are in flight between them when weights arrive"
            )
            problems.add(f"{path}.in_flight_update", "keep", rule, "recompute")
        if self.speculative_config is None:
            return
        path, speculation = f"{path}.speculative_config", self.speculative_config
        method, number = speculation.get("method"), speculation.get("num_speculative_tokens")
        if method not in SPECULATIONS:
            # The weights of a draft model would stay what they are while the policy learns.
            problems.add(f"{path}.method", method, f"must be one of {', '.join(SPECULATIONS)}: drafts without weights")
        elif method == "ngram" and (type(number) is not int or number < 1):
            rule = "must be an integer of at least 1: the tokens of a draft"
            problems.add(f"{path}.num_speculative_tokens", number, rule, 4)
        if role.router_replay.mode == "R3":
            problems.add(path, speculation, "cannot be set with router_replay.mode: R3: leave one of them out")
        if self.pipeline_parallel_size > 1:
            problems.add(path, speculation, "needs an engine without stages: set pipeline_parallel_size: 1")
        if role.generating_args.min_p:
            rule = "must be 0 with speculative_config: vLLM's verification of drafts leaves it out"
            problems.add(f"{name}.generating_args.min_p", role.generating_args.min_p, rule, 0)


VLLM = Backend(
    "vllm",
    VllmStrategyConfig,
    generates="roll.strategies.vllm.VllmStrategy",
    scores="roll.strategies.engines.scoring.EngineScoring",
    package=Package(
        "vllm",
        f"on GPUs {install_command('vllm')}, on a CPU make install-vllm; see docs/installation.md",
        title="vLLM",
        tested=("0.32", "0.34"),
    ),
    size_keys=("tensor_parallel_size",),
    adapter_ranks=VLLM_LORA_RANKS,
    adapter_arguments=adapter_engine_args,
)
