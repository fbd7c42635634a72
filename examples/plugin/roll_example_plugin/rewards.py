"""``worker_cls: right_sum``."""

from __future__ import annotations


def right_sum(response: str, ground_truth: str, wrong_score: float = 0.0) -> dict[str, float]:
    """1 for the right number after ``####``, else ``wrong_score``; and the number of lines, as a metric."""
    right = response.rpartition("####")[2].strip() == ground_truth
    return {"score": 1.0 if right else wrong_score, "lines": float(len(response.splitlines()))}
