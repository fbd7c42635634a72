"""Numbers from outside (rewards of functions, services and environments) that a batch can hold."""

from __future__ import annotations

FLOAT32_MAX = 3.4028234663852886e38


def finite_number(value: object) -> float | None:
    """The value as a float; None where it is no number, NaN, infinite, or infinite in float32, the type of rewards in a
    batch."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= FLOAT32_MAX else None
