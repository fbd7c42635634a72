"""The receiving half of weight sync: from the buckets of a transport to the weights of an engine.

If a LoRA model's base and adapters are sent separately they are merged here, or handed to an engine that computes with
adapters itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from roll.models.lora import DOWN_PART, UP_PART, merged_weight
from roll.platforms import current_platform
from roll.weight_sync.encoding import (
    INDICES_PART,
    VALUES_PART,
    BucketHeader,
    Checksum,
    ChecksumKind,
    UpdateStart,
    apply_delta,
    checksum_kind,
    tensor_checksum,
)
from roll.weight_sync.transports import Link, Receiver

if TYPE_CHECKING:
    from roll.strategies.engines.base import GenerationStrategy


class WeightReceiver:
    """Lives in the engine's process, with a method for each message of an update."""

    def __init__(self, engine: GenerationStrategy) -> None:
        self._engine = engine
        self._connections: dict[type[Receiver], tuple[Link, Receiver]] = {}
        """By transport."""
        self._receiver: Receiver | None = None
        self._update: UpdateStart | None = None
        self._checksum_kind = checksum_kind(current_platform().device())
        self._held_version: int | None = None
        """The last update that was finished."""
        self._adapted = AdapterParts() if engine.takes_adapters else AdaptedWeights()

    def start(self, start: UpdateStart) -> ChecksumKind:
        """Begin an update and return the kind of checksum that the engine will report.

        Raises:
            ValueError: the update is a delta to a version that the engine does not hold.
        """
        if start.base_version not in (None, self._held_version):
            raise ValueError(
                f"weight update {start.version} changes version {start.base_version}; this engine holds "
                f"{'none' if self._held_version is None else self._held_version}"
            )
        if self._update is not None:
            # The last one was cut short by another engine's death. This one is full and overwrites what it brought,
            # but the engine cannot start another reload inside an open one.
            self._update = None
            self._engine.finish_weight_update()
        self._receiver = self._connected(start.link)
        self._engine.start_weight_update(start.version)
        self._update, self._held_version = start, None  # None until finished: half an update is no version
        self._adapted.start(start.scalings, keep=start.base_version is not None)
        return self._checksum_kind

    def _connected(self, link: Link) -> Receiver:
        """Return the connection of the last update if the link is the same, else a new one in its place."""
        known, receiver = self._connections.get(link.receiver, (None, None))
        if receiver is None or known != link:
            if receiver is not None:
                # Forgotten first: should connecting fail, a closed receiver must not be found again.
                del self._connections[link.receiver]
                receiver.close()
            receiver = link.connect()
            self._connections[link.receiver] = link, receiver
        return receiver

    def update(self, header: BucketHeader, payload: object) -> None:
        """Load one bucket.

        Raises:
            ValueError: a bucket of another update.
        """
        assert self._receiver is not None and self._update is not None, "no update has been started"
        tensors = self._receiver.receive(payload)
        if header.version != self._update.version:
            raise ValueError(
                f"bucket {header.index} with {next(iter(tensors))} belongs to weight update {header.version}, "
                f"not to {self._update.version}"
            )
        if whole := dict(self._whole_tensors(tensors)):
            self._engine.update_weights(whole)
        del tensors, whole  # memory that is mapped for this call is unmapped with its last tensor
        self._receiver.settle()

    def _whole_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in tensors.items():
            name, separator, part = key.partition("#")
            if separator + part == INDICES_PART:
                weights = self._engine.held_weights()
                assert weights is not None, "this engine takes whole models only"
                # In place where it can be; an engine that stores the tensor strided gets the changed copy back.
                held = weights[name].contiguous()
                apply_delta(held, tensor, tensors[name + VALUES_PART])
                yield name, held
            elif self._adapted.takes(key):
                yield from self._adapted.take(key, tensor)
            elif not separator:
                yield name, tensor

    def finish(self, unsent: Sequence[str] = ()) -> dict[str, Checksum]:
        """Make the new weights current and return the checksum of each tensor that the engine now holds.

        Args:
            unsent: tensors that the update did not bring and that are verified too.
        """
        assert self._update is not None, "no update has been started"
        self._adapted.hand_over(self._engine)
        checksums = dict(self._engine.finish_weight_update())
        others = [name for name in unsent if not self._adapted.takes(name)]
        if others:
            checksums |= self._engine.held_checksums(others)
        checksums |= self._adapted.checksums(checksums)
        self._held_version, self._update = self._update.version, None
        return checksums

    def close(self) -> None:
        """Close all connections."""
        for _, receiver in self._connections.values():
            receiver.close()
        self._connections.clear()


class AdaptedWeights:
    """Keeps base and adapters of every adapted weight, and gives the engine the merged one.

    The base has to be kept: subtracting ``B A`` from a merged bfloat16 weight does not restore its bits.
    """

    def __init__(self) -> None:
        self._scalings: Mapping[str, float] = {}
        self._parts: dict[str, torch.Tensor] = {}
        self._merged: dict[str, int] = {}
        """Checksums of the merged weights given to the engine in this update."""

    def start(self, scalings: Mapping[str, float], keep: bool) -> None:
        """Begin an update.

        Args:
            scalings: the factor of ``B A`` by weight.
            keep: the update brings changed tensors only, so the parts of earlier ones remain valid.
        """
        self._scalings = scalings
        self._merged.clear()
        if not keep:
            self._parts.clear()

    def takes(self, key: str) -> bool:
        """Return True for W, A or B of an adapted weight."""
        return key.partition("#")[0] in self._scalings

    def take(self, key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Keep a copy of a part; with the last one (B) yield the merged weight under its own name."""
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

    def hand_over(self, engine: GenerationStrategy) -> None:
        """Do nothing: the engine has the merged weights already."""

    def checksums(self, held: Mapping[str, Checksum]) -> dict[str, Checksum]:
        """Return the checksum of every part, which the sender compares with what it sent.

        The engine's merged weight is verified here, since the sender never sees it: if it differs from the one given,
        the engine's checksum takes the place of the base's, and the comparison fails.

        Args:
            held: checksums of the engine's own weights.
        """
        found: dict[str, Checksum] = {key: tensor_checksum(tensor) for key, tensor in self._parts.items()}
        return found | {name: held.get(name, 0) for name, merged in self._merged.items() if held.get(name) != merged}


class AdapterParts(AdaptedWeights):
    """Collects A and B of all weights, for an engine that computes with adapters, takes them as a whole and reports
    their checksums itself."""

    def takes(self, key: str) -> bool:
        """Return True for A or B of an adapted weight."""
        return "#" in key and super().takes(key)

    def take(self, key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Keep a part; nothing goes to the engine yet."""
        self._parts[key] = tensor.clone()  # the transport reuses the bucket's memory
        yield from ()

    def hand_over(self, engine: GenerationStrategy) -> None:
        """Give the engine the adapter if it is complete; otherwise the verification reports what is missing."""
        wanted = [weight + part for weight in self._scalings for part in (DOWN_PART, UP_PART)]
        if wanted and self._parts.keys() >= set(wanted):
            engine.update_adapter(self._parts, self._scalings)
        self._parts = {}
