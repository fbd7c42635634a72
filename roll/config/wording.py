"""Words of messages and plans."""

from __future__ import annotations


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 row``, ``2,048 rows``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
