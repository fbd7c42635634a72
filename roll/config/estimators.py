"""Advantage estimators by name, each with its traits and the dataclass of its options. Torch-free.

``estimator: {name: gae, lambd: 0.95}``. A new estimator is a row of :data:`ADV_ESTIMATORS`, a dataclass of its options
and a function in :mod:`roll.algorithms.advantages`, which is given the dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.config.policy_losses import NoOptions
from roll.config.reading.fields import Choice, Named, Table, setting


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
