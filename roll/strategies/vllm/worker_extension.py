"""Taking over weights, inside vLLM's worker: what vLLM mixes into the class that holds the model.

vLLM fuses matrices (query, key and value; gate and up) and, on a CPU, packs them for oneDNN, after which the values
cannot be read back.  So an update goes through its layer-by-layer reload: a layer whose tensors are all there is
loaded into plain parameters, compared there with what was sent, and only then packed; a packed layer is asked for one
product to see that the packing took place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roll.strategies.vllm.adapters import PolicyAdapter
from roll.strategies.vllm.ranks import answering
from roll.strategies.vllm.shared_bucket import SharedTensors
from roll.strategies.vllm.verification import ReloadVerifier, quieten

_WATCH_SECONDS = 2.0

Tensors = Mapping[str, torch.Tensor] | SharedTensors


class WeightReceiver:
    """Methods for ``collective_rpc``, in every rank. Attributes stand in vLLM's own class, hence the prefix."""

    model_runner: Any
    _roll_verifier: ReloadVerifier | None = None
    _roll_adapter: PolicyAdapter | None = None

    @answering
    def roll_begin(self, engine_pid: int) -> None:
        """In a rank that is a process of its own: end with the engine's process, whatever this one is doing."""
        quieten()
        Thread(target=_end_with, args=(engine_pid,), daemon=True, name="roll-engine-watch").start()
        self._roll_make_stage_buffers()

    def _roll_make_stage_buffers(self) -> None:
        """What a later stage receives is copied to buffers, which vLLM makes when it tries the model out: on a CPU it
        does so only before it compiles."""
        runner = self.model_runner
        is_later_stage = not get_pp_group().is_first_rank
        if is_later_stage and runner.device.type == "cpu" and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    @answering
    def roll_add_adapter(self) -> None:
        """Before the first request of an engine with LoRA: the policy's adapter, which changes nothing yet."""
        self._roll_adapter = PolicyAdapter(self.model_runner.lora_manager)
        self._roll_adapter.clear()

    @answering
    def roll_start_reload(self) -> None:
        model = self.model_runner.model
        initialize_layerwise_reload(model)
        if self._roll_verifier is None:
            self._roll_verifier = ReloadVerifier(model)
        self._roll_verifier.start()

    @answering
    @torch.no_grad()
    def roll_load(self, tensors: Tensors) -> None:
        """Load full tensors by Hugging Face name. A rank of several takes its part of them.

        Raises:
            ValueError: a name that the model does not have.
        """
        verifier = self._roll_verifier
        assert verifier is not None, "no reload has been started"
        device = self.model_runner.device

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in _opened(tensors).items():
                # A copy: its layer may wait for a tensor of the next bucket, and this may be shared memory.
                received = tensor.to(device, copy=True)
                verifier.expect(name, received)
                yield name, received

        self.model_runner.model.load_weights(arriving())

    @answering
    @torch.no_grad()
    def roll_finish_reload(self) -> dict[str, int]:
        """Checksum, as sent, of every tensor that the model now holds."""
        assert self._roll_verifier is not None, "no reload has been started"
        finalize_layerwise_reload(self.model_runner.model, self.model_runner.model_config)
        return self._roll_verifier.finish(remember=self._roll_adapter is not None)

    @answering
    @torch.no_grad()
    def roll_replace_adapter(self, tensors: Tensors, scalings: Mapping[str, float]) -> dict[str, int]:
        """Checksum, as sent, of every A and B that the model now computes with."""
        assert self._roll_adapter is not None, "the engine has no adapters"
        return self._roll_adapter.replace(_opened(tensors), scalings)

    @answering
    @torch.no_grad()
    def roll_held_checksums(self, names: Sequence[str]) -> dict[str, int]:
        """Of tensors that an earlier update brought."""
        assert self._roll_verifier is not None, "no weights have been loaded"
        return self._roll_verifier.held(names)


def _end_with(parent: int) -> None:
    """vLLM's own watch asks the loop of this process to end, which it may never get to: a rank whose neighbour has gone
    waits for it inside a sum over the ranks."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _opened(tensors: Tensors) -> Mapping[str, torch.Tensor]:
    return tensors.open() if isinstance(tensors, SharedTensors) else tensors
