"""The common base of the strategies' option classes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyConfig:
    """Base of the strategies' options."""
