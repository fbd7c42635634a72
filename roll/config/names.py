"""Names that a configuration may use for what other packages implement; kept here because configuration is torch-free.

A test asserts that these lists and the registries of the packages agree.
"""

from __future__ import annotations

LR_SCHEDULER_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "constant": (),
    "constant_with_warmup": (),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "decay_type", "min_lr_ratio", "num_cycles"),
}
"""Hugging Face's schedules that are a function of the step alone, each with its ``lr_scheduler_kwargs``."""
DECAY_TYPES = ("cosine", "linear", "1-sqrt")
"""Of ``warmup_stable_decay``."""
LR_SCHEDULERS = tuple(LR_SCHEDULER_OPTIONS)
DECAYING_SCHEDULERS = tuple(name for name in LR_SCHEDULERS if not name.startswith("constant"))
"""Those that read ``min_lr_ratio``."""
ATTENTION = ("sdpa", "eager", "fa2", "flash_attention_2", "auto")
TRACKERS = ("tensorboard", "stdout", "jsonl", "wandb", "swanlab", "ml_tracker")
PLANNED_TRACKERS = ("trackio",)
UNPUBLISHED_TRACKERS = {"ml_tracker": "tensorboard"}
"""Trackers of ROLL's files that are not public, and what writes the metrics in their place."""

FILTER_ARGUMENTS = {
    "no_filter": (),
    "mean_filter": ("threshold_down", "threshold_up"),
    "std_filter": ("std_threshold",),
}
"""Group filters and their arguments."""

TEMPLATES = (
    "native",
    "qwen2_5",
    "qwen3",
    "qwen3_nothink",
    "chatml",
    "empty",
    "base",
    "raw",
    "longCOT_qwen2.5",
    "longcot_V3",
)
TEMPLATE_ENDINGS = (".jinja", ".j2")
"""Of files that hold a chat template."""

REWARDS = (
    "gsm8k_rule",
    "math_rule",
    "multiple_choice",
    "format",
    "exact_match",
    "f1",
    "detection",
    "ifeval",
    "reward_model",
    "crossthinkqa",
    "repetition_penalty",
    "length_penalty",
    "http_reward",
    "llm_judge",
    "code_sandbox",
)
"""Short names of the rewards that run today."""

TRUTH_REWARDS = (
    "gsm8k_rule",
    "math_rule",
    "multiple_choice",
    "exact_match",
    "f1",
    "detection",
    "crossthinkqa",
)
"""Rewards that cannot score a row without ``ground_truth``."""

PUBLISHED_REWARDS = {
    "CodeSandboxRewardWorker": "code_sandbox",
    "LLMJudgeRewardWorker": "llm_judge",
    "MathRuleRewardWorker": "math_rule",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "GeneralRuleRewardWorker": "ifeval",
    "DetectionRewardWorker": "detection",
    "CrossThinkQARuleRewardWorker": "crossthinkqa",
    "GeneralValRuleRewardWorker": "multiple_choice",
}
"""Reward classes of ROLL's published files that run today, under their short names."""

PLANNED_REWARDS = {
    "RemoteRewardSystemWorker": "remote",
    "VideoR1RewardWorker": "video_r1",
}
"""Reward classes of ROLL's published files that do not run here."""
WHY_PLANNED = {
    "remote": ("the reward remote, a client of a service that is not public: http_reward asks your own", "http_reward"),
    "video_r1": ("the reward video_r1, for models that see videos", "math_rule"),
}
"""Of each of those: what it is, and a reward to take in its place."""

PUBLISHED_WORKERS = (
    "ActorWorker",
    "ActorPGWorker",
    "CriticWorker",
    "InferWorker",
)
"""Worker classes of ROLL's published files that stand for a role's own worker here."""
PUBLISHED_PREFIX = "roll.pipeline."
