"""What became of the rows that were read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoadCounts:
    """What became of the rows that were read."""

    read: int
    kept: dict[str, int]
    """By domain."""
    too_long: dict[str, int] = field(default_factory=dict)
    """By domain: rows above the length limit, left out."""
    truncated: dict[str, int] = field(default_factory=dict)
    """By domain: rows above the length limit, cut and kept."""
    filtered: int = 0
    """Left out by ``dataset_filter``."""
    bad: int = 0
    """Left out because they could not be used (``on_bad_row: skip``)."""
    without_truth: dict[str, int] = field(default_factory=dict)
    """By domain: rows that are kept and have no ground truth."""
    answered: dict[str, int] = field(default_factory=dict)
    """By domain: prompts that are kept and end in an assistant's turn."""

    def __str__(self) -> str:
        dropped = sum(self.too_long.values())
        parts = [f"{self.read} rows read, {sum(self.kept.values())} kept, {dropped} too long"]
        others = (("truncated", sum(self.truncated.values())), ("filtered out", self.filtered), ("bad", self.bad))
        parts += [f"{count} {name}" for name, count in others if count]
        return f"{', '.join(parts)}; kept by domain: {self.kept}"
