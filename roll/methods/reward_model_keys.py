"""The rm pipeline: its configuration, checks and definition. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.config.checks.base import Checks
from roll.config.losses import (
    JUDGEMENTS,
    RANKS,
    SCORE_INPUT_DEFAULT,
    RewardLossConfig,
    ScoreInput,
)
from roll.config.pipelines import TRAINS, Headline, Panel, Role
from roll.config.rewards import CLASSIFIER
from roll.config.roles import WorkerConfig
from roll.methods.supervised import SupervisedConfig, SupervisedDefinition


@dataclass(frozen=True)
class RMConfig(RewardLossConfig, SupervisedConfig):
    """The keys of an rm run. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    pretrain: str = ""
    """Model that the reward model starts from: a folder or a hub name. A language model gets a new head."""
    score_input: ScoreInput = SCORE_INPUT_DEFAULT
    """Tokens that are scored: ``chat``, the conversation by the tokenizer's chat template; ``tokens``, the rendered
    prompt, the response and the end-of-turn token. The option ``input`` of the reward ``reward_model`` must say the
    same."""
    chosen_key: str = "chosen"
    """Column of the preferred response: a text, or a conversation that ends with it."""
    rejected_key: str = "rejected"
    """Column of the other response."""
    margin_key: str | None = None
    """Column of the number by which the chosen response is better; null: no margin."""
    responses_key: str = "responses"
    """Column of several responses to a prompt (or of a single one; of the steps under ``process``)."""
    scores_key: str = "scores"
    """Column of their scores, ranks (higher is better), grades or labels; where rankings have none, the best response
    is the first."""
    reward_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The reward model; its ``data_args`` name the rows. ``per_device_train_batch_size`` counts prompts."""


class RewardModel(SupervisedDefinition[RMConfig]):
    """Reward models from rankings, grades and labels."""

    name = "rm"
    config_class = RMConfig
    role = "reward_train"
    method_class = "roll.methods.reward_model.RewardModelling"
    roles = (Role("reward_train", TRAINS, has_own_head=True),)
    headlines = (
        Headline("reward/loss", "loss", "{:.4f}"),
        Headline("reward/acc", "accuracy"),
        Headline("val/acc", "val accuracy"),
        Headline("reward/lr", "lr", "{:.2e}"),
        Headline("system/tps", "tok/s", "{:,.0f}"),
    )
    panels = (
        Panel("Loss", ("reward/loss", "val/loss"), smooth=True),
        Panel("Ranked right", ("reward/acc", "val/acc"), unit_range=True, smooth=True),
        Panel("Scores", ("reward/chosen_score", "reward/reject_score", "reward/score"), smooth=True),
        Panel("Calibration error and correlation with length", ("val/ece", "val/length_correlation")),
    )
    reference = (
        ("Reward models (top level)", RMConfig, (SupervisedConfig, RewardLossConfig)),
        ("Reward models: losses (top level)", RewardLossConfig, ()),
    )

    def check_keys(self, config: RMConfig, checks: Checks) -> None:
        role = config.reward_train
        if config.chosen_key == config.rejected_key:
            checks.add("rejected_key", config.rejected_key, "is the column of the chosen responses too", "rejected")
        if role.strategy_args.strategy_name.startswith("megatron"):
            rule = (
                "Megatron's layers carry a critic's head, which begins at zero and has a bias that a reward model's "
                "file has no place for; use fsdp2_train, fsdp_train or deepspeed_train"
            )
            key = "reward_train.strategy_args.strategy_name"
            checks.add(key, role.strategy_args.strategy_name, rule, "fsdp2_train")
        if role.model_args.model_type not in (None, CLASSIFIER):
            rule = f"must be {CLASSIFIER}: one score on top of the model"
            checks.add("reward_train.model_args.model_type", role.model_args.model_type, rule, CLASSIFIER)
        if config.loss_type in JUDGEMENTS:
            if config.loss_type == "process" and config.score_input == "chat":
                rule = "steps are scored at their last tokens, which a template for whole conversations does not show"
                checks.add("score_input", "chat", rule, "tokens")
            if config.margin_key is not None and config.loss_type not in RANKS:
                checks.note("margin_key", f"not used: loss_type {config.loss_type} compares no responses")

    def longest_row(self, config: RMConfig) -> int:
        """Tokens of a pair: all responses to a prompt are computed in one micro-batch. Longer rankings need a larger
        budget, which the first of them says."""
        return (2 if config.loss_type == "bradley_terry" else 1) * config.sequence_length
