"""What a transport is: how the bytes of a bucket get from the sending rank to the engines.

An update is ``start(version) -> update(bucket)* -> finish(version)``.  Control messages (versions, checksums, errors)
are calls of the engines whatever the transport; a transport only says what an engine is handed with a call so that it
comes by the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

Tensors = Mapping[str, torch.Tensor]


class Link(Protocol):
    """An engine's end of a transport, as sent to it at the start of each update; picklable."""

    def connect(self) -> Receiver:
        """Called by the engine once for each value of :attr:`key`."""

    @property
    def key(self) -> Hashable:
        """Equal keys: the receiver of the last update goes on being used."""


class Receiver(ABC):
    """Lives in an engine's process."""

    @abstractmethod
    def receive(self, parcel: Any) -> dict[str, torch.Tensor]:
        """The tensors of a bucket. They may lie in memory that is shared, read-only or used again for the next one:
        valid until the call in which they came returns."""

    def settle(self) -> None:
        """The engine has copied the tensors of the last bucket; called before it says so."""

    def close(self) -> None:
        """The engine uses it no more."""


class Sender(ABC):
    """Lives in the sending rank's process, for as long as that."""

    slots: ClassVar[int] = 1
    """Buckets that may be packed and not yet released: with two, one is packed while the engines take the other."""

    @abstractmethod
    def start(self, engines: Sequence[Any], version: int, seconds: float) -> Sequence[Link]:
        """An update begins; one link for each of ``engines``, of which only the identity counts.

        Args:
            seconds: how long the whole exchange may take.
        """

    def connect(self, seconds: float) -> None:
        """Called when the engines are being told their links: where both ends must meet, they do here."""

    @abstractmethod
    def pack(self, tensors: Tensors) -> Any:
        """What the engines are handed for this bucket. The tensors must stay as they are until :meth:`release`."""

    def deliver(self, seconds: float) -> None:
        """Called when the engines are being handed what :meth:`pack` gave last: send it, where it does not go along."""

    def release(self) -> None:
        """The engines have taken the tensors of the first :meth:`pack` that was not released."""

    def finish(self) -> None:
        """The update is over and went well."""

    def abandon(self) -> None:
        """The update failed: give up connections whose other end may be anywhere."""
