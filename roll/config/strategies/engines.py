"""Options of the engines, and what a plan and the checks need to know of each. Needs none of their packages.

``hf_infer`` is embedded, ``vllm`` and ``sglang`` are packages, and ``remote`` is a model at a URL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import gcd
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from roll.config.installation import install_command
from roll.config.reading.errors import Problems
from roll.config.reading.fields import setting
from roll.config.reading.legacy_keys import dead_keys, dead_words
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import Backend, Package, ShapeProblem, StrategyConfig, largest_divisor, model_size


@dataclass(frozen=True)
class EngineConfig(StrategyConfig):
    """Options of every generation engine."""

    max_num_seqs: int = setting(256, ge=1)
    """Samples that are generated at the same time; further ones wait. ``sglang`` also takes
    ``max_running_requests``."""
    max_model_len: int | None = setting(None, ge=2)
    """Longest prompt plus response, which sizes the KV cache of ``hf_infer``; responses end there. null: the pipeline's
    longest sequence. ``sglang`` also takes ``context_length``."""
    load_format: Literal["auto", "dummy"] = "auto"
    """``dummy``: random weights, for an engine that gets its weights from a trainer before it is used."""
    in_flight_update: Literal["recompute", "keep"] = "recompute"
    """The KV cache of samples in flight when new weights arrive: computed again with them, or kept, which costs nothing
    and makes the next tokens those of a mixture of both weights."""


FUSED_MODELS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes of models that ``hf_infer`` computes by a decoder of its own, which can verify drafts."""


@dataclass(frozen=True)
class SuffixDrafts:
    """``strategy_config.speculative_config`` of ``hf_infer``: speculative decoding without a draft model."""

    method: Literal["suffix"] = "suffix"
    """Drafts are what followed a sample's last tokens in its prompt, in the other samples of its group, and in earlier
    samples of the prompt."""
    num_speculative_tokens: int = setting(4, ge=1)
    """Most tokens of a draft."""
    suffix_decoding_min_token_prob: float = setting(0.1, ge=0, le=1)
    """Probability that a drafted token needs, as its share of what followed before. Where nothing repeats nothing is
    drafted."""
    max_batch_tokens: int | None = setting(None, ge=2)
    """Most tokens of a pass with drafts; with so many running samples there are none. null: 16 on a CPU, where a larger
    pass costs what its tokens cost, 256 on an accelerator."""


@dataclass(frozen=True)
class HfInferStrategyConfig(EngineConfig):
    """``hf_infer``: the embedded generation engine on transformers models; these are the engine's options.

    A reference under ``hf_infer`` is the plain model on each device, and needs none of them.
    """

    prefix_cache_tokens: int = setting(0, ge=0, example=65536)
    """Most tokens of finished samples whose keys and values are kept for prompts that begin with them, such as the next
    turn of a conversation. Emptied at every weight update; 0: none."""
    speculative_config: SuffixDrafts | None = None
    """Speculative decoding, which changes how many passes a sample takes and not what it says."""

    def shape_problems(self, name: str, role: WorkerConfig, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
        """Drafts are verified by the decoder of some families."""
        kinds = set(model.get("architectures") or ())
        if self.speculative_config is not None and kinds and not kinds & FUSED_MODELS:
            rule = f"needs one of {', '.join(sorted(FUSED_MODELS))}; the model is a {', '.join(sorted(kinds))}"
            yield f"{name}.strategy_args.strategy_config.speculative_config", self.speculative_config, rule, None


HF_INFER = Backend(
    "hf_infer",
    HfInferStrategyConfig,
    computes="roll.strategies.hf_infer.strategy.HfForwardStrategy",
    generates="roll.strategies.hf_infer.HfInferStrategy",
    updates=("trained", "delta", "full"),
    holds_sent_dtype=True,
)


@dataclass(frozen=True)
class PackagedEngineConfig(EngineConfig):
    """Options of the engines that are packages of their own: vLLM and SGLang."""

    decided: ClassVar[Mapping[str, str]]
    """Engine arguments that the strategy fills in, and what decides about them."""
    tensor_size_key: ClassVar[str]
    """Option that gives the engine's tensor-parallel size."""

    enable_prefix_caching: bool = True
    """Keep the blocks of finished prompts for later ones that begin alike. Emptied at every weight update."""
    sleep_level: int = setting(1, ge=1, le=2)
    """While other roles use the GPU: 1 moves the weights to host memory, 2 drops them until the next weight update. The
    KV cache is dropped either way. No effect on a CPU."""
    gpu_memory_utilization: float | None = setting(None, gt=0, le=1, example=0.8, aliases=("mem_fraction_static",))
    """Share of a GPU's memory for weights and KV cache together (SGLang: below 1); null: the engine's choice. No effect
    on a CPU."""
    enforce_eager: bool | None = setting(None, aliases=("disable_cuda_graph",))
    """No graph capture, in vLLM no compilation either. null: true on a CPU, where it does not pay."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs`` or SGLang's ``ServerArgs``; names and types are checked.
    ``optimization_level``, ``disable_custom_all_reduce`` (vLLM), ``chunked_prefill_size`` and ``attention_backend``
    (SGLang) may also be keys of ``strategy_config``."""
    allow_untested_version: bool = False
    """Run with a version of the engine outside the tested ones."""

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        """Report engine arguments that have a key of their own, and those that the strategy fills in."""
        path = f"{name}.strategy_args.strategy_config"
        own = {item.name for item in fields(self)}
        for key, value in self.engine_args.items():
            if key in own:
                problems.add(f"{path}.engine_args.{key}", value, f"has a key of its own: write {path}.{key}")
            elif key in self.decided:
                rule = f"is not yours to set: {self.decided[key]} decides"
                problems.add(f"{path}.engine_args.{key}", value, rule)
            elif key in dead_keys(type(self)):
                problems.add(f"{path}.engine_args.{key}", value, dead_words(dead_keys(type(self))[key]))

    def shape_problems(self, name: str, role: WorkerConfig, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
        """Tensor-parallel ranks take whole heads; a key-value head may be held by several ranks."""
        size: int = getattr(self, self.tensor_size_key)
        heads = model_size(model, "num_attention_heads")
        groups = model_size(model, "num_key_value_heads") or heads
        if heads and heads % size:
            rule = f"must divide the model's {heads} attention heads"
        elif groups and groups % size and size % groups:
            rule = f"must divide the model's {groups} key-value heads, or be a multiple of them"
        else:
            return
        key = f"{name}.strategy_args.strategy_config.{self.tensor_size_key}"
        yield key, size, rule, largest_divisor(size, gcd(heads, groups))


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


EXAMPLE_URL = "http://127.0.0.1:8000/v1"


def url_problem(url: str) -> str | None:
    """The problem of an OpenAI-compatible service's ``base_url``; None: there is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "must be the service's address up to and with its version, as http://host:8000/v1"
    return None


@dataclass(frozen=True)
class RemoteStrategyConfig(StrategyConfig):
    """``remote``: a model served elsewhere, asked for ``prompt_logprobs`` by ``POST <base_url>/completions``: vLLM's
    server, ``roll serve``, or any other that answers as they do."""

    base_url: str = ""
    """Address of the service up to and with its version, such as ``http://host:8000/v1``."""
    model: str | None = None
    """Name that the model is served under; null: the only one that ``GET <base_url>/models`` lists."""
    api_key_env: str = ""
    """Environment variable with the token that is sent as ``Authorization: Bearer ...``."""
    concurrency: int = setting(16, ge=1)
    """Requests that one worker has in flight at a time; a request is one sequence."""
    max_retries: int = setting(8, ge=0)
    """Tries beyond the first, with growing pauses: a service may be started again meanwhile."""

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        path = f"{name}.strategy_args.strategy_config"
        wrong = "is needed: the address of the service" if not self.base_url else url_problem(self.base_url)
        if wrong is not None:
            problems.add(f"{path}.base_url", self.base_url or None, wrong, EXAMPLE_URL)
        if self.api_key_env and not os.environ.get(self.api_key_env):
            problems.add(f"{path}.api_key_env", self.api_key_env, "no such variable in the environment")
        if role.device_mapping is not None:
            problems.note(f"{name}.device_mapping", "has no effect: the model is computed elsewhere")


REMOTE = Backend("remote", RemoteStrategyConfig, scores="roll.strategies.engines.scoring.RemoteScoring", is_remote=True)
