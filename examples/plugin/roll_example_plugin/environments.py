"""``env_type: parity``."""

from __future__ import annotations

from random import Random
from typing import Any


class Parity:
    """Say of three numbers, one after another, whether they are even or odd."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.random, self.left = Random(seed), 3
        return self.ask(), {}

    def ask(self) -> str:
        self.number = self.random.randrange(100)
        return f"{self.number}: even or odd?"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action.strip() == ("odd" if self.number % 2 else "even")
        self.left -= 1
        return "" if not self.left else self.ask(), float(right), not self.left, False, {"success": right}
