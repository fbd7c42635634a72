"""Translation to SGLang's interface and back: server arguments, sampling settings, samples."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.server_args import ServerArgs

from roll.config.roles import WorkerConfig
from roll.config.strategies.engines import SglangStrategyConfig
from roll.models.build import DTYPES, overrides
from roll.platforms import Platform
from roll.strategies.engines.base import cache_numbers, typed_arguments
from roll.strategies.engines.requests import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
    StopStringMatcher,
    VersionSpan,
    continued,
)
from roll.strategies.sglang.scheduler import BACKEND, LOADER, REPORTER

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MOST_CPU_CACHE_BYTES = 4 << 30
_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
_SPARE_TOKENS = 2  # SGLang ends a sample this many tokens before its longest sequence


def engine_arguments(
    role: WorkerConfig,
    options: SglangStrategyConfig,
    model_config: PretrainedConfig,
    max_model_len: int,
    seed: int,
    platform: Platform,
) -> dict[str, Any]:
    """Keyword arguments of SGLang's ``ServerArgs``; what stays out is left to SGLang."""
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
        "disable_cuda_graph": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "skip_tokenizer_init": True,
        "sampling_backend": BACKEND,
        "grammar_backend": "none",
        "custom_weight_loader": [LOADER, REPORTER],
        # The sampler needs the tokens of each step on the host; overlapped, the next step starts before they are there.
        "disable_overlap_schedule": True,
        "stream_interval": 1,
        "log_level": "warning",
    }
    if changed := overrides(role.model_args):
        arguments["json_model_override_args"] = json.dumps(changed)
    tokens = options.max_total_tokens
    if on_cpu and not tokens:
        # A cache no larger than can be used; by default SGLang takes a share of the host's memory.
        text = model_config.get_text_config()
        kv_heads, head_dim = cache_numbers(text)
        token_bytes = 2 * text.num_hidden_layers * kv_heads * head_dim * 4  # float32 at most
        most, longest = _MOST_CPU_CACHE_BYTES // token_bytes, max_model_len + _SPARE_TOKENS
        tokens = max(min(options.max_num_seqs * longest, most), longest)
    wanted: dict[str, Any] = {
        "attention_backend": "torch_native" if on_cpu else None,
        "max_total_tokens": tokens,
        "mem_fraction_static": options.gpu_memory_utilization,
    }
    if not on_cpu and options.enable_memory_saver:
        wanted |= {"enable_memory_saver": True, "enable_weights_cpu_backup": options.sleep_level == 1}
    arguments |= {key: value for key, value in wanted.items() if value is not None}
    return arguments | typed_arguments(options.engine_args, ServerArgs, role.name)


@contextmanager
def bound_threads(num_ranks: int) -> Iterator[None]:
    """Give each rank started in the block its own cores, on a CPU; SGLang would give each a NUMA node, and refuse
    more ranks than nodes. A setting in the environment takes precedence."""
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


def sampling_settings(
    params: SamplingParams, end_token_ids: tuple[int, ...], most: int, num_prompt: int, num_begun: int, stream_key: int
) -> dict[str, Any]:
    """SGLang's ``sampling_params`` of one sample. It decides on the end; ``custom_params`` are for the sampler.

    Args:
        end_token_ids: end every sample, in addition to the request's own stop tokens.
        most: tokens of the whole response.
        num_prompt: tokens of the prompt.
        num_begun: tokens of the response that the sample comes with; SGLang counts them to its prompt.
        stream_key: of the sample's random numbers.
    """
    own, stops = params.normalised(), list(params.ends(end_token_ids))
    return {
        "max_new_tokens": most - num_begun,
        "stop_token_ids": stops,
        "custom_params": {
            "temperature": params.temperature,
            "top_k": own.top_k,
            "top_p": own.top_p,
            "min_p": own.min_p,
            "repetition_penalty": params.repetition_penalty,
            "min_new_tokens": params.min_new_tokens,
            "end_token_ids": stops,
            "num_prompt": num_prompt,
            "stream_key": f"{stream_key:x}",  # 64 bits without a sign
        },
    }


@dataclass(eq=False)
class Sample:
    """One sample in progress and its tokens so far."""

    request: GenerationRequest
    index: int
    begun: GenerationOutput | None  # tokens that it came with
    version: int  # version of the weights that the next token is drawn with
    matcher: StopStringMatcher | None
    token_ids: list[int] = field(default_factory=list)  # tokens after those that it came with
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    earlier_versions: list[VersionSpan] = field(default_factory=list)  # closed spans over `token_ids`
    finish_reason: FinishReason | None = None

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Record the tokens that SGLang has reported since the last chunk, and its finish reason with the last one;
        RuntimeError where SGLang gave the sample up."""
        meta = chunk["meta_info"]
        reported, begin = meta.get("output_token_logprobs") or (), len(self.token_ids)
        for position in range(begin, len(reported)):
            log_prob, token_id, _ = reported[position]
            self.token_ids.append(int(token_id))
            self.log_probs.append(float(log_prob))
            if self.request.params.top_log_probs:
                top = meta["output_top_logprobs"][position]
                self.top_log_probs.append([(int(token), float(value)) for value, token, _ in top])
            if self.matcher is not None and self.matcher.push(int(token_id)):
                self.finish_reason = "stop"
                return
        if (reason := meta["finish_reason"]) is None:
            return
        if reason["type"] not in ("stop", "length"):
            name = f"sample {self.index} of request {self.request.request_id!r}"
            raise RuntimeError(f"sglang: {name} was given up: {reason.get('message', reason)}")
        self.finish_reason = reason["type"]

    def new_version(self, version: int) -> None:
        """Note that the next tokens are sampled with other weights."""
        start = self.earlier_versions[-1][2] if self.earlier_versions else 0
        if len(self.token_ids) > start:
            self.earlier_versions.append((self.version, start, len(self.token_ids)))
        self.version = version

    def step_back(self) -> None:
        """Undo the end of a sample that has not been reported: its last token will be drawn again, and be the same."""
        self.finish_reason = None
        del self.token_ids[-1:], self.log_probs[-1:], self.top_log_probs[-1:]
        count = len(self.token_ids)
        spans = [(version, start, min(end, count)) for version, start, end in self.earlier_versions]
        self.earlier_versions = [span for span in spans if span[1] < count]

    def output(self) -> GenerationOutput:
        """Return the whole response, with the reason ``abort`` if it has not ended."""
        last = self.earlier_versions[-1][2] if self.earlier_versions else 0
        spans, tokens = [*self.earlier_versions, (self.version, last, len(self.token_ids))], self.token_ids
        name, reason = self.request.request_id, self.finish_reason or "abort"
        own = GenerationOutput(name, self.index, tokens, self.log_probs, reason, spans, self.top_log_probs)
        whole = continued(self.begun or GenerationOutput("", 0, [], [], "abort"), own)
        # Without a token there is no span, and a reader would not know which weights it waited for.
        whole.weight_versions = whole.weight_versions or [(self.version, 0, 0)]
        return whole
