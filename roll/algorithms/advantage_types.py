"""What an advantage estimator is, and the registry of them.

An estimator is a function ``(inputs: AdvantageInputs, options: AdvantageOptions) -> (advantages, returns)``, both
float (B, L) and 0 outside the mask.  It works on token-level rewards (the normalised response reward on the last token,
minus the divergence where it is part of the reward).  Normalisation stands before it (:class:`RewardPostprocessor`);
:func:`resolve_norm_types` gives the pair that an estimator's paper asks for.  Groups are found by id, not by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.masked import Groups
from roll.algorithms.registry import Registry
from roll.algorithms.reward_processing import NormType, token_level_rewards
from roll.protocol.metrics import Metrics


@dataclass(frozen=True)
class AdvantageOptions:
    """Options of all estimators; each reads its own."""

    adv_estimator: str = "gae"
    """Name in the registry, or the dotted path of a function."""
    gamma: float = 1.0
    """Discount per token."""
    lambd: float = 0.95
    """lambda of GAE."""
    whiten_rewards: bool = False
    """Bring token-level rewards to zero mean and unit variance over the batch's tokens first."""
    whiten_advantages: bool = False
    """The same for advantages afterwards. reinforce++ and its baseline form always do."""
    advantage_clip: float | None = None
    """Advantages stay within +- this bound, after whitening."""
    pass_k: int = 4
    """k of ``pass@k``; below the size of the groups."""
    reward_weights: tuple[float, ...] | None = None
    """``gdpo``: weight of each reward; null: 1 each."""
    adv_estimator_args: Mapping[str, Any] = field(default_factory=dict)
    """Options of an estimator of one's own."""
    episode_reward_weight: float = 1.0
    """``gigpo``: weight of the advantage of the whole episode within its group."""
    step_reward_weight: float = 1.0
    """``gigpo``: weight of the advantage of a step among those taken from the same state."""


@dataclass(frozen=True)
class AdvantageInputs:
    """What estimators may use. Rows are responses (in multi-turn work by steps: one step each)."""

    rewards: Tensor
    """float (B, L), token-level rewards, 0 outside the mask; or (B,), due at each response's last token."""
    mask: Tensor
    """bool (B, L), the response mask."""
    group_ids: Tensor
    """int64 (B,): rows with the same id answer the same prompt."""
    values: Tensor | None = None
    """float (B, L), the critic's (gae)."""
    baseline_rewards: Tensor | None = None
    """float (B,), reward of the greedy response to the same prompt (remax)."""
    scores: Tensor | None = None
    """float (B,), raw, before shaping, normalisation and divergence; 1 or more is right (pass@k)."""
    reward_components: Tensor | None = None
    """float (B, K), the rewards apart (gdpo)."""
    old_log_probs: Tensor | None = None
    """float (B, L), the trainer's before the update (optimal_token_baseline)."""
    old_sum_of_squares: Tensor | None = None
    """float (B, L), of all probabilities of the trainer's distribution that each token was drawn from
    (optimal_token_baseline)."""
    step_returns: Tensor | None = None
    """float (B,), discounted return of the episode from this step on (gigpo, step_reinforce)."""
    state_ids: Tensor | None = None
    """int64 (B,): steps with the same id were taken from the same state of the same task (gigpo)."""
    trajectory_ids: Tensor | None = None
    """int64 (B,): steps with the same id belong to one episode (gigpo)."""

    @cached_property
    def token_level_rewards(self) -> Tensor:
        """float (B, L), 0 outside the mask."""
        return self.rewards if self.rewards.dim() == 2 else token_level_rewards(self.rewards, self.mask)

    @cached_property
    def response_rewards(self) -> Tensor:
        """float64 (B,): the sum of each row's token-level rewards; 0 where the row has no token."""
        if self.rewards.dim() == 2:
            return torch.where(self.mask, self.rewards, 0.0).sum(-1, dtype=torch.float64)
        return torch.where(self.mask.any(-1), self.rewards.double(), 0.0)

    @cached_property
    def groups(self) -> Groups:
        return Groups.of(self.group_ids)

    def spread(self, per_row: Tensor) -> Tensor:
        """Give every masked token its row's number, which must be finite: (B,) -> float32 (B, L)."""
        # A product in place takes half the time of torch.where, and bytes become floats in half the time of booleans.
        return self.mask.view(torch.uint8).float().mul_(per_row.float().unsqueeze(-1))

    def require(self, name: str, estimator: str) -> Tensor:
        """The optional input ``name``; raises ``ValueError`` when it is missing."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"adv_estimator {estimator!r} needs {name}, which this batch does not have")
        return value


@dataclass(frozen=True)
class AdvantageOutputs:
    """float32 (B, L) each, 0 outside the mask. Tensors may be shared between fields: do not write into them."""

    advantages: Tensor
    returns: Tensor
    raw_advantages: Tensor
    """Before whitening and clipping."""
    metrics: Metrics


Estimator = Callable[[AdvantageInputs, AdvantageOptions], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Traits:
    """What an estimator brings along besides its function; see :func:`register_advantage`."""

    norm: tuple[NormType, NormType] = (None, None)
    whitens: bool = False
    needs_values: bool = False


advantage_estimators: Registry[Estimator] = Registry("adv_estimator")
_traits: dict[Estimator, Traits] = {}


def register_advantage(
    name: str,
    *,
    aliases: tuple[str, ...] = (),
    norm: tuple[NormType, NormType] = (None, None),
    whitens: bool = False,
    needs_values: bool = False,
) -> Callable[[Estimator], Estimator]:
    """Decorator: make an estimator selectable as ``adv_estimator: name``.

    Args:
        name, aliases: how the YAML spells it.
        norm: (norm_mean_type, norm_std_type) of the rewards where the YAML leaves them open.
        whitens: whitening of the advantages is part of the estimator.
        needs_values: it needs a critic.
    """

    def decorate(function: Estimator) -> Estimator:
        advantage_estimators.add(function, name, aliases)
        _traits[function] = Traits(norm, whitens, needs_values)
        return function

    return decorate


def traits_of(adv_estimator: str) -> Traits:
    """Traits by name; a plain function found by dotted path has none."""
    return _traits.get(advantage_estimators.resolve(adv_estimator), Traits())


def resolve_norm_types(
    adv_estimator: str, norm_mean_type: str | None = "auto", norm_std_type: str | None = "auto"
) -> tuple[NormType, NormType]:
    """The reward normalisation to use: what the user chose, and the estimator's own pair where it says ``auto``.

    An explicit choice, null included, is never overridden: ``grpo`` with a null std type is Dr. GRPO.
    """
    own_mean, own_std = traits_of(adv_estimator).norm
    mean = own_mean if norm_mean_type == "auto" else norm_mean_type
    std = own_std if norm_std_type == "auto" else norm_std_type
    return mean, std  # type: ignore[return-value]


def needs_values(adv_estimator: str) -> bool:
    """True where the estimator needs a critic."""
    return traits_of(adv_estimator).needs_values
