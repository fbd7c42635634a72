"""Keys of a reward model's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.config.reading.fields import setting

RewardLoss = Literal["bradley_terry", "regression", "ordinal", "process"]
JUDGEMENTS: dict[str, Literal["ranking", "points", "steps"]] = {
    "bradley_terry": "ranking",
    "regression": "points",
    "ordinal": "points",
    "process": "steps",
}
"""What a row must say of its responses, by loss (:mod:`roll.datasets.preferences`)."""
RANKS = ("bradley_terry",)
SCORE_INPUT = "score_input"
"""Entry of an exported model's ``config.json``: the tokens that it was trained to score."""
SCORE_MEAN, SCORE_STD = "score_mean", "score_std"
"""Entries of the same: mean and standard deviation of its scores."""


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """Keys at the top of an ``rm`` configuration that say what is minimised."""

    loss_type: RewardLoss = "bradley_terry"
    """``bradley_terry``: of two responses the better one is to score higher; ``regression``: squared distance to a
    number; ``ordinal``: likelihood of a grade 0, 1 ...; ``process``: likelihood of each step's label."""
    label_smoothing: float = setting(0.0, ge=0, lt=0.5, read_if={"loss_type": RANKS})
    """Assumed share of pairs with the labels swapped."""
    margin_scale: float = setting(1.0, ge=0, read_if={"loss_type": RANKS})
    """Factor of the margin by which a better response must lead: ``margin_key``, or the difference of scores."""
    margin_from_scores: bool = setting(False, read_if={"loss_type": RANKS})
    """The margin of two responses is the difference of what ``scores_key`` says of them."""
    center_rewards_coefficient: float = setting(0.0, ge=0, read_if={"loss_type": RANKS})
    """Weight of ``(r_w + r_l)^2``, which keeps scores around zero (0.01 is usual); 0: none."""
    ordinal_levels: int = setting(5, ge=2, read_if={"loss_type": ("ordinal",)})
    """Number of grades, which count from 0."""
    ordinal_spacing: float = setting(4.0, gt=0, read_if={"loss_type": ("ordinal",)})
    """Distance in scores from one grade to the next: the larger, the surer a grade can be."""


def reward_loss_problems(config: RewardLossConfig, margin_key: str | None) -> list[tuple[str, Any, str]]:
    """Key, value and rule of every combination that cannot be."""
    found: list[tuple[str, Any, str]] = []
    if config.margin_from_scores and margin_key is not None:
        rule = "is one source of margins, margin_from_scores: true another; leave one out"
        found.append(("margin_key", margin_key, rule))
    return found
