"""Environments of the runs in this folder."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass
class Letters:
    """Two turns; each is worth the share of its characters that are vowels."""

    instant: ClassVar[bool] = True
    turns: int = 2
    slow: float = 0.0
    """Seconds of a step."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.step_number = 0
        return "say", {"state": f"{seed}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.slow)
        self.step_number += 1
        share = sum(letter in "aeiou" for letter in action.lower()) / max(1, len(action))
        done = self.step_number >= self.turns
        return "more", share, done, False, {"success": share > 0.5, "metrics": {"vowels": share}}


class Signs(Letters):
    """Shows a sign of another colour in each turn, drawn from the seed."""

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self.colours = np.random.default_rng(seed).integers(0, 256, (self.turns + 1, 3))
        _, info = super().reset(seed)
        return ["say", self._sign()], info

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return [self._sign()], *rest

    def _sign(self) -> np.ndarray:
        return np.broadcast_to(self.colours[self.step_number], (48, 48, 3)).astype(np.uint8)


class Faulty(Letters):
    """By its seed: raises in ``reset`` or ``step``, hangs, is slow, ends its process, or does nothing of the kind.

    What fails fails again when it is tried again.
    """

    instant: ClassVar[bool] = False
    KINDS: ClassVar[int] = 6

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.kind = seed % self.KINDS
        if self.kind == 0:
            raise RuntimeError("no server")
        return super().reset(seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.kind == 1:
            raise OSError("connection lost")
        if self.kind == 2:
            time.sleep(3600)
        if self.kind == 3:
            os._exit(9)
        if self.kind == 4:
            time.sleep(0.3)
        return super().step(action)
