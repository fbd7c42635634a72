"""A checksum of a tensor's bytes that both ends of a weight transfer can compute where the tensor lies.

Two kinds. In host memory XXH3 (64 bits, seeded with a hash of dtype and shape), which reads memory about as fast as it
can be copied.  XXH3 is a chain of blocks, though, so on an accelerator ``words`` is computed instead, which is a sum:
the tensor is read as signed 64-bit words ``w_i``, each is made a pseudo-random number that depends on its value and
its position, and the numbers are added (all arithmetic modulo 2**64, shifts keep the sign):

    h_i = (w_i + (w_i >> 32) + k_i) * M,   k_i = i * G + S
    checksum = mix(S + sum_i h_i * (h_i >> 32))

S is the hash of dtype and shape; G and M are the odd multipliers of SplitMix64.  Integer addition is exact and
commutative, so the value does not depend on device, thread count or chunk size.  The first fold brings sign and
exponent bits down to where the multiplication spreads them; the product makes the sum non-linear, so that changes do
not cancel (a plain weighted sum does not see two words with opposite sign bits change places).  Both kinds guard
against mistakes, not against an adversary.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
import xxhash

from roll.protocol.columns import flat_view

_WORD_BYTES = 8
_CPU_CHUNK_WORDS = 1 << 16  # three 512 KiB buffers: about the second-level cache of one core
_DEVICE_CHUNK_WORDS = 1 << 22  # three 32 MiB buffers: enough to fill an accelerator, little beside a model
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = 0xBF58476D1CE4E5B9
_MASK = (1 << 64) - 1


ChecksumKind = Literal["xxh3", "words"]


def checksum_kind(device: torch.device) -> ChecksumKind:
    """The kind that is computed where ``device``'s tensors lie."""
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
    if tail.numel():
        last_word = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=data.device)
        last_word[: tail.numel()] = tail
        total += _sum_words(last_word, seed, first_word=num_words)
    return _mix((seed + total) & _MASK)


def _sum_words(data: torch.Tensor, seed: int, first_word: int) -> int:
    """``sum_i h_i * (h_i >> 32)`` over ``data`` (uint8, a multiple of 8 bytes); ``first_word`` is the first i."""
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
    description = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return int.from_bytes(hashlib.blake2b(description, digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MULTIPLIER) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no wrapping uint64 arithmetic on every device."""
    return value - (1 << 64) if value >> 63 else value
