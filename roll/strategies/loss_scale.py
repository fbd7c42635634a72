"""A scale for losses that are computed in fp16, which has no room for small gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INITIAL_SCALE = 2.0**16


@dataclass
class DynamicLossScale:
    """The largest power of two by which a loss can be multiplied without its gradients leaving fp16's range.

    Gradients below 6e-8 are 0 in fp16.  So the loss is multiplied by ``value``, and the gradients divided by it in
    float32.  A gradient that is not finite halves the scale and its update is left out; ``growth_interval`` good
    updates in a row double it (Micikevicius et al., 2018, Mixed Precision Training, arXiv:1710.03740, section 3.2).

    Every rank sees the same gradient norm, so all keep the same scale without speaking about it.
    """

    value: float = INITIAL_SCALE
    growth_interval: int = 2000
    good_updates: int = 0

    def adapt(self, finite: bool) -> None:
        """After an update: ``finite`` if it was made."""
        if not finite:
            # Below 1 nothing is gained: the loss itself is too large.
            self.value, self.good_updates = max(1.0, self.value / 2), 0
            return
        self.good_updates += 1
        if self.good_updates == self.growth_interval:
            self.value, self.good_updates = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"value": self.value, "good_updates": self.good_updates}

    def restore(self, state: dict[str, Any]) -> None:
        self.value, self.good_updates = float(state["value"]), int(state["good_updates"])
