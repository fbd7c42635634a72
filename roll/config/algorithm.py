"""The algorithm's keys: advantages, policy loss, KL, clipping; and the table of estimators.

Policy losses and the options of each are in :mod:`roll.config.policy_losses`. A new estimator is a row of
:data:`ADV_ESTIMATORS` and a function in :mod:`roll.algorithms.advantages`. The functions are given these dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.corrections import parse_correction
from roll.config.policy_losses import CLIPPED, FLAT_NAMES, POLICY_LOSSES
from roll.config.reading.fields import Choice, Named, Table, parse_dotted_path, rules, setting


@dataclass(frozen=True)
class Estimator(Named):
    """An advantage estimator, ``adv_estimator``."""

    norm: tuple[str | None, str | None] = (None, None)
    """``norm_mean_type`` and ``norm_std_type`` of the rewards where the file leaves them open."""
    whitens: bool = False
    """Whitening of the advantages is part of it."""
    needs_values: bool = False
    """It needs a critic."""
    discounts: bool = False
    """It reads ``gamma``."""
    leaves_one_out: bool = False
    """It compares the samples of a prompt with one another and so needs two."""
    is_pass_at_k: bool = False
    """It asks whether one of ``pass_k`` samples is right."""
    needs_squares: bool = False
    """It reads the sum of squared probabilities before every token."""
    needs_greedy: bool = False
    """It compares every sample with the greedy response to its prompt."""
    weighs_rewards: bool = False
    """It normalises the rewards of ``reward_weights`` apart."""
    rewards_turns: bool = False
    """In work of several turns its rewards stand on the turns that earned them; else each trajectory has one."""
    works_in_turns: bool = False
    """It looks at the turns of an episode, which only the agentic pipeline has."""
    normalises_steps: bool = False
    """The rewards' normalisation is that of the discounted returns of all turns, not of whole trajectories."""


ADV_ESTIMATORS = Table(
    "adv_estimator",
    Estimator("gae", needs_values=True, discounts=True, rewards_turns=True),
    Estimator("grpo", norm=("group", "group"), discounts=True),
    Estimator("reinforce", discounts=True, rewards_turns=True),
    Estimator("reinforce++", ("reinforce_plus_plus",), whitens=True, discounts=True, rewards_turns=True),
    Estimator(
        "reinforce++_baseline",
        ("reinforce_plus_plus_baseline",),
        norm=("group", None),
        whitens=True,
        discounts=True,
    ),
    Estimator("rloo", ("loop",), leaves_one_out=True),
    Estimator("opo"),
    Estimator("optimal_token_baseline", ("tir_optimal_token_baseline",), needs_squares=True),
    Estimator("gpg"),
    Estimator("maxrl", leaves_one_out=True),
    Estimator("pass@k", ("pass_at_k",), is_pass_at_k=True),
    Estimator("remax", needs_greedy=True),
    Estimator("gdpo", weighs_rewards=True),
    Estimator("turn_gae", needs_values=True, discounts=True, rewards_turns=True, works_in_turns=True),
    Estimator("gigpo", norm=("group", "group"), works_in_turns=True),
    Estimator("step_reinforce", works_in_turns=True, normalises_steps=True),
    Estimator("agentic_reinforce", discounts=True, rewards_turns=True, works_in_turns=True),
)

KL_PENALTIES = (
    *("kl", "k1", "k2", "k3", "abs", "mse", "low_var_kl"),
    *("k1+", "kl+", "abs+", "k3+", "low_var_kl+", "full"),
)
"""Estimators of the KL, which are those of :mod:`roll.algorithms.kl`."""
LOSS_AGG_MODES = (
    *("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    *("prompt-mean", "token-sum"),
)
VALUE_LOSSES = ("mse", "huber")
NORM_TYPES = ("batch", "group", "running")


def readers(*losses: str) -> dict[str, tuple[str, ...]]:
    """``read_if`` of a key that these policy losses read, in all their spellings."""
    return {"loss": tuple(name for one in losses for name in POLICY_LOSSES[one].names)}


def estimators(holds: Callable[[Estimator], bool]) -> dict[str, tuple[str, ...]]:
    """``read_if`` of a key that these estimators read."""
    return {"adv_estimator": ADV_ESTIMATORS.where(holds)}


def estimator(name: str) -> Estimator:
    """Traits of an estimator; a function found by its dotted path has no special needs."""
    return ADV_ESTIMATORS.get(name) or Estimator(name)


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
    adv_estimator: str = setting("gae", choices=ADV_ESTIMATORS, dotted_path=True, plugins="estimators", example="grpo")
    """Advantage estimator: ``gae`` (needs a critic), ``grpo``, ``reinforce``, ``reinforce++``, ``rloo`` ..."""
    loss: Choice = field(
        default=Choice("ppo"),
        metadata=rules(
            table=POLICY_LOSSES,
            flat=FLAT_NAMES,
            choices=POLICY_LOSSES,
            dotted_path=True,
            plugins="losses",
            aliases=("pg_variant",),
        ),
    )
    """Policy loss: its name, or a section with ``name`` and the options that it has."""
    adv_estimator_args: dict[str, Any] = field(default_factory=dict)
    """Options of an advantage estimator of your own: ``options.adv_estimator_args`` of the function."""
    gamma: float = setting(1.0, ge=0, le=1, read_if=estimators(lambda row: row.discounts))
    """Discount of later rewards."""
    lambd: float = setting(0.95, ge=0, le=1, read_if=estimators(lambda row: row.needs_values))
    """GAE's lambda."""
    pg_clip: float = setting(0.2, ge=0, example=0.2, read_if=readers(*CLIPPED, "raft++"))
    """Clip range of the probability ratio, on both sides."""
    use_pg_clip_range: bool = setting(False, read_if=readers(*CLIPPED, "raft++"))
    """Clip with ``pg_clip_low`` and ``pg_clip_high`` instead of ``pg_clip``."""
    pg_clip_low: float = setting(0.2, ge=0, le=1, read_if={**readers(*CLIPPED, "raft++"), "use_pg_clip_range": (True,)})
    """Ratios are clipped at 1 - this from below."""
    pg_clip_high: float = setting(0.2, ge=0, read_if={**readers(*CLIPPED, "raft++"), "use_pg_clip_range": (True,)})
    """Ratios are clipped at 1 + this from above."""
    dual_clip_loss: bool = setting(False, read_if=readers(*CLIPPED))
    """Bound the loss of negative advantages (dual clip)."""
    dual_clip_coef: float | None = setting(None, gt=1, read_if={**readers(*CLIPPED), "dual_clip_loss": (True,)})
    """The dual clip's bound; null: 1 + 2 x ``pg_clip`` (3.0 in the paper)."""
    value_clip: float | None = setting(None, gt=0, read_if={"critic": ()})
    """Clip range of the critic's new values around the old ones; null: not clipped."""
    importance_sampling: Literal["token", "segment", "seq"] = setting("token", read_if=readers("ppo", "clip_cov"))
    """Level of the probability ratio; ``seq`` is GSPO."""
    value_loss_type: str = setting("mse", choices=VALUE_LOSSES, dotted_path=True, read_if={"critic": ()})
    """The critic's error: half its square, or the Huber loss."""
    loss_agg_mode: str = setting("seq-mean-token-mean", choices=LOSS_AGG_MODES, dotted_path=True)
    """Aggregation of token losses to one number. Denominators are always those of the whole optimizer step."""
    kl_loss_agg_mode: str | None = setting(None, choices=LOSS_AGG_MODES, dotted_path=True, example="token-mean")
    """The same for the KL in the loss; null: ``loss_agg_mode``."""
    entropy_loss_agg_mode: str | None = setting(None, choices=LOSS_AGG_MODES, dotted_path=True, example="token-mean")
    """The same for the entropy bonus; null: ``loss_agg_mode``."""
    value_loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES, dotted_path=True)
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
    ``entropy_coef_delta`` with every step below the target and falls with every step above it, where the bonus is off.
    null: the weight stays fixed."""
    entropy_coef_delta: float = setting(0.005, gt=0)
    """Change of that weight in a step."""
    entropy_coef_max: float | None = setting(None, gt=0)
    """Greatest value of that weight; null: none."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = setting(0.0, ge=0, read_if={"use_kl_loss": (True,)})
    """Weight of that KL."""
    kl_loss_type: str = setting("k3", choices=KL_PENALTIES, dotted_path=True, read_if={"use_kl_loss": (True,)})
    """Estimator of that KL."""
    kl_loss_clamp: float | None = setting(10.0, gt=0, read_if={"use_kl_loss": (True,), "kl_loss_type": ("k3",)})
    """Bound of the ``k3`` estimate in the loss; null: none."""
    kl_loss_importance_weighted: bool = setting(False, read_if={"use_kl_loss": (True,)})
    """Weigh that estimate by the policy's ratio: unbiased after the first update of a batch."""
    add_token_level_kl: bool = False
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
    pass_k: int = setting(4, ge=1, read_if=estimators(lambda row: row.is_pass_at_k))
    """``pass@k``: the k, less than ``num_return_sequences_in_group``. Right is a raw score of 1 or more."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """``gdpo``: the rewards to normalise apart, with their weights. Names are those of the numbers that the reward
    returns in addition to its score (``reward/<domain>/<name>`` in the log), or ``score`` for the score itself."""
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
    """Never compute them: the engine's log-probs stand in for them, also where there is a single update a batch (there,
    a ``train_infer_correction`` compares the current policy with the engine instead)."""
    train_infer_correction: str | list[Any] | dict[str, Any] | None = field(
        default=None, metadata=rules(parse=parse_correction, example="tis")
    )
    """Correct for engine probabilities that differ from the trainer's: a preset's name, a list of rules, a section with
    ``is_weight`` and ``filters``, or the dotted path of your own function. null: measured, not corrected."""
    top_entropy_quantile: float = setting(1.0, gt=0, le=1, example=0.2)
    """Share of the response tokens, those of highest entropy before the update, that the policy loss uses; the others
    count as 0. 1: all of them."""
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
    sample_weighting: str | None = field(default=None, metadata=rules(parse=parse_dotted_path, example="~"))
    """Dotted path of your own function of scores, lengths and groups that gives each sample its weight."""

    @property
    def clip_low(self) -> float:
        """Largest distance of the ratio below 1."""
        return self.pg_clip_low if self.use_pg_clip_range else self.pg_clip

    @property
    def clip_high(self) -> float:
        """Largest distance of the ratio above 1."""
        return self.pg_clip_high if self.use_pg_clip_range else self.pg_clip
