"""The RLVR pipeline's configuration: reinforcement learning from verifiable rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from roll.config.data import TEMPLATE_ENDINGS, TEMPLATES, DataArguments
from roll.config.reading.fields import parse_dotted_path, rules, setting
from roll.config.rewards import RewardConfig
from roll.config.roles import GeneratingArguments, GenerationWorkerConfig, StrategyArguments, WorkerConfig
from roll.methods.policy_plan import PolicyConfig
from roll.serving.harness import HarnessConfig


@dataclass(frozen=True)
class ValidationSetConfig:
    """``validation.sets.<name>``: a set with a name of its own. What it leaves out is as ``validation`` has it."""

    data_args: DataArguments = field(default_factory=DataArguments)
    """Its files; columns and template that it leaves out are those of ``validation.data_args``."""
    generating_args: GeneratingArguments = field(default_factory=GeneratingArguments)
    """Sampling of its responses, and ``num_return_sequences`` of them; keys that it leaves out are those of
    ``validation.generating_args``."""
    greedy: bool | None = None
    """Also answer every prompt once with greedy decoding; null: as ``validation`` says."""
    prompt_length: int | None = setting(None, ge=1)
    """Longest prompt of this set; goes with ``sequence_length``. null: as in the rest of the validation."""
    sequence_length: int | None = setting(None, ge=2)
    """Prompt plus response of this set; goes with ``prompt_length``. null: as in the rest of the validation."""


@dataclass(frozen=True)
class ValidationConfig(WorkerConfig):
    """``validation``: which questions are asked every ``eval_steps``, and how the answers are sampled.

    Only ``data_args`` and ``generating_args`` of the role's keys count; the engines are those of ``actor_infer``.
    """

    strategy_args: StrategyArguments = field(default_factory=lambda: StrategyArguments(strategy_name="hf_infer"))
    """Has no effect: the engines are those of ``actor_infer``."""
    greedy: bool = True
    """Also answer every prompt once with greedy decoding."""
    eval_steps: int | None = setting(None, ge=-1)
    """Steps between validations; null: the run's ``eval_steps``."""
    before_train: bool = True
    """Validate before the first step."""
    concurrent: bool | None = setting(None, aliases=("beside_training",))
    """Validate while the other roles work on the samples of the step; the answers are the same. All roles that answer
    or score need devices of their own. null: where devices allow it; false: before the step's samples."""
    sets: dict[str, ValidationSetConfig] = field(default_factory=dict)
    """Further sets by name, each with files, sampling and lengths of its own. With sets, ``data_args.file_name`` may be
    left out."""
    harness: HarnessConfig | None = None
    """Tasks of lm-eval or Inspect that every validation asks as well; null: none."""


@dataclass(frozen=True)
class RLVRConfig(PolicyConfig):
    """Configuration of an RLVR run. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    group_key: ClassVar[str] = "num_return_sequences_in_group"

    rollout_batch_size: int = setting(128, ge=1)
    """Prompts of one step."""
    num_return_sequences_in_group: int = setting(1, ge=1)
    """Samples of each prompt."""
    val_batch_size: int = setting(128, ge=1, read_if={"validation": ()})
    """Prompts given to the engines at a time in validation."""
    prompt_length: int = setting(1024, ge=1)
    """Longest prompt in tokens; longer rows are left out, or truncated (``data_args.filter_overlong_prompts``)."""
    response_length: int | None = setting(None, ge=1)
    """Longest response in tokens. This or ``sequence_length`` must be set."""
    sequence_length: int | None = setting(None, ge=2)
    """Prompt plus response in tokens."""
    val_prompt_length: int | None = setting(None, ge=1)
    """Longest prompt in validation; goes with ``val_sequence_length``. null: as in training."""
    val_sequence_length: int | None = setting(None, ge=2)
    """Prompt plus response in validation; goes with ``val_prompt_length``. null: as in training."""
    global_template: str | None = setting(None, choices=TEMPLATES, endings=TEMPLATE_ENDINGS)
    """Chat template of all roles; null: each role's ``data_args.template``."""
    tag_to_template: dict[str, str] = field(default_factory=dict)
    """Chat template by the rows' tag, before ``global_template``."""
    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The policy that learns; its ``data_args`` name the training prompts."""
    reward_model: GenerationWorkerConfig | None = None
    """The judge that every ``llm_judge`` with ``judge_model_type: cluster`` asks, or the model of the rewards
    ``reward_model``."""
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    """Reward domains by name."""
    validation: ValidationConfig | None = None
    """Prompts for validation; null: none."""
    is_use_additional_prompts: bool = False
    """Ask more prompts than a step needs, so that filtered groups are replaced without waiting."""
    max_additional_running_prompts: int = setting(16, ge=0, read_if={"is_use_additional_prompts": (True,)})
    """Prompts asked beyond the need with ``is_use_additional_prompts``."""
    user_defined_rollout_loop_cls: str | None = field(
        default=None, metadata=rules(parse=parse_dotted_path, example="~")
    )
    """Dotted path of your own rollout loop: a class whose coroutine says what becomes of a training prompt."""

    @property
    def group_size(self) -> int:
        return self.num_return_sequences_in_group

    @property
    def samples_per_step(self) -> int:
        return self.rollout_batch_size * self.num_return_sequences_in_group

    @property
    def response_and_sequence(self) -> tuple[int, int]:
        """Response and sequence length; one follows from the other."""
        if self.response_length is not None:
            return self.response_length, self.prompt_length + self.response_length
        sequence = self.sequence_length or self.prompt_length + 1
        return max(1, sequence - self.prompt_length), sequence

    @property
    def longest_sequence(self) -> int:
        return self.response_and_sequence[1]
