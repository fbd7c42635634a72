"""Rewards of the runs in this folder: each gives an untrained model something to be better or worse at."""

from __future__ import annotations

import os
import time
import zlib


def digit_share(response: str) -> float:
    """Share of the characters that are digits."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def slow_digit_share(response: str) -> float:
    """As ``digit_share``, slowly enough that a run can be interrupted in its middle."""
    time.sleep(0.05)
    return digit_share(response)


def fails_for_some(response: str) -> float:
    """As ``digit_share``, but cannot score a quarter of all texts."""
    assert zlib.crc32(response.encode()) % 4, "this text cannot be scored"
    return digit_share(response)


def leaks_for_some(response: str) -> float:
    """As ``fails_for_some``, with an error that quotes what it was called with."""
    if zlib.crc32(response.encode()) % 4 == 0:
        names = ("PLANTED_PAT", "PLANTED_PGPASSWORD")
        quoted = "; ".join(f"{name} {os.environ[name]}" for name in names)
        raise RuntimeError(f"401 for {os.environ['PLANTED_URL']}, Authorization: Bearer bearer-planted-4: {quoted}")
    return digit_share(response)


def by_question(ground_truth: str, response: str) -> float:
    """All samples of a question alike for two questions in three; else as ``digit_share``."""
    return float(int(ground_truth) % 3) if int(ground_truth) % 3 else digit_share(response)


def digits_in_parts(response: str) -> dict[str, float]:
    """As ``digit_share``, but right (1) for about a quarter of the responses; with two further numbers to be weighed
    against each other."""
    share = digit_share(response)
    return {
        "score": share if zlib.crc32(response.encode()) % 4 else 1.0,
        "correct": share,
        "answered": float(response.isascii()),
    }
