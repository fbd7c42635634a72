"""Messages of an update between driver, trainer and engines, apart from the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.config.policy import TransportName, UpdateMode

MIB = 2**20
_PIPELINED_BYTES = 64 * MIB
"""Buckets from this size on are taken over in 20 ms or more, so that a message to an engine costs little."""


@dataclass(frozen=True)
class SyncOptions:
    """Settings of every update of a run."""

    buffer_bytes: int
    """Most bytes of a buffer for weights on their way; an update uses up to two at a time."""
    deadline: float
    """Seconds for one whole exchange."""
    patience: float
    """Seconds that an engine may take over one message before it counts as lost."""
    transport: TransportName = "object_store"
    directory: str | None = None
    """Of ``safetensors``."""
    mode: UpdateMode = "full"
    adapters_apart: bool = False

    @property
    def bucket_bytes(self) -> int:
        """Most bytes of one bucket. A transport that holds two besides the one being gathered gets smaller ones:
        also because nothing overlaps while the first is gathered and the last is taken over."""
        if self.transport in ("broadcast", "cuda_ipc"):
            return self.buffer_bytes
        return max(1, min(self.buffer_bytes // 2, _PIPELINED_BYTES))


class WeightSyncError(RuntimeError):
    """An engine does not hold what the trainer sent, or did not take it.

    Attributes: ``lost`` (ranks of the engines that died, failed or did not answer, which an update can do without; none
    where an engine holds other values than it was sent).
    """

    def __init__(self, text: str, lost: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.lost = tuple(lost)


@dataclass(frozen=True)
class LostEngines:
    """An update that did not come to its end because of some engines; the others can be sent everything again."""

    ranks: tuple[int, ...]
    text: str


Checksum = int | dict[int, int]
"""Of a tensor that an engine holds; by rank where the ranks of an engine hold different values."""


@dataclass(frozen=True)
class UpdateStart:
    """The first message of an update."""

    version: int
    link: Any = None
    """The engine's end of the transport (:class:`roll.weight_sync.transports.Link`)."""
    base_version: int | None = None
    """The version whose tensors this update changes some of; None: all tensors are sent."""
    scalings: dict[str, float] = field(default_factory=dict)
    """Weights whose adapters come apart, and the factor of ``B A`` for each."""


@dataclass(frozen=True, slots=True)
class BucketHeader:
    """Goes with every bucket."""

    version: int
    index: int


@dataclass(frozen=True)
class SyncReport:
    """The cost of one update, as seen by the sender."""

    version: int
    num_tensors: int
    """Tensors that were verified."""
    num_bytes: int
    """Bytes of the tensors sent, to one engine."""
    num_buckets: int
    seconds: float


def verify_checksums(sent: Mapping[str, int], held: Mapping[str, Checksum], engine: int, version: int) -> None:
    """Compare the trainer's checksums with an engine's.

    Raises:
        WeightSyncError: naming the first few tensors that differ or are missing, and the ranks where they do.
    """
    wrong = [name for name, checksum in sent.items() if held.get(name) != checksum]
    if wrong:
        missing = [name for name in wrong if name not in held]
        by_rank = {name: each for name in wrong if isinstance(each := held.get(name), dict)}
        ranks = sorted({rank for name, each in by_rank.items() for rank in each if each[rank] != sent[name]})
        raise WeightSyncError(
            f"weight update {version}: engine {engine} holds other values than the trainer sent in {len(wrong)} of "
            f"{len(sent)} tensors ({', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''})"
            + (f", on rank {', '.join(map(str, ranks))} of it" if ranks else "")
            + (f"; {len(missing)} of them never arrived ({missing[0]}, ...)" if missing else "")
        )


def same_members(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """True for two lists of the same engines in the same order."""
    return len(first) == len(second) and all(a is b or a == b for a, b in zip(first, second, strict=True))
