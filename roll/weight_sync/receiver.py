"""The receiving half of weight sync: from what a transport hands over to the weights of an engine."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from roll.platforms import current_platform
from roll.weight_sync.adapted import AdaptedWeights, AdapterParts
from roll.weight_sync.checksum import ChecksumKind, checksum_kind
from roll.weight_sync.delta import INDICES_PART, VALUES_PART, apply_delta
from roll.weight_sync.messages import BucketHeader, Checksum, UpdateStart
from roll.weight_sync.transports.base import Link, Receiver


class UpdatableEngine(Protocol):
    """What weight sync needs of a :class:`roll.strategies.engines.requests.GenerationStrategy`."""

    def start_weight_update(self, version: int) -> None: ...

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def finish_weight_update(self) -> Mapping[str, Checksum]: ...

    def held_checksums(self, names: Sequence[str]) -> Mapping[str, Checksum]: ...

    @property
    def takes_adapters(self) -> bool: ...

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> None: ...

    def held_weights(self) -> Mapping[str, torch.Tensor] | None: ...


class WeightReceiver:
    """Lives in the engine's process; one method a message of the update."""

    def __init__(self, engine: UpdatableEngine) -> None:
        self._engine = engine
        self._connections: dict[type, tuple[Hashable, Receiver]] = {}
        """By transport, each with the key of its link."""
        self._receiver: Receiver | None = None
        self._update: UpdateStart | None = None
        self._held_version: int | None = None
        """The last update that was finished."""
        self._adapted = AdapterParts() if engine.takes_adapters else AdaptedWeights()

    def start(self, start: UpdateStart) -> ChecksumKind:
        """An update begins; the kind of checksum that the engine will report.

        Raises:
            ValueError: the update changes something else than what the engine holds.
        """
        if start.base_version not in (None, self._held_version):
            raise ValueError(
                f"weight update {start.version} changes version {start.base_version}; this engine holds "
                f"{'none' if self._held_version is None else self._held_version}"
            )
        if self._update is not None:
            # It was cut short, by another engine's death; what it has brought is overwritten.
            self._engine.finish_weight_update()
        self._receiver = self._connected(start.link)
        self._engine.start_weight_update(start.version)
        self._update, self._held_version = start, None
        self._adapted.start(start.scalings, keep=start.base_version is not None)
        return checksum_kind(current_platform().device())

    def _connected(self, link: Link) -> Receiver:
        """The connection of the last update, or a new one in its place."""
        key, receiver = self._connections.get(type(link), (None, None))
        if receiver is None or key != link.key:
            if receiver is not None:
                del self._connections[type(link)]
                receiver.close()
            receiver = link.connect()
            self._connections[type(link)] = link.key, receiver
        return receiver

    def update(self, header: BucketHeader, parcel: Any) -> None:
        """Take over one bucket.

        Raises:
            ValueError: a bucket of another update.
        """
        assert self._receiver is not None and self._update is not None, "no update has been started"
        tensors = self._receiver.receive(parcel)
        if header.version != self._update.version:
            raise ValueError(
                f"bucket {header.index} with {next(iter(tensors))} belongs to weight update {header.version}, "
                f"not to {self._update.version}"
            )
        if whole := dict(self._whole_tensors(tensors)):
            self._engine.update_weights(whole)
        del tensors
        self._receiver.settle()

    def _whole_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in tensors.items():
            name, separator, part = key.partition("#")
            if separator + part == INDICES_PART:
                yield name, self._changed(name, tensor, tensors[name + VALUES_PART])
            elif self._adapted.takes(key):
                yield from self._adapted.take(key, tensor)
            elif not separator:
                yield name, tensor

    def _changed(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The engine's own tensor, with some elements changed."""
        held = self._own_weights()[name]
        if not held.is_contiguous():
            held = held.contiguous()
        apply_delta(held, indices, values)
        return held

    def _own_weights(self) -> Mapping[str, torch.Tensor]:
        held = self._engine.held_weights()
        assert held is not None, "this engine takes whole models only"
        return held

    def finish(self, unsent: Sequence[str] = ()) -> dict[str, Checksum]:
        """Make the new weights current; a checksum per tensor of what the engine now holds.

        Args:
            unsent: tensors that the update did not bring and that are checked all the same.
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
        """Give up all connections."""
        for _, receiver in self._connections.values():
            receiver.close()
        self._connections.clear()
