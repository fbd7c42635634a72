"""Names that a configuration may use for what other packages implement; kept here because configuration is torch-free.

A test asserts that these lists and the registries of the packages agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.reading.fields import Named, Table

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
"""Decay types of ``warmup_stable_decay``."""
LR_SCHEDULERS = tuple(LR_SCHEDULER_OPTIONS)
DECAYING_SCHEDULERS = tuple(name for name in LR_SCHEDULERS if not name.startswith("constant"))
"""Those that read ``min_lr_ratio``."""
ATTENTION = ("sdpa", "eager", "fa2", "flash_attention_2", "auto")
INVARIANT_ATTENTION = "roll_invariant"
"""Set by the plan for roles of a run with ``strict_on_policy``; see :mod:`roll.models.invariant`."""
KERNELS = ("use_liger_kernel", "compile")
"""Keys of ``model_args`` that compute the same by other kernels."""
TRACKERS = ("tensorboard", "stdout", "jsonl", "prometheus", "wandb", "swanlab", "trackio", "mlflow", "ml_tracker")
UNPUBLISHED_TRACKERS = {"ml_tracker": "tensorboard"}
"""Trackers of ROLL's files that are not public, and what writes the metrics in their place."""

FILTER_ARGUMENTS = {
    "no_filter": (),
    "mean_filter": ("threshold_down", "threshold_up"),
    "std_filter": ("std_threshold",),
}
"""Group filters and their arguments."""

TEMPLATES = (
    *("native", "qwen2_5", "qwen2-vl", "qwen3", "qwen3_nothink", "qwen3_coder"),
    *("chatml", "empty", "base", "raw", "longCOT_qwen2.5", "longcot_V3"),
)
TEMPLATE_ENDINGS = (".jinja", ".j2")
"""Endings of files that hold a chat template."""


@dataclass(frozen=True)
class BuiltInReward(Named):
    """A reward that ``worker_cls`` may name; a new one is its module and a row here."""

    target: str = ""
    """Module and class, imported when a worker uses it."""
    needs_truth: bool = False
    """It cannot score a row without ``ground_truth``."""
    published: tuple[str, ...] = ()
    """Reward classes of ROLL's published files that stand for it."""


def _rule(name: str, target: str, *published: str, needs_truth: bool = False) -> BuiltInReward:
    return BuiltInReward(name, target=f"roll.rewards.{target}", needs_truth=needs_truth, published=published)


REWARDS = Table(
    "worker_cls",
    _rule("gsm8k_rule", "text_rules.Gsm8kRule", needs_truth=True),
    _rule("math_rule", "math_rule.MathRule", "MathRuleRewardWorker", needs_truth=True),
    _rule(
        "multiple_choice",
        "multiple_choice.MultipleChoice",
        "MultipleChoiceBoxedRuleRewardWorker",
        "GeneralValRuleRewardWorker",
        needs_truth=True,
    ),
    _rule("format", "text_rules.FormatRule"),
    _rule("exact_match", "text_rules.ExactMatch", needs_truth=True),
    _rule("f1", "text_rules.F1", needs_truth=True),
    _rule("detection", "detection.Detection", "DetectionRewardWorker", needs_truth=True),
    _rule("ifeval", "ifeval.IFEval", "GeneralRuleRewardWorker"),
    _rule("reward_model", "http_reward.RewardModelScore"),
    _rule("crossthinkqa", "multiple_choice.CrossThinkQA", "CrossThinkQARuleRewardWorker", needs_truth=True),
    _rule("repetition_penalty", "text_rules.RepetitionPenalty"),
    _rule("length_penalty", "text_rules.LengthPenalty"),
    _rule("http_reward", "http_reward.HttpReward"),
    _rule("llm_judge", "judge.LLMJudge", "LLMJudgeRewardWorker"),
    _rule("code_sandbox", "code_sandbox.CodeSandbox", "CodeSandboxRewardWorker"),
)
"""Rewards by short name."""

PUBLISHED_REWARDS = {each: name for name, reward in REWARDS.items() for each in reward.published}
"""Reward classes of ROLL's published files that run here, with their short names."""

PLANNED_REWARDS = {"RemoteRewardSystemWorker": "remote", "VideoR1RewardWorker": "video_r1"}
"""Reward classes of ROLL's published files that do not run here."""
WHY_PLANNED = {
    "remote": ("the reward remote, a client of a service that is not public: http_reward asks your own", "http_reward"),
    "video_r1": ("the reward video_r1, for models that see videos", "math_rule"),
}
"""For each of those: what it is, and a reward to use instead."""

PUBLISHED_WORKERS = ("ActorWorker", "ActorPGWorker", "CriticWorker", "InferWorker")
"""Worker classes of ROLL's published files that stand for a role's own worker here."""
PUBLISHED_PREFIX = "roll.pipeline."
RULE_OF_COLUMN = {"instruction_id_list": "ifeval", "test_cases": "code_sandbox"}
"""Reward rules that read a column of their own in place of the ground truth."""
