"""Names that a configuration may use for what other packages implement; kept here because configuration is torch-free.

A test asserts that these lists and the registries of the packages agree.
"""

from __future__ import annotations

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "reinforce",
    "reinforce++",
    "reinforce_plus_plus",
    "rloo",
)
MULTI_TURN_ADV_ESTIMATORS = ("gigpo", "step_reinforce", "agentic_reinforce")
"""Published names that belong to multi-turn work."""

PG_VARIANTS = ("ppo", "vanilla")

KL_PENALTIES = ("kl", "k1", "k2", "k3", "abs", "mse", "full")
LOSS_AGG_MODES = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
NORM_TYPES = ("batch", "group", "running")
LR_SCHEDULERS = ("linear", "cosine", "constant")
ATTENTION = ("sdpa", "eager", "fa2", "flash_attention_2", "auto")
QUERY_FILTERS = ("no_filter", "mean_filter", "std_filter")
