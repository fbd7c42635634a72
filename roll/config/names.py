"""Names that a configuration may use for what other packages implement; kept here because configuration is torch-free.

A test asserts that these lists and the registries of the packages agree.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class BuiltInReward:
    """A reward that ``worker_cls`` may name; a new one is its module and a row here."""

    target: str
    """Module and class, imported when a worker uses it."""
    needs_truth: bool = False
    """It cannot score a row without ``ground_truth``."""
    published: tuple[str, ...] = ()
    """Reward classes of ROLL's published files that stand for it."""


REWARDS = {
    "gsm8k_rule": BuiltInReward("roll.rewards.text_rules.Gsm8kRule", needs_truth=True),
    "math_rule": BuiltInReward("roll.rewards.math_rule.MathRule", True, ("MathRuleRewardWorker",)),
    "multiple_choice": BuiltInReward(
        "roll.rewards.multiple_choice.MultipleChoice",
        True,
        ("MultipleChoiceBoxedRuleRewardWorker", "GeneralValRuleRewardWorker"),
    ),
    "format": BuiltInReward("roll.rewards.text_rules.FormatRule"),
    "exact_match": BuiltInReward("roll.rewards.text_rules.ExactMatch", needs_truth=True),
    "f1": BuiltInReward("roll.rewards.text_rules.F1", needs_truth=True),
    "detection": BuiltInReward("roll.rewards.detection.Detection", True, ("DetectionRewardWorker",)),
    "ifeval": BuiltInReward("roll.rewards.ifeval.IFEval", published=("GeneralRuleRewardWorker",)),
    "reward_model": BuiltInReward("roll.rewards.http_reward.RewardModelScore"),
    "crossthinkqa": BuiltInReward("roll.rewards.multiple_choice.CrossThinkQA", True, ("CrossThinkQARuleRewardWorker",)),
    "repetition_penalty": BuiltInReward("roll.rewards.text_rules.RepetitionPenalty"),
    "length_penalty": BuiltInReward("roll.rewards.text_rules.LengthPenalty"),
    "http_reward": BuiltInReward("roll.rewards.http_reward.HttpReward"),
    "llm_judge": BuiltInReward("roll.rewards.judge.LLMJudge", published=("LLMJudgeRewardWorker",)),
    "code_sandbox": BuiltInReward("roll.rewards.code_sandbox.CodeSandbox", published=("CodeSandboxRewardWorker",)),
}
"""Rewards by short name."""

PUBLISHED_REWARDS = {each: name for name, reward in REWARDS.items() for each in reward.published}
"""Reward classes of ROLL's published files that run here, with their short names."""

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
