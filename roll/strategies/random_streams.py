"""Counter-based random numbers: what a sample draws depends on its seed and position, not on its neighbours.

A stream is a 64-bit key; its t-th number is the t-th output of SplitMix64 started at that key (Steele, Lea, Flood 2014,
"Fast splittable pseudorandom number generators"), which needs no state but t.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def stream_key(seed: int, sample_index: int) -> int:
    """The key of sample ``sample_index`` of a request seeded with ``seed``; 0 <= key < 2**64."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (sample_index + 1) * _GOLDEN) & _MASK)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number ``positions[b]`` of stream ``keys[b]``: float64 (B,), in [0, 1), multiples of 2**-53.

    Args:
        keys: uint64 (B,).
        positions: int64 (B,), from 0.
    """
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
