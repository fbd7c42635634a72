"""Policy losses and advantage estimators by name, each with the dataclass of its options, and the traits of estimators:
``loss: {name: vespo, k_pos: 2}``, ``estimator: {name: gae, lambd: 0.95}``. Torch-free.

A new one is a row of :data:`POLICY_LOSSES` or :data:`ADV_ESTIMATORS`, a dataclass of its options, and a function in
:mod:`roll.algorithms.policy_losses` or :mod:`roll.algorithms.advantages`, which is given the dataclass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from roll.config.reading.fields import Choice, Named, Table, setting


@dataclass(frozen=True)
class NoOptions:
    """Options of a loss or an estimator that has none."""


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """PPO's clip range."""

    clip: float = setting(0.2, ge=0)
    """Clip range of the probability ratio, on both sides."""
    clip_low: float | None = setting(None, ge=0, le=1)
    """Ratios are clipped at 1 - this from below; null: ``clip``."""
    clip_high: float | None = setting(None, ge=0)
    """Ratios are clipped at 1 + this from above; null: ``clip``."""


@dataclass(frozen=True, kw_only=True)
class DualClipOptions(ClipOptions):
    """PPO's clip range, with a bound for negative advantages."""

    dual_clip: bool | float = setting(False, gt=1)
    """Bound of the ratio for negative advantages (3.0 in the paper); true: 1 + 2 x ``clip``; false: none."""


@dataclass(frozen=True, kw_only=True)
class PpoOptions(DualClipOptions):
    importance_sampling: Literal["token", "segment", "seq"] = "token"
    """Level of the probability ratio: of each token, each turn (``segment``) or each response (``seq``, as in GSPO)."""


@dataclass(frozen=True, kw_only=True)
class TisOptions:
    lower_bound: float = setting(0.0, ge=0)
    """Least weight."""
    upper_bound: float = setting(1.0, gt=0)
    """Greatest weight."""


@dataclass(frozen=True, kw_only=True)
class CispoOptions:
    epsilon_low: float = setting(0.1, ge=0)
    """Weights are clipped at 1 - this from below."""
    epsilon_high: float = setting(0.1, ge=0)
    """Weights are clipped at 1 + this from above."""
    unified_mask: bool = setting(False, aliases=("use_unified_mask",))
    """Drop the tokens that PPO's clip would drop, too."""


@dataclass(frozen=True, kw_only=True)
class M2poOptions:
    threshold: float = setting(0.04, gt=0)
    """Greatest mean squared log-ratio of the tokens that stay; those of the largest are dropped."""


@dataclass(frozen=True, kw_only=True)
class VespoOptions:
    k_pos: float = setting(2.0, ge=0)
    """Exponent of weights: how fast those below 1 fall, for positive advantages."""
    lambda_pos: float = setting(3.0, ge=0)
    """Rate at which weights above 1 fall, for positive advantages."""
    k_neg: float = setting(3.0, ge=0)
    """Exponent of weights: how fast those below 1 fall, for negative advantages."""
    lambda_neg: float = setting(2.0, ge=0)
    """Rate at which weights above 1 fall, for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class ToprOptions:
    positive_weight: float = setting(1.0, ge=0)
    """Weight of samples with positive reward."""
    negative_weight: float = setting(1.0, ge=0)
    """Weight of samples with negative reward."""
    lower_bound: float = setting(0.0, ge=0)
    """Least importance weight of negative samples."""
    upper_bound: float = setting(1.0, gt=0)
    """Greatest importance weight of negative samples."""


@dataclass(frozen=True, kw_only=True)
class Kimi15Options:
    tau: float = setting(0.1, ge=0)
    """Weight of the squared log-ratio."""


@dataclass(frozen=True, kw_only=True)
class SapoOptions:
    tau_pos: float = setting(1.0, gt=0)
    """Temperature of the gate for positive advantages."""
    tau_neg: float = setting(1.05, gt=0)
    """Temperature of the gate for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class GmpoOptions:
    clip_low: float = setting(0.4, ge=0)
    """A token's ratio is at least exp(-this)."""
    clip_high: float = setting(0.4, ge=0)
    """A token's ratio is at most exp(this)."""


@dataclass(frozen=True, kw_only=True)
class DroOptions:
    tau: float = setting(0.1, gt=0)
    """Strength of the regularisation."""


@dataclass(frozen=True, kw_only=True)
class DppoOptions:
    divergence: Literal["tv", "kl"] = "tv"
    """Total variation or KL of the sampled token's probability."""
    threshold: float = setting(0.15, gt=0)
    """Tokens beyond it lose their gradient where the update would lead further away."""
    ratio_bound: float = setting(20.0, gt=0)
    """The weight is truncated here."""


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions(PpoOptions):
    ratio: float = setting(2e-4, ge=0, le=1)
    """Share of tokens that lose their gradient."""
    low: float = 1.0
    """Least covariance of these tokens."""
    high: float = 5.0
    """Greatest covariance of these tokens."""


@dataclass(frozen=True, kw_only=True)
class KlCovOptions:
    ratio: float = setting(2e-3, ge=0, le=1)
    """Share of tokens that get the KL penalty."""
    coef: float = setting(1.0, ge=0)
    """Weight of that penalty."""


@dataclass(frozen=True)
class PolicyLoss(Named):
    """A policy loss, ``loss``."""

    options: type | None = None  # dataclass of its options; None for a user's own loss, whose function declares them


POLICY_LOSSES = Table(
    "loss",
    PolicyLoss("ppo", options=PpoOptions),
    PolicyLoss("vanilla", options=NoOptions),
    PolicyLoss("gspo", options=DualClipOptions),
    PolicyLoss("gspo_token", ("gspo-token",), options=DualClipOptions),
    PolicyLoss("tis", options=TisOptions),
    PolicyLoss("cispo", options=CispoOptions),
    PolicyLoss("m2po", options=M2poOptions),
    PolicyLoss("vespo", options=VespoOptions),
    PolicyLoss("topr", options=ToprOptions),
    PolicyLoss("raft++", ("raft_plus_plus", "raftpp"), options=ClipOptions),
    PolicyLoss("kimi15", options=Kimi15Options),
    PolicyLoss("sapo", options=SapoOptions),
    PolicyLoss("gmpo", options=GmpoOptions),
    PolicyLoss("dro", options=DroOptions),
    PolicyLoss("dppo", options=DppoOptions),
    PolicyLoss("clip_cov", ("clip-cov",), options=ClipCovOptions),
    PolicyLoss("kl_cov", ("kl-cov",), options=KlCovOptions),
)


@dataclass(frozen=True, kw_only=True)
class DiscountOptions:
    """Options of estimators that discount."""

    gamma: float = setting(1.0, ge=0, le=1)
    """Discount of later rewards."""


@dataclass(frozen=True, kw_only=True)
class GaeOptions(DiscountOptions):
    """Options of ``gae``, token by token or turn by turn."""

    lambd: float = setting(0.95, ge=0, le=1)
    """GAE's lambda."""


@dataclass(frozen=True, kw_only=True)
class PassAtKOptions:
    k: int = setting(4, ge=1)
    """The k, less than ``num_return_sequences_in_group``. Right is a raw score of 1 or more."""


@dataclass(frozen=True, kw_only=True)
class GdpoOptions:
    weights: dict[str, float] = field(default_factory=dict)
    """The rewards to normalise separately, with their weights: names of further numbers that the reward returns
    (``reward/<domain>/<name>`` in the log), or ``score`` for the score itself."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of estimators that compare turns by their returns."""

    step_gamma: float = setting(0.95, ge=0, le=1)
    """Discount per step in the return from a step on."""


@dataclass(frozen=True, kw_only=True)
class GigpoOptions(StepOptions):
    episode_weight: float = setting(1.0, ge=0)
    """Weight of the advantage of the episode within its group."""
    step_weight: float = setting(1.0, ge=0)
    """Weight of the advantage of a step among those taken from the same state."""


@dataclass(frozen=True)
class Estimator(Named):
    """An advantage estimator, ``estimator``."""

    options: type | None = None  # dataclass of its options; None for a user's own, whose function declares them
    # `norm_mean_type` and `norm_std_type` of the rewards where the file leaves them open.
    norm: tuple[str | None, str | None] = (None, None)
    whitens: bool = False  # whitening of the advantages is part of it
    needs_values: bool = False  # it needs a critic
    leaves_one_out: bool = False  # it compares the samples of a prompt with one another and so needs two
    needs_squares: bool = False  # it reads the sum of squared probabilities before every token
    needs_greedy: bool = False  # it compares every sample with the greedy response to its prompt
    # In work of several turns its rewards stand on the turns that earned them; else each trajectory has one.
    rewards_turns: bool = False
    works_in_turns: bool = False  # it looks at the turns of an episode, which only the agentic pipeline has
    # The rewards' normalisation is that of the discounted returns of all turns, not of whole trajectories.
    normalises_steps: bool = False


ADV_ESTIMATORS = Table(
    "estimator",
    Estimator("gae", options=GaeOptions, needs_values=True, rewards_turns=True),
    Estimator("grpo", options=DiscountOptions, norm=("group", "group")),
    Estimator("reinforce", options=DiscountOptions, rewards_turns=True),
    Estimator("reinforce++", ("reinforce_plus_plus",), DiscountOptions, whitens=True, rewards_turns=True),
    Estimator(
        "reinforce++_baseline", ("reinforce_plus_plus_baseline",), DiscountOptions, norm=("group", None), whitens=True
    ),
    Estimator("rloo", ("loop",), NoOptions, leaves_one_out=True),
    Estimator("opo", options=NoOptions),
    Estimator("optimal_token_baseline", ("tir_optimal_token_baseline",), NoOptions, needs_squares=True),
    Estimator("gpg", options=NoOptions),
    Estimator("maxrl", options=NoOptions, leaves_one_out=True),
    Estimator("pass@k", ("pass_at_k",), PassAtKOptions),
    Estimator("remax", options=NoOptions, needs_greedy=True),
    Estimator("gdpo", options=GdpoOptions),
    Estimator("turn_gae", options=GaeOptions, needs_values=True, rewards_turns=True, works_in_turns=True),
    Estimator("gigpo", options=GigpoOptions, norm=("group", "group"), works_in_turns=True),
    Estimator("step_reinforce", options=StepOptions, works_in_turns=True, normalises_steps=True),
    Estimator("agentic_reinforce", options=DiscountOptions, rewards_turns=True, works_in_turns=True),
)


def traits(choice: Choice) -> Estimator:
    """Traits of an estimator; a function found by its dotted path has no special needs."""
    return ADV_ESTIMATORS.get(choice.name) or Estimator(choice.name)


def option_tables(table: Table[Any]) -> Iterator[tuple[str, type, tuple[type, ...]]]:
    """Tables of the options of each row of a choice; rows with the same options have one."""
    names: dict[type, list[str]] = {}
    for row in table.rows:
        if row.options is not None and fields(row.options):
            names.setdefault(row.options, []).append(row.name)
    for cls, rows in names.items():
        bases = tuple(base for base in cls.__mro__[1:] if base in names)
        also = f" (in addition to the options of `{names[bases[0]][0]}`)" if bases else ""
        yield f"`{table.key}: {{name: {' or '.join(rows)}}}`{also}", cls, bases
