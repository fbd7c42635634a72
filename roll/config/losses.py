"""Options of the losses on given rows: preferences, reward models, divergences from a teacher. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from roll.config.reading.fields import Named, Table, setting


@dataclass(frozen=True)
class PreferenceLoss(Named):
    """A preference loss, ``loss_type``."""

    needs_reference: bool = True  # it compares the policy with a reference model
    couples_pairs: bool = False  # the loss of a pair depends on the other pairs of the optimizer step
    is_unpaired: bool = False  # a function of single responses, each with a label


PREFERENCE_LOSSES = Table(
    "loss_type",
    PreferenceLoss("sigmoid", ("dpo",)),
    PreferenceLoss("robust"),
    PreferenceLoss("hinge"),
    PreferenceLoss("ipo"),
    PreferenceLoss("exo_pair", ("exo",)),
    PreferenceLoss("sigmoid_norm"),
    PreferenceLoss("nca_pair", ("nca",)),
    PreferenceLoss("bco_pair", ("bco",)),
    PreferenceLoss("sppo_hard", ("sppo",)),
    PreferenceLoss("apo_zero"),
    PreferenceLoss("apo_down"),
    PreferenceLoss("aot", couples_pairs=True),
    PreferenceLoss("aot_unpaired", ("aot_pair",), couples_pairs=True),
    PreferenceLoss("simpo", needs_reference=False),
    PreferenceLoss("orpo", needs_reference=False),
    PreferenceLoss("sft", needs_reference=False),
    PreferenceLoss("kto", is_unpaired=True),
    PreferenceLoss("apo_zero_unpaired", is_unpaired=True),
)


# `read_if` of a key of losses of single responses.
UNPAIRED = {"loss_type": PREFERENCE_LOSSES.where(lambda row: row.is_unpaired)}


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig:
    """Keys at the top of a DPO configuration that say what is minimised."""

    loss_type: str | list[str] = setting(
        "sigmoid",
        choices=PREFERENCE_LOSSES,
        example="sigmoid",
        aliases=("ipo",),
        # ROLL's files have `ipo: true` and `ipo: false`.
        parse=lambda value: {True: "ipo", False: "sigmoid"}[value] if isinstance(value, bool) else value,
    )
    """Preference loss, or a list of losses to add: ``sigmoid`` (DPO), ``ipo`` (ROLL writes ``ipo: true``), ``hinge``,
    ``simpo``, ``orpo`` ..."""
    loss_weights: list[float] | None = None
    """Weight of each loss of a list, such as [0.8, 0.2, 1.0] for MPO's [sigmoid, bco_pair, sft]; null: 1 each."""
    beta: float = setting(0.1, gt=0)
    """Strength of the tie to the reference: a log-ratio counts this much."""
    label_smoothing: float = setting(0.0, ge=0, lt=0.5)
    """Assumed share of pairs with the labels swapped: cDPO under ``sigmoid``, an unbiased loss under ``robust``."""
    simpo_gamma: float = setting(0.5, ge=0)
    """``simpo``: the margin by which the chosen response must lead, in units of the reward (``beta`` included)."""
    desirable_weight: float = setting(1.0, ge=0, read_if=UNPAIRED)
    """Weight of responses whose label is true."""
    undesirable_weight: float = setting(1.0, ge=0, read_if=UNPAIRED)
    """Weight of the others; KTO wants (weight x number) of both kinds within a factor of 4/3."""


def loss_names(config: PreferenceLossConfig) -> tuple[str, ...]:
    """The losses that are added, under their own names."""
    written = config.loss_type if isinstance(config.loss_type, list) else [config.loss_type]
    return tuple(PREFERENCE_LOSSES[name].name if name in PREFERENCE_LOSSES else name for name in written)


def loss_rows(config: PreferenceLossConfig) -> tuple[PreferenceLoss, ...]:
    return tuple(PREFERENCE_LOSSES[name] for name in loss_names(config))


def weighted_losses(config: PreferenceLossConfig) -> tuple[tuple[str, float], ...]:
    """Name and weight of every term."""
    names = loss_names(config)
    return tuple(zip(names, config.loss_weights or [1.0] * len(names), strict=True))


def needs_reference(config: PreferenceLossConfig) -> bool:
    return any(row.needs_reference for row in loss_rows(config))


def is_unpaired(config: PreferenceLossConfig) -> bool:
    return any(row.is_unpaired for row in loss_rows(config))


def needs_mismatched(config: PreferenceLossConfig) -> bool:
    """The loss compares with the KL divergence from the reference, estimated on mismatched prompts and responses."""
    return "kto" in loss_names(config)


def preference_problems(config: PreferenceLossConfig) -> list[tuple[str, Any, str]]:
    """Key, value and rule of every combination that cannot be."""
    rows, found = loss_rows(config), list[tuple[str, Any, str]]()
    weights = config.loss_weights
    if weights is not None and len(weights) != len(rows):
        found.append(("loss_weights", weights, f"has {len(weights)} entries for {len(rows)} losses of loss_type"))
    if any(row.is_unpaired for row in rows) and len(rows) > 1:
        rule = f"{rows[0].name} is a loss of single responses and cannot be combined"
        found.append(("loss_type", config.loss_type, rule))
    if "exo_pair" in loss_names(config) and not config.label_smoothing:
        rule = "exo_pair takes the logarithm of it: give it a small value such as 0.001"
        found.append(("label_smoothing", config.label_smoothing, rule))
    return found


RewardLoss = Literal["bradley_terry", "regression", "process"]
# Kinds of rows, by loss (`roll.datasets.preferences`).
JUDGEMENTS: dict[str, Literal["ranking", "points", "steps"]] = {
    "bradley_terry": "ranking",
    "regression": "points",
    "process": "steps",
}
RANKS = ("bradley_terry",)
SCORE_INPUT = "score_input"  # entry of an exported model's `config.json`: the tokens that it was trained to score
ScoreInput = Literal["chat", "tokens"]
SCORE_INPUT_DEFAULT: ScoreInput = "chat"
SCORE_MEAN, SCORE_STD = "score_mean", "score_std"  # entries of the same: mean and standard deviation of its scores


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """Keys at the top of an ``rm`` configuration that say what is minimised."""

    loss_type: RewardLoss = "bradley_terry"
    """``bradley_terry``: of two responses the better one is to score higher; ``regression``: squared distance to a
    number; ``process``: likelihood of each step's label."""
    label_smoothing: float = setting(0.0, ge=0, lt=0.5, read_if={"loss_type": RANKS})
    """Assumed share of pairs with the labels swapped."""
    center_rewards_coefficient: float = setting(0.0, ge=0, read_if={"loss_type": RANKS})
    """Weight of ``(r_w + r_l)^2``, which keeps scores around zero (0.01 is usual); 0: none."""


KDObjective = Literal[
    "forward_kl",
    "reverse_kl",
    "adaptive_kl",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "js_divergence",
    "total_variation",
]

KD_OBJECTIVES: tuple[str, ...] = get_args(KDObjective)


TopkTail = Literal["bucket", "renormalised", "ignored"]
TOPK_TAILS: tuple[str, ...] = get_args(TopkTail)


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig:
    """Options of a divergence between a teacher p and a student q."""

    kd_objective: KDObjective = "forward_kl"
    """Divergence: ``forward_kl`` KL(p||q), ``reverse_kl`` KL(q||p), ``adaptive_kl``, ``skewed_forward_kl``,
    ``skewed_reverse_kl``, ``js_divergence`` (generalised by ``js_beta``) or ``total_variation``."""
    logits_topk: int = setting(64, ge=0)
    """Tokens of the teacher's distribution that are compared, the most probable ones; 0: the whole vocabulary."""
    topk_tail: TopkTail = "bucket"
    """The rest of the vocabulary: ``bucket`` compares its mass as one further token; ``renormalised`` ignores it on
    both sides, as ROLL does; ``ignored`` leaves it out of the sum, which is at least 0, as verl does."""
    log_prob_floor: float | None = setting(None, lt=0)
    """Log-probs of both sides that are compared are this at least; null: as they are."""
    divergence_clamp: float | None = setting(None, gt=0)
    """The divergence of a token is held within +- this bound; null: as it is."""
    kd_temperature: float = setting(1.0, gt=0)
    """Divides the logits of both sides before they are compared; its square multiplies the divergence, which keeps the
    size of its gradient."""
    teacher_temperature: float = setting(1.0, gt=0)
    """Divides the teacher's logits in addition to ``kd_temperature``."""
    adaptive_kl_alpha: float = setting(0.5, ge=0, le=1, read_if={"kd_objective": ("adaptive_kl",)})
    """``adaptive_kl``: the least probable tokens with this much of the teacher's mass are the tail."""
    skew_lambda: float = setting(0.1, ge=0, le=1, read_if={"kd_objective": ("skewed_forward_kl", "skewed_reverse_kl")})
    """Skewed divergences: weight of the first distribution in the mixture that it is compared with."""
    js_beta: float = setting(0.5, gt=0, lt=1, read_if={"kd_objective": ("js_divergence",)})
    """``js_divergence``: weight of the teacher in the mixture (GKD's beta). For b near 0 it is b times the forward KL,
    near 1 it is 1 - b times the reverse KL."""
