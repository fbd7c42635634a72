"""Ranks of a vLLM engine: weights and adapters inside vLLM's worker, how the engine's process reaches them, and repairs
of speculative decoding, with its counts.

vLLM fuses matrices (query, key and value; gate and up) and, on a CPU, packs them for oneDNN, after which the values
cannot be read back. So an update goes through its layer-by-layer reload: a layer whose tensors are all there is
loaded into plain parameters, compared there with what was sent, and only then packed; a packed layer computes one
product, which shows that the packing took place.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import Thread
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_world_group
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample import rejection_sampler

from roll.models.lora import DOWN_PART, UP_PART
from roll.strategies.vllm.verification import ReloadVerifier, meant_part, quieten
from roll.weight_sync.encoding import Checksum, tensor_checksum
from roll.weight_sync.transports import Receiver, SharedMemorySender, SharedPayload

POLICY = LoRARequest("policy", 1, lora_path="sent by the trainer")
"""Adapter of every request. There is one adapter, and its values change in place."""
Tensors = Mapping[str, torch.Tensor] | SharedPayload
_Result = TypeVar("_Result")
_WATCH_SECONDS = 2.0


@dataclass(frozen=True)
class RankFailure:
    """A rank's result in place of an exception: vLLM would lose the type, and which rank it was."""

    rank: int
    is_value_error: bool
    text: str


def returning_failures(method: Callable[..., _Result]) -> Callable[..., _Result | RankFailure]:
    """Wrap a method for ``collective_rpc`` so that it returns its exceptions."""

    @wraps(method)
    def call(*args: object, **kwargs: object) -> _Result | RankFailure:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # raised again in the engine's process
            return RankFailure(get_world_group().rank, isinstance(error, ValueError), str(error))

    return call


def check_results(results: Sequence[Any]) -> None:
    """Raise the failures of ranks: ValueError where they refused a value, else RuntimeError."""
    failures = [result for result in results if isinstance(result, RankFailure)]
    texts = [failure.text if len(results) == 1 else f"rank {failure.rank}: {failure.text}" for failure in failures]
    if failures:
        kind = ValueError if all(failure.is_value_error for failure in failures) else RuntimeError
        raise kind("; ".join(texts))


def joined_checksums(by_rank: Sequence[Mapping[str, int]]) -> dict[str, Checksum]:
    """Join the ranks' checksums: one for each tensor on which all ranks that have a part of it agree, else by rank."""
    found: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for rank, checksums in enumerate(by_rank):
        for name, checksum in checksums.items():
            found[name][rank] = checksum
    return {name: held if len(set(held.values())) > 1 else next(iter(held.values())) for name, held in found.items()}


class RankMemory(SharedMemorySender):
    """Memory in which ranks get tensors, one bucket at a time."""

    slots = 1


class PolicyAdapter:
    """The adapter in vLLM's own manager of one rank (``WorkerLoRAManager``); at first one that changes nothing."""

    def __init__(self, worker_manager: Any) -> None:
        self._manager = worker_manager._adapter_manager
        self._dtype: torch.dtype = worker_manager.lora_config.lora_dtype
        self._manager.remove_adapter(POLICY.lora_int_id)
        worker_manager.add_dummy_lora(POLICY, rank=1)
        self._manager.activate_adapter(POLICY.lora_int_id)

    def replace(self, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> dict[str, int]:
        """Put an adapter in the place of the last one, given as to :meth:`GenerationStrategy.update_adapter`. Returns
        the checksum of each tensor, as sent, where this rank computes with exactly its part of it. A stage of several
        leaves out what belongs to the others."""
        layers = {}
        for weight, scaling in scalings.items():
            # Copies: vLLM multiplies B by the scaling in place.
            down, up = (tensors[weight + part].to(self._dtype, copy=True) for part in (DOWN_PART, UP_PART))
            module = weight.removesuffix(".weight")
            layers[module] = LoRALayerWeights(module, len(down), 0, down, up, scaling=scaling)
        rank = max(weights.rank for weights in layers.values())
        self._manager.remove_adapter(POLICY.lora_int_id)
        self._manager.add_adapter(LoRAModel(POLICY.lora_int_id, rank, layers))
        self._manager.activate_adapter(POLICY.lora_int_id)
        slot = self._manager.lora_index_to_id.index(POLICY.lora_int_id)
        # The checkpoint's modules: the layer that computes each, and which of the layer's adapters is its own.
        places = {
            module: (layer, index)
            for name, layer in self._manager.modules.items()
            for index, module in enumerate(self._manager.packed_modules.get(name, [name]))
        }
        found = {}
        for weight in scalings:
            layer, index = places.get(weight.removesuffix(".weight"), (None, 0))
            if layer is None:
                continue
            down, up = tensors[weight + DOWN_PART], tensors[weight + UP_PART]
            held_down = layer.lora_a_stacked[index][slot, 0, : len(down)]
            held_up = layer.lora_b_stacked[index][slot, 0, :, : len(down)]
            scaled = up.to(self._dtype, copy=True).mul_(scalings[weight])
            for part, sent, meant, held in (
                (DOWN_PART, down, down.to(self._dtype), held_down),
                (UP_PART, up, scaled, held_up),
            ):
                own = meant_part(layer.base_layer, meant, held)
                checksum = tensor_checksum(held)
                is_right = checksum == tensor_checksum(own.to(held.device))
                found[weight + part] = tensor_checksum(sent.to(held.device)) if is_right else checksum
        return found


class WeightReceiver:
    """Methods for ``collective_rpc`` in every rank. They become part of vLLM's own worker class, hence the prefix."""

    model_runner: Any
    _roll_verifier: ReloadVerifier | None = None
    _roll_adapter: PolicyAdapter | None = None
    _roll_memory: Receiver

    @returning_failures
    def roll_begin(self, engine_pid: int) -> None:
        """Called in a rank that is a separate process, to make it end with the engine's process in any case."""
        quieten()
        self._roll_memory = RankMemory.receiver()
        Thread(target=_end_with, args=(engine_pid,), daemon=True, name="roll-engine-watch").start()
        # vLLM allocates a later stage's receive buffers in its profiling run, which on a CPU takes place only if it
        # compiles the model.
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.device.type == "cpu" and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    @returning_failures
    def roll_repair_sampling(self) -> None:
        repair_sampling(on_cpu=self.model_runner.device.type == "cpu")

    @returning_failures
    def roll_add_adapter(self) -> None:
        """Before the first request of an engine with LoRA: the policy's adapter, which changes nothing yet."""
        self._roll_adapter = PolicyAdapter(self.model_runner.lora_manager)

    @returning_failures
    def roll_start_reload(self) -> None:
        model = self.model_runner.model
        initialize_layerwise_reload(model)
        if self._roll_verifier is None:
            self._roll_verifier = ReloadVerifier(model)
        self._roll_verifier.start()

    def _roll_opened(self, tensors: Tensors) -> Mapping[str, torch.Tensor]:
        """The tensors, in host memory that the engine's process writes to again when the call has returned."""
        return self._roll_memory.receive(tensors) if isinstance(tensors, SharedPayload) else tensors

    @returning_failures
    @torch.no_grad()
    def roll_load(self, tensors: Tensors) -> None:
        """Load full tensors by Hugging Face name. A rank of several takes its part of them. ValueError for a name that
        the model does not have."""
        verifier = self._roll_verifier
        assert verifier is not None, "no reload has been started"

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._roll_opened(tensors).items():
                # A copy: its layer may wait for a tensor of the next bucket, and this may be shared memory.
                yield from verifier.expect(name, tensor.to(self.model_runner.device, copy=True))

        self.model_runner.model.load_weights(arriving())

    @returning_failures
    @torch.no_grad()
    def roll_finish_reload(self) -> dict[str, int]:
        """Checksum, as sent, of every tensor that the model now holds."""
        assert self._roll_verifier is not None, "no reload has been started"
        finalize_layerwise_reload(self.model_runner.model, self.model_runner.model_config)
        return self._roll_verifier.finish(remember=self._roll_adapter is not None)

    @returning_failures
    def roll_close_memory(self) -> None:
        """At the end of an update: give back the memory that its tensors came in."""
        self._roll_memory.close()

    @returning_failures
    @torch.no_grad()
    def roll_replace_adapter(self, tensors: Tensors, scalings: Mapping[str, float]) -> dict[str, int]:
        """Checksum, as sent, of every A and B that the model now computes with."""
        assert self._roll_adapter is not None, "the engine has no adapters"
        return self._roll_adapter.replace(self._roll_opened(tensors), scalings)

    @returning_failures
    @torch.no_grad()
    def roll_held_checksums(self, names: Sequence[str]) -> dict[str, int]:
        """Checksums of tensors that an earlier update brought."""
        assert self._roll_verifier is not None, "no weights have been loaded"
        return self._roll_verifier.held(names)


def _end_with(parent: int) -> None:
    """End this rank when its parent has died. vLLM only asks the process's loop to stop, which never happens in a rank
    that waits for a dead peer inside an all-reduce."""
    while os.getppid() == parent:  # an orphan's parent is init
        time.sleep(_WATCH_SECONDS)
    time.sleep(_WATCH_SECONDS)
    os._exit(1)


class DraftCounts(StatLoggerBase):
    """A logger for vLLM, called after each of its steps. Counts since the start, under the names of
    :attr:`~roll.strategies.engines.base.GenerationStrategy.counts`."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.counts: Counter[str] = Counter()

    def record(self, scheduler_stats: Any, *further: Any, **named: Any) -> None:
        stats = scheduler_stats and scheduler_stats.spec_decoding_stats
        if stats is not None:
            self.counts["drafts"] += stats.num_drafts
            self.counts["drafted_tokens"] += stats.num_draft_tokens
            self.counts["accepted_tokens"] += stats.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Nothing: the strategy logs what the engine has."""


def repair_sampling(on_cpu: bool) -> None:
    """Repair, in this process, what vLLM 0.32 does with drafts.

    - Where no request of a batch has one, filtering by ``top_k`` fails on the empty rows.
    - On a CPU, what gives each drafted token the temperature, ``top_k`` and ``top_p`` of its request writes them into a
      converted copy of its output: sampling then reads memory which nobody has written, and log-probs are of no
      distribution at all.
    """
    rejection_sampler.apply_sampling_constraints = _constrained
    if on_cpu:
        rejection_sampler.expand_batch_to_tokens = _expanded


_apply_sampling_constraints = rejection_sampler.apply_sampling_constraints


def _constrained(logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
    return _apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata) if len(logits) else logits


def _expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Values (requests,), each repeated for its request's drafted tokens, which end at ``cu_num_tokens``."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)
