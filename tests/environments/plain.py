"""An environment that is called in a thread or a process; in a module of its own, which a process imports at once."""

from __future__ import annotations

import os
from typing import Any


class Plain:
    """Says what it is told; ``die`` ends its process."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return str(seed), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "die":
            os._exit(3)
        return action, 1.0, True, False, {}
