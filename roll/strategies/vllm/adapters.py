"""The policy's LoRA adapter inside vLLM: put in from tensors, and read back from the buffers it is computed with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from roll.models.lora import DOWN_PART, UP_PART
from roll.strategies.vllm.parts import meant_part
from roll.weight_sync.encoding import tensor_checksum

POLICY = LoRARequest("policy", 1, lora_path="sent by the trainer")
"""Every request asks for it. There is one adapter, and its values change in place."""


class PolicyAdapter:
    """Args:
    worker_manager: vLLM's own, of one rank (``WorkerLoRAManager``).
    """

    def __init__(self, worker_manager: Any) -> None:
        self._worker_manager = worker_manager
        self._manager = worker_manager._adapter_manager
        self._dtype: torch.dtype = worker_manager.lora_config.lora_dtype

    def clear(self) -> None:
        """An adapter that changes nothing."""
        self._manager.remove_adapter(POLICY.lora_int_id)
        self._worker_manager.add_dummy_lora(POLICY, rank=1)
        self._manager.activate_adapter(POLICY.lora_int_id)

    def replace(self, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> dict[str, int]:
        """Put an adapter in the place of the last one.

        Args:
            tensors: A (r, in) and B (out, r), whole, by the weight's name with ``#lora_A`` or ``#lora_B`` behind.
            scalings: the factor of ``B A`` by weight.

        Returns:
            The checksum of each tensor, as sent, where this rank computes with exactly its part of it. A stage of
            several leaves out what belongs to the others.
        """
        layers = {}
        for weight, scaling in scalings.items():
            # Copies: vLLM multiplies B by the scaling in place.
            down, up = (tensors[weight + part].to(self._dtype, copy=True) for part in (DOWN_PART, UP_PART))
            module = _module_of(weight)
            layers[module] = LoRALayerWeights(module, len(down), 0, down, up, scaling=scaling)
        rank = max(weights.rank for weights in layers.values())
        self._manager.remove_adapter(POLICY.lora_int_id)
        self._manager.add_adapter(LoRAModel(POLICY.lora_int_id, rank, layers))
        self._manager.activate_adapter(POLICY.lora_int_id)
        return self._checksums(tensors, scalings)

    def _checksums(self, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> dict[str, int]:
        slot = self._manager.lora_index_to_id.index(POLICY.lora_int_id)
        places = dict(self._places())
        found = {}
        for weight in scalings:
            layer, index = places.get(_module_of(weight), (None, 0))
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

    def _places(self) -> Iterator[tuple[str, tuple[BaseLayerWithLoRA, int]]]:
        """The checkpoint's modules: the layer that computes each, and which of the layer's adapters is its own."""
        for name, layer in self._manager.modules.items():
            for index, module in enumerate(self._manager.packed_modules.get(name, [name])):
                yield module, (layer, index)


def _module_of(weight: str) -> str:
    return weight.removesuffix(".weight")
