"""Weights of a LoRA model whose base and adapters come apart, on the engine's side: it merges them itself, or computes
with them as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from roll.models.lora import DOWN_PART, UP_PART, merged_weight
from roll.weight_sync.checksum import tensor_checksum
from roll.weight_sync.messages import Checksum


class AdapterEngine(Protocol):
    """What this needs of an engine that computes with adapters."""

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> None: ...


class AdapterParts:
    """For an engine that computes with adapters: keeps A and B until all of an update's are there."""

    def __init__(self) -> None:
        self._scalings: Mapping[str, float] = {}
        self._parts: dict[str, torch.Tensor] = {}

    def start(self, scalings: Mapping[str, float], keep: bool) -> None:
        """See :class:`AdaptedWeights`."""
        self._scalings = scalings
        self._parts.clear()

    def takes(self, key: str) -> bool:
        """Whether a tensor of an update belongs here: A or B of an adapted weight."""
        name, separator, _ = key.partition("#")
        return bool(separator) and name in self._scalings

    def take(self, key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Keep a copy of a part; nothing goes to the engine yet."""
        self._parts[key] = tensor.clone()
        yield from ()

    def hand_over(self, engine: AdapterEngine) -> None:
        """Give the engine the adapter, if it is whole; what is missing will be missed in its checksums."""
        wanted = [weight + part for weight in self._scalings for part in (DOWN_PART, UP_PART)]
        if wanted and self._parts.keys() >= set(wanted):
            engine.update_adapter(self._parts, self._scalings)
        self._parts = {}

    def checksums(self, held: Mapping[str, Checksum]) -> dict[str, Checksum]:
        """None: the engine has them."""
        return {}


class AdaptedWeights:
    """Keeps the base and the adapters of every adapted weight: the engine's own weights are the merged ones, from
    which the base could not be had back exactly."""

    def __init__(self) -> None:
        self._scalings: Mapping[str, float] = {}
        self._parts: dict[str, torch.Tensor] = {}
        self._merged: dict[str, int] = {}
        """Checksums of what the engine was given in this update."""

    def start(self, scalings: Mapping[str, float], keep: bool) -> None:
        """An update begins.

        Args:
            scalings: the factor of ``B A`` by weight.
            keep: the update does not bring what it does not change.
        """
        self._scalings = scalings
        self._merged.clear()
        if not keep:
            self._parts.clear()

    def takes(self, key: str) -> bool:
        """Whether a tensor of an update belongs here: W, A or B of an adapted weight."""
        return key.partition("#")[0] in self._scalings

    def take(self, key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Keep a copy of a part; the merged weight, by its name, when that is the last of them (B)."""
        if key in self._parts:
            self._parts[key].copy_(tensor)
        else:
            self._parts[key] = tensor.clone()
        name, separator, part = key.partition("#")
        if separator + part == UP_PART and {name, name + DOWN_PART} <= self._parts.keys():
            base, down, up = (self._parts[name + suffix] for suffix in ("", DOWN_PART, UP_PART))
            merged = merged_weight(base, down, up, self._scalings[name])
            self._merged[name] = tensor_checksum(merged)
            yield name, merged

    def hand_over(self, engine: AdapterEngine) -> None:
        """The engine has the merged weights already."""

    def checksums(self, held: Mapping[str, Checksum]) -> dict[str, Checksum]:
        """Of every part; in place of a base's, the engine's own of the merged weight, where that is not what it was
        given.

        Args:
            held: by the engine.
        """
        found: dict[str, Checksum] = {key: tensor_checksum(tensor) for key, tensor in self._parts.items()}
        return found | {name: held.get(name, 0) for name, merged in self._merged.items() if held.get(name) != merged}
