"""The algorithm's keys: advantages, policy loss, KL, masks.

Options of estimators and policy losses are in :mod:`roll.config.estimators` and :mod:`roll.config.policy_losses`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll.config.corrections import parse_correction
from roll.config.estimators import ADV_ESTIMATORS, GaeOptions
from roll.config.policy_losses import POLICY_LOSSES, PpoOptions
from roll.config.reading.fields import Choice, rules, setting

# Estimators of the KL, which are those of `roll.algorithms.kl`.
KL_PENALTIES = (
    *("kl", "k1", "k2", "k3", "abs", "mse", "low_var_kl"),
    *("k1+", "kl+", "abs+", "k3+", "low_var_kl+", "full"),
)
LOSS_AGG_MODES = (
    *("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    *("prompt-mean", "token-sum"),
)
NORM_TYPES = ("batch", "group", "running")

ESTIMATOR = rules(
    table=ADV_ESTIMATORS,
    choices=ADV_ESTIMATORS,
    dotted_path=True,
    plugins="estimators",
    aliases=("adv_estimator",),
    example="grpo",
)


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """The algorithm's keys, at the top of an RLVR configuration."""

    pretrain: str = ""
    """Model that the policy and the reference start from: a folder, a GGUF file or a hub name."""
    reward_pretrain: str | None = None
    """Model that the critic starts from; null: ``pretrain``."""
    ppo_epochs: int = setting(1, ge=1)
    """Passes over a rollout batch."""
    shuffle_mini_batches: bool = False
    """Shuffle the samples before every pass; false: mini-batches of consecutive samples, the same in every pass."""
    estimator: Choice = field(default=Choice("gae", GaeOptions()), metadata=ESTIMATOR)
    """Advantage estimator: its name, or a section with ``name`` and the options that it has: ``gae`` (needs a critic),
    ``grpo``, ``reinforce``, ``reinforce++``, ``rloo`` ..."""
    loss: Choice = setting(
        Choice("ppo", PpoOptions()),
        table=POLICY_LOSSES,
        choices=POLICY_LOSSES,
        dotted_path=True,
        plugins="losses",
        aliases=("pg_variant",),
    )
    """Policy loss: its name, or a section with ``name`` and the options that it has."""
    value_clip: float | None = setting(None, gt=0, read_if={"critic": ()})
    """Clip range of the critic's new values around the old ones; null: not clipped."""
    loss_agg_mode: str = setting("seq-mean-token-mean", choices=LOSS_AGG_MODES, dotted_path=True)
    """Aggregation of token losses to one number. Denominators are always those of the whole optimizer step."""
    kl_loss_agg_mode: str | None = setting(
        None, choices=LOSS_AGG_MODES, dotted_path=True, example="token-mean", read_if={"use_kl_loss": (True,)}
    )
    """The same for the KL in the loss; null: ``loss_agg_mode``."""
    entropy_loss_agg_mode: str | None = setting(None, choices=LOSS_AGG_MODES, dotted_path=True, example="token-mean")
    """The same for the entropy bonus; null: ``loss_agg_mode``."""
    value_loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES, dotted_path=True, read_if={"critic": ()})
    """The same for the critic's loss."""
    loss_norm_length: int | None = setting(None, ge=1)
    """Tokens that ``seq-mean-token-sum-norm`` divides by; null: the longest response."""
    rl_loss_coef: float = setting(1.0, ge=0)
    """Weight of the policy loss."""
    entropy_loss_coef: float = setting(0.0, ge=0)
    """Weight of the entropy bonus."""
    log_entropy: bool = True
    """Report the policy's entropy also where no bonus needs it; costs a part of the forward pass."""
    target_entropy: float | None = setting(None, ge=0, example=0.2)
    """Entropy in nats a token below which the bonus acts: its weight begins at ``entropy_loss_coef``, grows by
    0.005 with every step below and falls with every step above, where the bonus is off. null: a fixed weight."""
    use_kl_loss: bool = setting(False, read_if={"kl_loss_coef": ()})
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = setting(0.0, ge=0, read_if={"use_kl_loss": (True,)})
    """Weight of that KL."""
    kl_loss_type: str = setting("k3", choices=KL_PENALTIES, dotted_path=True, read_if={"use_kl_loss": (True,)})
    """Estimator of that KL."""
    kl_loss_clamp: float | None = setting(10.0, gt=0, read_if={"use_kl_loss": (True,), "kl_loss_type": ("k3",)})
    """Bound of the ``k3`` estimate in the loss; null: none."""
    kl_loss_importance_weighted: bool = setting(False, read_if={"use_kl_loss": (True,)})
    """Weigh that estimate by the policy's ratio: unbiased after the first update of a batch."""
    add_token_level_kl: bool = setting(False, read_if={"init_kl_coef": ()})
    """Subtract the KL to the reference policy from the reward, token by token."""
    kl_penalty: str = setting("kl", choices=KL_PENALTIES, dotted_path=True, read_if={"reference": ()})
    """Estimator of the KL in the reward."""
    init_kl_coef: float = setting(0.2, ge=0, read_if={"add_token_level_kl": (True,)})
    """Weight of the KL in the reward (its first value with an adaptive controller). Counts with
    ``add_token_level_kl`` only."""
    target_kl: float | None = setting(None, gt=0, read_if={"add_token_level_kl": (True,)})
    """KL that an adaptive controller aims at; null: the weight stays fixed."""
    kl_horizon: int = setting(10000, ge=1, read_if={"add_token_level_kl": (True,), "target_kl": ()})
    """Samples over which the adaptive controller acts."""
    enable_reference: bool = False
    """Compute reference log-probs for the metrics even when nothing else needs them."""
    reward_clip: float | None = setting(None, gt=0)
    """Response rewards are clipped to plus and minus this; null: not clipped."""
    norm_mean_type: str | None = setting("auto", choices=("auto", *NORM_TYPES), example="group")
    """Mean taken off the response rewards: over the ``batch``, the ``group`` of a prompt, ``running`` over steps, or
    null (none). ``auto``: what the estimator's paper asks for (``grpo``: group; most others: none)."""
    norm_std_type: str | None = setting("auto", choices=("auto", *NORM_TYPES), example="group")
    """Spread that response rewards are divided by: ``batch``, ``group``, ``running`` or null (none; with ``grpo``
    that is Dr. GRPO). ``auto``: what the estimator's paper asks for."""
    overlong_buffer_length: int | None = setting(None, ge=1)
    """DAPO's soft punishment: within so many tokens of the length limit the score falls, linearly, by up to
    ``overlong_penalty_factor``. null: none."""
    overlong_penalty_factor: float = setting(1.0, gt=0, read_if={"overlong_buffer_length": ()})
    """Penalty of a response at the length limit with ``overlong_buffer_length``."""
    whiten_rewards: bool = False
    """Bring token rewards to mean 0 and spread 1 over the batch."""
    whiten_advantages: bool = False
    """Bring advantages to mean 0 and spread 1 over the response tokens of the batch."""
    advantage_clip: float | None = setting(None, gt=0)
    """Advantages are clipped to plus and minus this; null: not clipped."""
    critic_warmup: int = setting(0, ge=0, read_if={"critic": ()})
    """Steps in which only the critic learns."""
    enable_old_logprobs_recompute: bool = False
    """Compute the trainer's log-probs before the update even when nothing needs them."""
    force_disable_old_logprobs_recompute: bool = False
    """Never compute them: the engine's log-probs stand in for them, also with a single update a batch (there, a
    ``train_infer_correction`` compares the current policy with the engine)."""
    train_infer_correction: str | list[Any] | dict[str, Any] | None = setting(
        None, parse=parse_correction, example="tis"
    )
    """Correction for engine probabilities that differ from the trainer's: a preset's name, a list of rules, a section
    with ``is_weight`` and ``filters``, or the dotted path of your own function. null: measured only."""
    top_entropy_quantile: float = setting(1.0, gt=0, le=1, example=0.2)
    """Share of the response tokens, those of highest entropy before the update, that the policy loss uses; 1: all of
    them."""
    max_len_mask: bool = False
    """Leave responses that hit the length limit out of the loss."""
    difficulty_mask: bool = False
    """Leave out samples of prompts whose mean score lies outside the two thresholds."""
    difficulty_low_threshold: float = setting(0.0, ge=0, le=1, read_if={"difficulty_mask": (True,)})
    """Least mean score of a prompt that is kept."""
    difficulty_high_threshold: float = setting(1.0, ge=0, le=1, read_if={"difficulty_mask": (True,)})
    """Greatest mean score of a prompt that is kept."""
    error_max_len_clip: bool = False
    """Leave wrong responses that are longer than the threshold out of the loss."""
    error_max_len_threshold: int = setting(9999999999, ge=0, read_if={"error_max_len_clip": (True,)})
    """Length in tokens for ``error_max_len_clip``."""
    difficulty_loss_weight: bool = False
    """Weigh samples by the difficulty of their prompt."""
    length_loss_weight: bool = False
    """Weigh samples by the length of their response, short ones more."""
