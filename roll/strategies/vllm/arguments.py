"""Translation to vLLM's interface and back: engine arguments, sampling parameters, prompts with images, results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from vllm import TokensPrompt
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from roll.config.roles import WorkerConfig
from roll.config.strategies.engines import VllmStrategyConfig
from roll.models.build import DTYPES, folder_config, overrides
from roll.platforms import Platform
from roll.protocol.images import EncodedVideo, EngineTime
from roll.protocol.vision import VisionInputs, check_images, vision_token_ids
from roll.strategies.engines.base import cache_numbers, typed_arguments
from roll.strategies.engines.requests import GenerationOutput, SamplingParams
from roll.strategies.engines.sampling import schema_grammar, stream_key

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

WORKER_EXTENSION = "roll.strategies.vllm.worker.WeightReceiver"

_MOST_CPU_CACHE_BYTES, _CPU_BATCHED_TOKENS = 4 << 30, 8192
_CPU_BLOCK = 32  # the CPU attention kernels want blocks of a multiple of this


def engine_arguments(
    role: WorkerConfig,
    options: VllmStrategyConfig,
    model_config: PretrainedConfig,
    max_model_len: int,
    seed: int,
    platform: Platform,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs``; what stays out is left to vLLM. ``model_config``: of the model's
    folder. ValueError for a model that it cannot compute on a CPU, or not without torchvision."""
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
        "disable_custom_all_reduce": True,  # NCCL sums over tensor-parallel ranks
        "disable_log_stats": True,
        # What the token was sampled from, temperature and filters included; vLLM's default is the bare model's.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        # One rank computes in the engine's own process; several are processes of their own.
        "distributed_executor_backend": "uni" if options.devices_per_worker == 1 else "mp",
        # The model's own sampling defaults would mix with the request's.
        "generation_config": "vllm",
        "hf_overrides": overrides(role.model_args),
    }
    if options.devices_per_worker > 1:
        arguments |= {
            "tensor_parallel_size": options.tensor_parallel_size,
            "pipeline_parallel_size": options.pipeline_parallel_size,
            # Otherwise ranks may be computing the next tokens while weights arrive: tokens of a mixture of versions.
            "async_scheduling": False,
        }
    if getattr(folder_config(role.model_args), "vision_config", None) is not None:
        check_torchvision()
        if getattr(model_config, "vision_config", None) is None:
            arguments["language_model_only"] = True  # vLLM leaves the tower out
        else:
            arguments["limit_mm_per_prompt"] = dict(options.limit_mm_per_prompt)
    if role.router_replay.mode == "R3":
        arguments["enable_return_routed_experts"] = True
    if options.speculative_config is not None:
        arguments |= {"speculative_config": dict(options.speculative_config), "disable_log_stats": False}
    wanted: dict[str, Any] = {
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "block_size": options.block_size,
    }
    if on_cpu:
        wanted |= _on_cpu(role, options, model_config, max_model_len)
    else:
        wanted |= {
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "cudagraph_capture_sizes": options.cudagraph_capture_sizes,
            "enable_sleep_mode": True,
        }
    arguments |= {key: value for key, value in wanted.items() if value is not None}
    return arguments | typed_arguments(options.engine_args, EngineArgs, role.name)


def _on_cpu(
    role: WorkerConfig, options: VllmStrategyConfig, model_config: PretrainedConfig, max_model_len: int
) -> dict[str, Any]:
    """A cache no larger than can be used; by default vLLM takes nearly all memory of the host."""
    dtype = DTYPES[role.model_args.dtype]
    if role.router_replay.mode == "R3":
        raise ValueError(
            f"{role.name}.router_replay.mode: R3: vLLM returns the experts of tokens from its second model runner "
            "alone, which needs Triton and so a GPU; take R2, or strategy_name: hf_infer"
        )
    block = -(-options.block_size // _CPU_BLOCK) * _CPU_BLOCK if options.block_size is not None else 128
    text = model_config.get_text_config()
    kv_heads, head_dim = cache_numbers(text)
    # At start; vLLM itself raises at the first token.
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in known and not hasattr(text, "kv_lora_rank"):
        raise ValueError(
            f"vLLM on a CPU has no attention for heads of size {head_dim}, only {', '.join(map(str, known))}: take "
            "another model, or strategy_name: hf_infer"
        )
    # Of one rank: the cache is sharded like the model.
    layers = -(-text.num_hidden_layers // options.pipeline_parallel_size)
    heads = -(-kv_heads // options.tensor_parallel_size)
    token_bytes = 2 * layers * heads * head_dim * dtype.itemsize
    chosen: dict[str, Any] = {}
    if hasattr(text, "kv_lora_rank"):
        token_bytes = layers * (text.kv_lora_rank + text.qk_rope_head_dim) * dtype.itemsize
        if dtype != torch.bfloat16:
            chosen["attention_backend"] = "CPU_MLA"  # the faster one, of hosts with AMX, computes in bf16 alone
    sequence_bytes = -(-max_model_len // block) * block * token_bytes
    # One block more: vLLM keeps one for itself.
    wanted = options.max_num_seqs * sequence_bytes + block * token_bytes
    cache = max(min(wanted, _MOST_CPU_CACHE_BYTES), sequence_bytes + block * token_bytes)
    if any("linear" in kind for kind in getattr(text, "layer_types", None) or ()):
        if dtype != torch.bfloat16:
            raise ValueError(
                f"{role.name}.model_args.dtype: vLLM on a CPU computes linear attention in bf16 alone; set it to bf16, "
                "or strategy_args.strategy_name: hf_infer"
            )
        # Cached prefixes of such layers need prompts in chunks, which there are none of; see below.
        chosen["enable_prefix_caching"] = False
        # Each layer's state is a page, and so is a block of the others.
        keys, values = text.linear_num_key_heads, text.linear_num_value_heads
        sizes = text.linear_key_head_dim, text.linear_value_head_dim
        convolved = (2 * keys * sizes[0] + values * sizes[1]) * text.linear_conv_kernel_dim
        state_bytes = 4 * (values * sizes[0] * sizes[1] + convolved)
        cache += 2 * (options.max_num_seqs + 1) * text.num_hidden_layers * max(state_bytes, block * token_bytes)
    return chosen | {
        "block_size": block,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes or cache,
        # After a partial prefill vLLM rewinds the request's generator by its offset, which torch's CPU generators do
        # not have: so prompts are computed whole.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(options.max_num_batched_tokens or _CPU_BATCHED_TOKENS, max_model_len),
    }


_SEED_MASK = (1 << 63) - 1


def sampling_params(
    params: SamplingParams, end_token_ids: tuple[int, ...], room: int, sample_index: int, num_begun: int
) -> vllm.SamplingParams:
    """vLLM's settings for one sample.

    Every sample is a separate request there: vLLM's own groups would seed sample i with ``seed + i``, so that
    neighbouring seeds share streams.

    Args:
        end_token_ids: end every sample, in addition to the request's own stop tokens.
        room: tokens that fit after the prompt.
        num_begun: tokens of the response that the sample comes with; vLLM counts them to its prompt.

    Raises:
        ValueError: see :func:`schema_grammar`.
    """
    own, max_tokens, seed = params.normalised(), min(params.max_new_tokens, room) - num_begun, None
    if params.seed is not None:
        seed = stream_key(params.seed, sample_index)
        # vLLM starts every request at the beginning of its stream, whose first numbers this sample has used already.
        seed = (stream_key(seed, num_begun) if num_begun else seed) & _SEED_MASK
    if params.json_schema is not None:
        schema_grammar(params.json_schema)  # one that cannot be compiled is refused before it ends vLLM's process
    return vllm.SamplingParams(
        temperature=params.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        min_p=own.min_p,
        repetition_penalty=params.repetition_penalty,
        seed=seed,
        stop=list(params.stop_strings),
        stop_token_ids=list(params.ends(end_token_ids)),
        ignore_eos=True,  # the end tokens are among the stop tokens
        max_tokens=max_tokens,
        min_tokens=min(max(params.min_new_tokens - num_begun, 0), max_tokens),
        logprobs=params.top_log_probs,  # 0: of the sampled token alone
        flat_logprobs=True,
        detokenize=bool(params.stop_strings),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=None if params.json_schema is None else StructuredOutputsParams(json=params.json_schema),
    )


def by_position(flat: Any, first: int = 0) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """By position from ``first`` on: the log-prob of the token itself, the first entry, and the further ones."""
    spans = list(zip(flat.start_indices, flat.end_indices, strict=True))[first:]
    further = [
        list(zip(flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end], strict=True)) for start, end in spans
    ]
    return [flat.logprobs[start] for start, _ in spans], further


def recorded_routes(
    rows: np.ndarray | None, num_inputs: int, num_experts: int, begun: GenerationOutput | None, num_begun_inputs: int
) -> np.ndarray | None:
    """Experts of a sample's tokens (inputs, layers, k) from vLLM's ``routed_experts``, as
    :class:`~roll.strategies.engines.requests.GenerationOutput` has them.

    A sample that was continued keeps the experts that its tokens were sampled with; where nobody has recorded those,
    they are marked as missing: what the prefill of the continuation chose were the experts of other weights.

    Args:
        num_inputs: tokens of prompt and response but the last.
        num_begun_inputs: the same when the continuation began; 0 for a sample that was not continued.

    Returns:
        None where the engine says nothing, or not of every token.
    """
    if rows is None or len(rows) != num_inputs:
        return None
    dtype = np.uint8 if num_experts <= 255 else np.int16
    routes = np.array(rows, dtype=dtype)
    if begun is not None:
        routes[:num_begun_inputs] = 255 if dtype is np.uint8 else -1
        if begun.routes is not None and len(begun.routes) == num_begun_inputs:
            routes[:num_begun_inputs] = begun.routes
    return routes


def check_torchvision() -> None:
    """ValueError where torchvision, which vLLM's vision-language models need, was not there when transformers was
    imported."""
    from transformers.utils.import_utils import is_torchvision_available

    if not is_torchvision_available():
        raise ValueError(
            "strategy_args.strategy_name: vllm: its vision-language models need torchvision, also for text alone. On a "
            "GPU it comes with vLLM; on a CPU make install-vllm-vision puts one into the folder roll-torchvision of "
            "the virtual environment, which the role finds with system_envs: {PYTHONPATH: (that folder)}. hf_infer "
            "does without"
        )


class ImagePrompts:
    """Makes prompts of one model, for an engine of ``dtype`` (torch's name)."""

    def __init__(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, dtype: str) -> None:
        self._config = config
        self._time: EngineTime | None = None  # where positions count seconds
        if config.model_type == "qwen2_5_vl":
            self._time = EngineTime(config.vision_config.tokens_per_second, dtype)
        self.never_sampled: list[str] = list(tokenizer.convert_ids_to_tokens(list(vision_token_ids(config))))
        """Texts of the tokens that stand for images: single tokens, which vLLM masks exactly."""

    def check(self, name: str, token_ids: Sequence[int], vision: VisionInputs | None) -> None:
        """ValueError for images of a model of text, as many placeholders as do not go with them, or a video that vLLM
        places differently than the trainer."""
        check_images(name, token_ids, vision, self._config)
        if vision is not None and self._time is not None:
            for video in vision.videos:
                if (difference := self._time.difference(video, vision.processing)) is not None:
                    raise ValueError(f"{name}: {video}: {difference}")

    def prompt(self, token_ids: Sequence[int], vision: VisionInputs | None) -> TokensPrompt:
        """vLLM writes the placeholders itself, from one for each image and each video: it is given images and frames in
        the size in which they have as many, and names by which it finds their features again."""
        if vision is None:
            return TokensPrompt(prompt_token_ids=list(token_ids))
        keys: dict[str, list[str]] = {"image": [], "video": []}
        for one, key in zip(vision.images, vision.image_keys, strict=True):
            keys["video" if isinstance(one, EncodedVideo) else "image"].append(key)
        data = {"image": vision.resized_images(), "video": [_frames(video) for video in vision.videos]}
        processing = vision.processing
        return TokensPrompt(
            prompt_token_ids=self._short(token_ids, vision),
            multi_modal_data={kind: given for kind, given in data.items() if given},
            multi_modal_uuids={kind: names for kind, names in keys.items() if names},
            mm_processor_kwargs={
                "images_kwargs": {
                    "size": {"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels}
                },
                "videos_kwargs": {"do_resize": False, "do_sample_frames": False},
            },
        )

    def _short(self, token_ids: Sequence[int], vision: VisionInputs) -> list[int]:
        """The prompt with one placeholder for each image and each video."""
        ids, short, at = list(token_ids), [], 0
        for one, count in zip(vision.images, vision.num_tokens, strict=True):
            token = self._config.video_token_id if isinstance(one, EncodedVideo) else self._config.image_token_id
            begin = ids.index(token, at)
            if isinstance(one, EncodedVideo) and one.timed:
                # What opens the video; then come, for each grid, its time, what opens it, placeholders, what closes it.
                opened = [place for place in range(at, begin - 1) if ids[place] == self._config.vision_start_token_id]
                short += [*ids[at : opened[-1] + 1 if opened else begin], token]
                places = [place for place in range(begin, len(ids)) if ids[place] == token]
                at = places[count - 1] + 2
            else:
                short += [*ids[at:begin], token]
                at = begin + count
        return short + ids[at:]


def _frames(video: EncodedVideo) -> tuple[np.ndarray, dict[str, Any]]:
    """uint8 (frames, height, width, 3) in the size of the patches, and the times of the frames."""
    metadata = {
        "fps": video.fps,
        "frames_indices": list(video.indices),
        "total_num_frames": video.num_frames,
        "duration": video.num_frames / video.fps,
        "video_backend": "frames",
        "do_sample_frames": False,
    }
    return np.stack([np.asarray(frame) for frame in video.resized()]), metadata
