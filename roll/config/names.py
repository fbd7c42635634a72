"""Names that a configuration may use for what other packages implement; kept here because configuration is torch-free.

A test asserts that these lists and the registries of the packages agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.reading.fields import Named, Table

# Hugging Face's schedules that are a function of the step alone, each with its `lr_scheduler_kwargs`.
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
DECAY_TYPES = ("cosine", "linear", "1-sqrt")  # decay types of `warmup_stable_decay`
LR_SCHEDULERS = tuple(LR_SCHEDULER_OPTIONS)
# Those that read `min_lr_ratio`.
DECAYING_SCHEDULERS = tuple(name for name in LR_SCHEDULERS if not name.startswith("constant"))
ATTENTION = ("sdpa", "eager", "fa2", "flash_attention_2", "auto")
# Set by the plan for roles of a run with `strict_on_policy`; see `roll.models.invariant`.
INVARIANT_ATTENTION = "roll_invariant"
KERNELS = ("use_liger_kernel", "compile")  # keys of `model_args` that compute the same by other kernels
TRACKERS = ("tensorboard", "stdout", "jsonl", "prometheus", "wandb", "swanlab", "trackio", "mlflow", "ml_tracker")
# Trackers of ROLL's files that are not public, and what writes the metrics in their place.
UNPUBLISHED_TRACKERS = {"ml_tracker": "tensorboard"}

# Group filters and their arguments.
FILTER_ARGUMENTS = {
    "no_filter": (),
    "mean_filter": ("threshold_down", "threshold_up"),
    "std_filter": ("std_threshold",),
}

TEMPLATES = (
    *("native", "qwen2_5", "qwen2-vl", "qwen3", "qwen3_nothink", "qwen3_coder"),
    *("chatml", "empty", "base", "raw", "longCOT_qwen2.5", "longcot_V3"),
)
TEMPLATE_ENDINGS = (".jinja", ".j2")  # endings of files that hold a chat template


@dataclass(frozen=True)
class BuiltInReward(Named):
    """A reward that ``worker_cls`` may name; a new one is its module and a row here."""

    target: str = ""  # module and class, imported when a worker uses it
    needs_truth: bool = False  # it cannot score a row without `ground_truth`
    published: tuple[str, ...] = ()  # reward classes of ROLL's published files that stand for it


def _rule(name: str, target: str, *published: str, needs_truth: bool = False) -> BuiltInReward:
    return BuiltInReward(name, target=f"roll.rewards.{target}", needs_truth=needs_truth, published=published)


# Rewards by short name.
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

# Reward classes of ROLL's published files that run here, with their short names.
PUBLISHED_REWARDS = {each: name for name, reward in REWARDS.items() for each in reward.published}

# Reward classes of ROLL's published files that do not run here.
PLANNED_REWARDS = {"RemoteRewardSystemWorker": "remote", "VideoR1RewardWorker": "video_r1"}
# For each of those: what it is, and a reward to use instead.
WHY_PLANNED = {
    "remote": ("the reward remote, a client of a service that is not public: http_reward asks your own", "http_reward"),
    "video_r1": ("the reward video_r1, for models that see videos", "math_rule"),
}

# Worker classes of ROLL's published files that stand for a role's own worker here.
PUBLISHED_WORKERS = ("ActorWorker", "ActorPGWorker", "CriticWorker", "InferWorker")
PUBLISHED_PREFIX = "roll.pipeline."
# Reward rules that read a column of their own in place of the ground truth.
RULE_OF_COLUMN = {"instruction_id_list": "ifeval", "test_cases": "code_sandbox"}
