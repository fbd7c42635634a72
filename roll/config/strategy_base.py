"""The common base of the strategies' option classes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyConfig:
    """Base of the strategies' options."""

    @property
    def devices_per_worker(self) -> int:
        """Devices that one worker of the role computes on by itself."""
        return 1
