"""Warnings about batches that can teach nothing: more often a mistake in the configuration than in the model."""

from __future__ import annotations

import torch
from torch import Tensor

ZERO = 1e-6
"""Advantages up to this are 0 but for rounding."""


class BatchWatch:
    """Looks at every step's samples; speaks once when something has been wrong for ``patience`` steps in a row;
    never with a patience of 0."""

    def __init__(self, patience: int = 3, truncation_limit: float = 0.5) -> None:
        self.patience = patience
        self.truncation_limit = truncation_limit
        self._same_score_steps = 0
        self._truncated_steps = 0
        self._zero_advantage_steps = 0

    def observe(self, scores: Tensor, truncated: Tensor) -> list[str]:
        """Messages to log as warnings, usually none.

        Args:
            scores: float (B,), raw.
            truncated: bool (B,), cut off at the length limit.
        """
        if scores.numel() == 0:
            return []
        messages = []
        same = scores.numel() > 1 and bool((scores == scores[0]).all())
        self._same_score_steps = self._same_score_steps + 1 if same else 0
        if self._same_score_steps == self.patience:
            messages.append(
                f"every response of the last {self.patience} steps got the score {float(scores[0]):g}: nothing can be "
                "learned from that; check the reward rule, the ground truth and the answer format"
            )
        share = float(truncated.float().mean())
        self._truncated_steps = self._truncated_steps + 1 if share > self.truncation_limit else 0
        if self._truncated_steps == self.patience:
            messages.append(
                f"more than {self.truncation_limit:.0%} of the responses of the last {self.patience} steps were cut "
                f"off at the length limit ({share:.0%} in this one); raise response_length, or check the stop tokens"
            )
        return messages

    def observe_advantages(self, advantages: Tensor, mask: Tensor, adv_estimator: str) -> list[str]:
        """The same for what the scores of :meth:`observe` became; silent where equal scores are why.

        Args:
            advantages: float (B, L).
            mask: bool (B, L), tokens that the loss uses.
            adv_estimator: its name, for the message.
        """
        if advantages.numel() == 0:
            return []
        low, high = torch.aminmax(torch.where(mask, advantages, 0.0))
        nothing = max(-float(low), float(high)) <= ZERO
        self._zero_advantage_steps = self._zero_advantage_steps + 1 if nothing else 0
        if self._zero_advantage_steps != self.patience or self._same_score_steps >= self.patience:
            return []
        return [
            f"every advantage of the last {self.patience} steps was 0, so the policy has learned nothing: "
            f"adv_estimator {adv_estimator} found no difference between responses that the loss uses; look at "
            "group/mixed_groups_ratio (prompts all too easy or too hard? groups too small?) and at the masks"
        ]
