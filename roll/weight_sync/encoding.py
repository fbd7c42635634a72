"""The form in which weights are sent: buckets of tensors, changed elements only, checksums; and the messages of an
update between driver, trainer and engines.

**Buckets**: many named tensors in one flat buffer.

**delta**: of a tensor that the engine holds already, only the elements whose bits have changed. Master weights are
float32, and what is sent is rounded to the compute dtype. A step of 1e-6 moves a bfloat16 weight of 0.02 to its
neighbour (1.2e-4 away) once in a hundred steps, so most elements are unchanged, bit for bit. Indices are int32, so an
element costs 4 bytes besides its own; a tensor that would grow by that is sent whole. The result is exact: both sides
verify the whole tensor.

**Checksums** of a tensor's bytes, which both ends compute where the tensor lies. Two kinds. In host memory XXH3
(64 bits, seeded with a hash of dtype and shape), which reads memory about as fast as it can be copied. XXH3 is a chain
of blocks, though, so on an accelerator ``words`` is computed instead, which is a sum: the tensor is read as signed
64-bit words ``w_i``, each is made a pseudo-random number that depends on its value and its position, and the numbers
are added (all arithmetic modulo 2**64, shifts keep the sign):

    h_i = (w_i + (w_i >> 32) + k_i) * M,   k_i = i * G + S
    checksum = mix(S + sum_i h_i * (h_i >> 32))

S is the hash of dtype and shape; G and M are the odd multipliers of SplitMix64. Integer addition is exact and
commutative, so the value does not depend on device, thread count or chunk size. The first fold brings sign and exponent
bits down to where the multiplication spreads them; the product makes the sum non-linear, so that changes do not cancel
(a plain weighted sum does not see two words with opposite sign bits change places). Both kinds guard against mistakes,
not against an adversary."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import xxhash

from roll.config.run import QuantizationFormat, TransportName
from roll.config.strategies.base import UpdateMode
from roll.protocol.columns import flat_view

MIB = 2**20
_PIPELINED_BYTES = 64 * MIB
"""Loading a bucket of this size takes an engine 20 ms or more, so the message itself costs little; larger ones would
only delay the overlap."""


@dataclass(frozen=True)
class SyncOptions:
    """Settings of every update of a run."""

    buffer_bytes: int
    """Maximal bytes of a buffer for weights in transit; an update uses up to two at a time."""
    deadline: float
    """Seconds for one whole exchange."""
    patience: float
    """Seconds that an engine may spend on one message before it counts as lost."""
    transport: TransportName = "object_store"
    directory: str | None = None
    """Folder of ``safetensors``."""
    mode: UpdateMode = "full"
    adapters_apart: bool = False
    quantization: QuantizationFormat | None = None

    @property
    def bucket_bytes(self) -> int:
        """Maximal bytes of a bucket. Transports with two slots get smaller ones: both slots must fit the buffer, and
        nothing overlaps while the first bucket is gathered and the last is loaded."""
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
    """An update that failed because of some engines, and can be repeated with the others."""

    ranks: tuple[int, ...]
    text: str


Checksum = int | dict[int, int]
"""Checksum of a tensor that an engine holds; by rank if the ranks of the engine hold different values."""


@dataclass(frozen=True)
class Update:
    """One update of the engines; its first message to each of them."""

    version: int
    deadline: float
    """Seconds for the whole exchange."""
    base_version: int | None = None
    """The version that all engines hold and the update changes some tensors of; None: all tensors are sent."""
    scalings: Mapping[str, float] = field(default_factory=dict)
    """Weights whose adapters are sent separately, and the factor of ``B A`` for each."""
    patience: float | None = None
    """Seconds that an engine may take for one message (a bucket, say); None: no limit but the deadline."""
    link: Any = None
    """The engine's end of the transport (:class:`roll.weight_sync.transports.Link`), in the message to it."""


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


ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes: a cache line, and enough for any dtype and vector load."""

T = TypeVar("T")
NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of a tensor in its bucket; ``offset`` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class WeightBucket:
    """Named tensors in one ``buffer``, uint8 (N,); ``entries`` are in the order of packing."""

    entries: tuple[TensorEntry, ...]
    buffer: torch.Tensor

    @classmethod
    def pack(cls, named_tensors: NamedTensors, device: torch.device | str = "cpu") -> WeightBucket:
        """Copy tensors (any device, dtype and layout) of different names into a new buffer on ``device``.

        Raises:
            ValueError: a name that occurs twice.
        """
        tensors = [(name, tensor.detach()) for name, tensor in named_tensors]
        entries, size = lay_out(tensors)
        # The gaps between tensors are zeroed, so that equal weights make equal buffers.
        bucket = cls(entries, torch.zeros(size, dtype=torch.uint8, device=device))
        for (_, source), target in zip(tensors, bucket.tensors().values(), strict=True):
            target.copy_(source)
        return bucket

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, views of the buffer. Copy what you keep: they pin the buffer."""
        views: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            end = entry.offset + math.prod(entry.shape) * entry.dtype.itemsize
            views[entry.name] = self.buffer[entry.offset : end].view(entry.dtype).view(entry.shape)
        return views


def iter_buckets(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Runs of consecutive tensors whose aligned sizes add up to at most ``bucket_bytes``; a larger tensor is alone.

    Tensors are taken from ``named_tensors`` one at a time, so gathered ones need not all exist at once.
    """
    return in_buckets(named_tensors, bucket_bytes, lambda named: _padded(named[1].nbytes))


def in_buckets(items: Iterable[T], bucket_bytes: int, num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Runs of consecutive items of at most ``bucket_bytes`` together; a larger one is alone."""
    bucket: list[T] = []
    size = 0
    for item in items:
        more = num_bytes(item)
        if bucket and size + more > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += more
    if bucket:
        yield bucket


def lay_out(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[tuple[TensorEntry, ...], int]:
    """The place of each tensor in one buffer, and the bytes of the buffer."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors:
        entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape), offset))
        offset += _padded(tensor.nbytes)
    return tuple(entries), offset


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


INDICES_PART, VALUES_PART = "#indices", "#values"
"""Suffixes of a tensor's name: which elements of it (int32, of the flattened tensor), and their new values."""

_CHUNK = 1 << 18
"""Elements compared at a time: the mask and its indices (0.25 and at most 2 MiB) then stay in the cache."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST_INDEX = 2**31 - 1  # of int32: a larger tensor is always sent whole


class DeltaEncoder:
    """Remembers what was sent, in host memory: a copy of all tensors that go through it."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def encode(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts that turn what was last sent under this name into ``tensor``: none if nothing changed, and
        the tensor itself where that is smaller."""
        flat = flat_view(tensor.detach().cpu())
        held = self._held.get(name)
        if held is None or held.dtype != flat.dtype or held.numel() != flat.numel() or flat.numel() > _LARGEST_INDEX:
            self._held[name] = flat.clone()
            return {name: tensor}
        indices = changed_elements(held, flat)
        if not indices.numel():
            return {}
        if indices.numel() * (indices.itemsize + flat.itemsize) >= flat.nbytes:
            held.copy_(flat)
            return {name: tensor}
        values = flat[indices]
        held[indices] = values
        return {name + INDICES_PART: indices, name + VALUES_PART: values}


def changed_elements(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """int32 indices of the elements whose bits differ; both flat and of one dtype."""
    # Compared as integers: as floats a NaN would differ from itself, and -0.0 would equal 0.0.
    integer = _INTEGERS[before.itemsize]
    first, second = before.view(integer), after.view(integer)
    found = []
    for start in range(0, first.numel(), _CHUNK):
        changed = (first[start : start + _CHUNK] != second[start : start + _CHUNK]).nonzero()[:, 0]
        found.append(changed.to(torch.int32).add_(start))  # nonzero() gives int64: twice the bytes on the wire
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int32)


def apply_delta(held: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Change ``held``, a contiguous tensor, in place.

    Raises:
        ValueError: an index outside the tensor.
    """
    if indices.numel() and int(indices.max()) >= held.numel():
        raise ValueError(f"index {int(indices.max())} in a tensor of {held.numel()} elements")
    held.view(-1)[indices.to(held.device)] = values.to(held.device)


_WORD_BYTES = 8
_CPU_CHUNK_WORDS = 1 << 16  # three 512 KiB buffers: about the second-level cache of one core
_DEVICE_CHUNK_WORDS = 1 << 22  # three 32 MiB buffers: enough to fill an accelerator, little compared with a model
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = 0xBF58476D1CE4E5B9
_MASK = (1 << 64) - 1


ChecksumKind = Literal["xxh3", "words"]


def checksum_kind(device: torch.device) -> ChecksumKind:
    """The kind that is computed on ``device`` itself, without a copy to the host."""
    return "xxh3" if device.type == "cpu" else "words"


def tensor_checksum(tensor: torch.Tensor, kind: ChecksumKind | None = None) -> int:
    """Checksum of dtype, shape and every byte (with its position) of ``tensor``; 0 <= result < 2**64.

    Equal tensors give equal checksums of a kind on every device and however they are laid out in memory; ``-0.0`` and
    ``0.0`` differ, as do NaNs with different bits.  A tensor that is not contiguous is copied.

    Args:
        kind: None: that of the tensor's device. ``xxh3`` of a tensor elsewhere than in host memory copies it there.
    """
    if (kind or checksum_kind(tensor.device)) == "words":
        return _word_checksum(tensor)
    data = flat_view(tensor.detach().cpu()).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(data.data, seed=_seed(tensor))


def _word_checksum(tensor: torch.Tensor) -> int:
    """Extra memory: three chunk buffers (1.5 MiB on CPU, 96 MiB elsewhere)."""
    seed = _seed(tensor)
    data = flat_view(tensor).view(torch.uint8)
    num_words = data.numel() // _WORD_BYTES
    total = _sum_words(data[: num_words * _WORD_BYTES], seed, first_word=0)
    tail = data[num_words * _WORD_BYTES :]
    if tail.numel():  # padded with zeros: unambiguous, since the seed holds the shape
        last_word = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=data.device)
        last_word[: tail.numel()] = tail
        total += _sum_words(last_word, seed, first_word=num_words)
    value = (seed + total) & _MASK
    # The finaliser of SplitMix64: every bit of the sum affects every bit of the checksum.
    value = ((value ^ (value >> 30)) * _MULTIPLIER) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _sum_words(data: torch.Tensor, seed: int, first_word: int) -> int:
    """``sum_i h_i * (h_i >> 32)`` over ``data`` (uint8, a multiple of 8 bytes), i counted from ``first_word``."""
    num_words = data.numel() // _WORD_BYTES
    chunk_words = min(num_words, _CPU_CHUNK_WORDS if data.device.type == "cpu" else _DEVICE_CHUNK_WORDS)
    if not chunk_words:
        return 0
    # A view as int64 needs an aligned start; a slice of a narrower dtype may not have one.
    aligned = data.data_ptr() % _WORD_BYTES == 0 and data.storage_offset() % _WORD_BYTES == 0
    positions = torch.arange(chunk_words, dtype=torch.int64, device=data.device).mul_(_signed(_GOLDEN))
    hashed, upper = torch.empty_like(positions), torch.empty_like(positions)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, num_words, chunk_words):
        count = min(chunk_words, num_words - start)
        chunk = data[start * _WORD_BYTES : (start + count) * _WORD_BYTES]
        words = (chunk if aligned else chunk.clone()).view(torch.int64)
        h, high = hashed[:count], upper[:count]
        torch.bitwise_right_shift(words, 32, out=high)
        torch.add(positions[:count], _signed(((first_word + start) * _GOLDEN + seed) & _MASK), out=h)
        h.add_(words).add_(high).mul_(_signed(_MULTIPLIER))
        torch.bitwise_right_shift(h, 32, out=high)
        total += h.mul_(high).sum()
    return int(total.item())


def _seed(tensor: torch.Tensor) -> int:
    # Not Python's hash(): both ends are processes of their own, and its salt differs between them.
    description = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return int.from_bytes(hashlib.blake2b(description, digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
