"""SGLang's engine, one scheduler process a rank, and what is inside these: the sampler, and weight updates.

SGLang reports log-probs from before top-k, top-p and min-p, leaves the prompt out of the repetition penalty, and seeds
samples only in a mode that also exchanges its kernels. So a request brings its settings as ``custom_params``, SGLang's
own stay neutral, and the sampler below takes the place of one of its own: log-probs are those of the distribution that
the token was drawn from, and token t of a sample draws number t of the sample's stream.

SGLang fuses matrices (query, key and value; gate and up) and shards them over the tensor-parallel ranks. Every rank
gets whole tensors of an update, so each compares its own part with what it holds; the engine is right where all are.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear, get_group_rank_size
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from roll.strategies.engines.sampling import RowSettings, penalise_repetition
from roll.weight_sync.encoding import tensor_checksum

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

BACKEND = "pytorch"
"""SGLang's sampler backend that is replaced by this one: the one that exists on every platform."""


class Row:
    """One sample of a batch: its settings, and the tokens it has seen if it has a repetition penalty."""

    def __init__(self, request: Req, vocab_size: int, device: str) -> None:
        settings = request.sampling_params.custom_params or {}
        # SGLang's own requests (it warms up with some) bring no settings: they are greedy.
        self.temperature = float(settings.get("temperature", 0.0))
        self.top_k = int(settings.get("top_k", 0))
        self.top_p = float(settings.get("top_p", 1.0))
        self.min_p = float(settings.get("min_p", 0.0))
        self.penalty = float(settings.get("repetition_penalty", 1.0))
        self.min_new = int(settings.get("min_new_tokens", 0))
        self.stream_key = int(settings.get("stream_key", "0"), 16)
        self.num_prompt = int(settings.get("num_prompt", len(request.origin_input_ids)))
        self.banned = list(settings.get("end_token_ids", ()))
        self.seen: torch.Tensor | None = None
        if self.penalty != 1:
            context = torch.tensor([*request.origin_input_ids, *request.output_ids], dtype=torch.int64)
            self.seen = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, context, True).to(device)


class Settings(RowSettings):
    """The settings of a batch on the device."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = rows
        temperature, top_p, min_p, penalty = (
            np.array([getattr(row, name) for row in rows], dtype=np.float32)
            for name in ("temperature", "top_p", "min_p", "penalty")
        )
        super().__init__(temperature, np.array([row.top_k for row in rows], np.int64), top_p, min_p, penalty, device)
        self.stream_keys = np.array([row.stream_key for row in rows], dtype=np.uint64)
        self.num_prompt = np.array([row.num_prompt for row in rows], dtype=np.int64)


class DistributionSampler(Sampler):
    """Draws a token for each row and reports the distribution that it was drawn from."""

    _settings: Settings | None = None

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
        *,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens, int64 (B,). SGLang's own signature; ``positions`` (B,) are those of the last token of each row's
        context."""
        logits = logits_output.next_token_logits.float()
        rows = sampling_info.custom_params
        if self._settings is None or self._settings.rows is not rows:
            self._settings = Settings(rows, logits.device)
        generated = positions[: len(rows)].cpu().numpy() + 1 - self._settings.num_prompt
        tokens, log_probs = draw(logits, self._settings, generated)
        if return_logprob:
            self.output_logprob_processor.compute_logprobs(
                log_probs, top_logprobs_nums, token_ids_logprobs, tokens
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def draw(logits: torch.Tensor, settings: Settings, generated: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """A token a row, int64 (B,), and the log-probs (B, V) of the distribution it comes from, -inf for what could not be
    drawn. ``logits``: float32 (B, V); may be overwritten. ``generated``: int64 (B,), tokens that each response has."""
    rows = settings.rows
    if settings.penalty is not None:
        nothing = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        seen = torch.stack([nothing if row.seen is None else row.seen for row in rows])
        logits = penalise_repetition(logits, seen, settings.penalty)
    for index, row in enumerate(rows):
        if generated[index] < row.min_new and row.banned:
            logits[index, row.banned] = -torch.inf
    scaled = settings.filtered(logits)
    log_probs = scaled.log_softmax(-1)
    if settings.all_greedy:
        tokens = logits.argmax(-1)
    else:
        tokens = settings.drawn(logits, scaled.softmax(-1), settings.stream_keys, generated)
    for index, row in enumerate(rows):
        if row.seen is not None:
            row.seen[tokens[index]] = True
    return tokens, log_probs


def _begin(self: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    self.custom_params = [Row(request, vocab_size, batch.device) for request in batch.reqs]


def _keep(self: SamplingBatchInfo, keep_indices: list[int], keep_indices_device: torch.Tensor) -> None:
    self.custom_params = [self.custom_params[index] for index in keep_indices]


def _append(self: SamplingBatchInfo, other: SamplingBatchInfo) -> None:
    self.custom_params = [*self.custom_params, *other.custom_params]


def install() -> None:
    """Make this the sampler of the SGLang in this process, and let its batches carry rows."""
    register_sampler_backend(BACKEND, DistributionSampler)
    # In SGLang these three methods are empty hooks, called as a batch is made, filtered and merged.
    SamplingBatchInfo.adjusted_from_schedule_batch = _begin
    SamplingBatchInfo.adjusted_filter_batch = _keep
    SamplingBatchInfo.adjusted_merge_batch = _append


_SECONDS_TO_END = 10.0


def run_scheduler(*arguments: object, **keywords: object) -> None:
    """SGLang's scheduler process, with the sampler of this project."""
    install()
    run_scheduler_process(*arguments, **keywords)


class TokenEngine(Engine):
    """An engine without a detokenizer: token ids are all that goes in and comes out."""

    send_to_rpc: Any
    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *_: object, **__: object) -> tuple[list[Any], list[str]]:
        return [], []

    def shutdown(self) -> None:
        """End the schedulers and wait for them. SGLang's own would end every child of this process."""
        atexit.unregister(self.shutdown)
        if (watchdog := getattr(self.tokenizer_manager, "_subprocess_watchdog", None)) is not None:
            watchdog.stop()
        own = set(self.get_all_child_pids())
        schedulers = [process for process in multiprocessing.active_children() if process.pid in own]
        for process in schedulers:
            process.kill()
        for process in schedulers:
            process.join(_SECONDS_TO_END)
        socket, self.send_to_rpc = self.send_to_rpc, None
        if socket is not None:
            socket.close(linger=0)


LOADER = f"{__name__}.load"
REPORTER = f"{__name__}.report"
"""``load_format`` of an update's messages: the functions below, which SGLang calls with its model."""

# Fused layer, and shard of it, of a checkpoint's tensor.
FUSED: dict[str, tuple[str, str | int]] = {f"{shard}_proj": ("qkv_proj", shard) for shard in "qkv"}
FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
# Parameter of all experts of a layer, and half of its rows, of one expert's matrix.
_OF_EXPERTS: dict[str, tuple[str, int | None]] = {
    **dict.fromkeys(("gate_proj", "w1"), ("w13_weight", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("w13_weight", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("w2_weight", None)),
}


@dataclass(frozen=True)
class Expected:
    """Checksums that an update should leave in the model for one tensor."""

    whole: int  # checksum of the tensor as it was sent
    part: int  # checksum of what this rank should hold of it, in the model's dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Place of a rank's part of a tensor: ``length`` from ``offset`` on of ``parameter``'s dimension ``dim``,
    which are those from ``start`` on of the tensor."""

    parameter: torch.Tensor
    dim: int
    offset: int
    start: int
    length: int


_expected: dict[str, Expected] = {}
"""Expectation of every tensor that an update has brought; the last update counts."""
_errors: list[str] = []


@torch.no_grad()
def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load a bucket of full tensors by Hugging Face name. An error is reported at the end of the update: raised here,
    it would end SGLang's process."""
    try:
        for name, tensor in named_tensors:
            whole = tensor_checksum(tensor)
            place = place_of(model, name, tensor)
            part = whole
            if place is not None and (place.length != tensor.shape[place.dim] or place.parameter.dtype != tensor.dtype):
                part = tensor_checksum(tensor.narrow(place.dim, place.start, place.length).to(place.parameter.dtype))
            _expected[name] = Expected(whole, part, tuple(tensor.shape))
        model.load_weights(iter(named_tensors))
    except Exception as error:  # SGLang's process would end with it
        _errors.append(f"{type(error).__name__}: {error}")


def report(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write what the model holds of all tensors that updates have brought to a file; its folder is the name of the one
    tensor.

    The checksum of a tensor is that of the tensor sent where the model's part of it is exactly the tensor's part.
    """
    folder = Path(named_tensors[0][0])
    held: dict[str, int] = {}
    try:
        for name, expected in _expected.items():
            if (place := place_of(model, name, torch.empty(expected.shape, device="meta"))) is not None:
                checksum = tensor_checksum(place.parameter.data.narrow(place.dim, place.offset, place.length))
                held[name] = expected.whole if checksum == expected.part else checksum
    except Exception as error:  # as above
        _errors.append(f"{type(error).__name__}: {error}")
    from sglang.srt.runtime_context import get_parallel

    content = json.dumps({"held": held, "errors": _errors})
    (folder / f"rank{get_parallel().tp_rank}.json").write_text(content, encoding="utf-8")
    _errors.clear()


def place_of(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> Place | None:
    """Place of (this rank's part of) ``tensor`` in its model; None: unknown."""
    module_name, _, parameter_name = name.rpartition(".")
    parent, _, leaf = module_name.rpartition(".")
    modules, shard = dict(model.named_modules()), None
    expert = _EXPERT.fullmatch(name)
    if expert is not None and module_name not in modules:
        return _place_in_experts(modules.get(expert[1]), int(expert[2]), expert[3], tensor)
    if module_name not in modules and leaf in FUSED:
        fused, shard = FUSED[leaf]
        module_name = f"{parent}.{fused}"
    layer: Any = modules.get(module_name)
    parameter = getattr(layer, parameter_name, None)
    if parameter is None or parameter.ndim != tensor.ndim:
        return None
    rows = tensor.shape[0]
    if isinstance(layer, VocabParallelEmbedding):
        shard_rows = layer.shard_indices
        start, end = shard_rows.org_vocab_start_index, shard_rows.org_vocab_end_index
        return Place(parameter, 0, 0, start, end - start)
    if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        return Place(parameter, 0, 0, 0, rows) if parameter.shape == tensor.shape else None
    rank, size = get_group_rank_size(layer.tp_group)
    if isinstance(layer, QKVParallelLinear):
        # Heads are sharded over the ranks; of fewer key heads than ranks, several ranks hold the same ones.
        query, key = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        if shard == "q":
            return _share(parameter, 0, 0, rank, query, rows)
        offset = query if shard == "k" else query + key
        return _share(parameter, 0, offset, rank // layer.num_kv_head_replicas, key, rows)
    if isinstance(layer, RowParallelLinear):
        if tensor.ndim == 1:  # a bias, which every rank has whole
            return Place(parameter, 0, 0, 0, rows)
        return _share(parameter, 1, 0, rank, layer.input_size_per_partition, tensor.shape[1])
    if isinstance(shard, int):
        sizes = [width // size for width in layer.output_sizes]
        return _share(parameter, 0, sum(sizes[:shard]), rank, sizes[shard], rows)
    return _share(parameter, 0, 0, rank, layer.output_size_per_partition, rows)


def _place_in_experts(layer: Any, expert: int, matrix: str, tensor: torch.Tensor) -> Place | None:
    """None as well of an expert that another rank has."""
    if matrix not in _OF_EXPERTS or not hasattr(layer, "moe_tp_rank"):
        return None
    local = layer._map_global_expert_id_to_local_expert_id(expert)
    if local < 0:
        return None
    parameter_name, half = _OF_EXPERTS[matrix]
    own = getattr(layer, parameter_name).data[local]
    size = layer.intermediate_size_per_partition
    if half is None:
        return _share(own, 1, 0, layer.moe_tp_rank, size, tensor.shape[1])
    return _share(own, 0, half * (len(own) // 2), layer.moe_tp_rank, size, tensor.shape[0])


def _share(parameter: torch.Tensor, dim: int, offset: int, index: int, size: int, total: int) -> Place:
    """Share ``index`` of a dimension of ``total`` elements. On a CPU the last ones may be short: SGLang fills layers up
    with zeros to shares that its kernels like."""
    start = min(index * size, total)
    return Place(parameter, dim, offset, start, min(size, total - start))


def agreed_checksums(reports: Sequence[Mapping[str, Any]], num_ranks: int) -> dict[str, int]:
    """The checksum of every tensor of which each rank holds exactly its part, from what the ranks have written (see
    :func:`report`); 0 where they do not agree. RuntimeError where a model could not load a tensor, or a rank is
    silent."""
    errors = [error for report in reports for error in report["errors"]]
    if errors or len(reports) != num_ranks:
        raise RuntimeError(f"sglang: the model did not load the weights: {'; '.join(errors) or 'a rank is silent'}")
    first, *others = [report["held"] for report in reports]
    known = [name for name in first if all(name in held for held in others)]
    return {name: first[name] if all(held[name] == first[name] for held in others) else 0 for name in known}
