"""The RLVR pipeline's configuration: reinforcement learning from verifiable rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.algorithm import PPOConfig
from roll.config.names import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.older import OlderRLVRKeys
from roll.config.reading.fields import parse_dotted_path, rules, setting
from roll.config.rewards import RewardConfig
from roll.config.roles import StrategyArguments, WorkerConfig
from roll.config.run import RunConfig
from roll.config.validation import ValidationConfig
from roll.config.weight_sync import WeightSyncConfig


def _strategy(name: str) -> StrategyArguments:
    return StrategyArguments(strategy_name=name)


@dataclass(frozen=True)
class ReferenceWorkerConfig(WorkerConfig):
    """A role that computes log-probs and never learns."""

    strategy_args: StrategyArguments = field(default_factory=lambda: _strategy("fsdp2_infer"))
    """How the model is computed."""


@dataclass(frozen=True)
class GenerationWorkerConfig(WorkerConfig):
    """A role that generates."""

    strategy_args: StrategyArguments = field(default_factory=lambda: _strategy("hf_infer"))
    """Which engine generates."""
    max_restarts: int = setting(1, ge=0)
    """How often each engine that is lost is started again, while the others do its work; it takes part from the next
    weight update on. Engines that share devices with other roles are not started again."""
    engine_timeout: float = setting(600.0, gt=0)
    """Seconds without an answer after which an engine is taken for lost and killed: in generation, where it answers
    about twice a second or after its next token, whichever is later; and in a weight update, where it answers every
    bucket. An engine compiles kernels and reads the longest prompts within this time."""


@dataclass(frozen=True)
class RouterConfig:
    """``router_args``: how requests are spread over generation engines."""

    router_name: str | None = setting(
        None, choices=("PromptAffinityRouter", "EnvAffinityRouter", "SglangRouter"), dotted_path=True
    )
    """null: ``PromptAffinityRouter`` (least-loaded engine first, all samples of a prompt on one)."""
    router_config: dict[str, Any] = field(default_factory=dict)
    """Options of a router of your own, given to its class as keywords."""
    max_running_requests: int | None = setting(None, ge=1)
    """Prompts that one engine works on at a time; null: the run's ``max_running_requests``."""


@dataclass(frozen=True)
class RLVRConfig(PPOConfig, OlderRLVRKeys, RunConfig):
    """Everything an RLVR run is told. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    max_steps: int = setting(500, ge=1)
    """Training steps of the run."""
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
    actor_infer: GenerationWorkerConfig = field(default_factory=GenerationWorkerConfig)
    """The engines that generate."""
    reference: ReferenceWorkerConfig | None = None
    """The policy that KL is measured against; runs only when a KL is used."""
    critic: WorkerConfig | None = None
    """The value model; needed by ``adv_estimator: gae``."""
    reward_model: GenerationWorkerConfig | None = None
    """The judge that every ``llm_judge`` with ``judge_model_type: cluster`` asks, or the model behind the rewards
    ``reward_model``."""
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    """Reward domains by name."""
    validation: ValidationConfig | None = None
    """Prompts for validation; null: none."""
    warn_after_steps: int = setting(3, ge=0)
    """A warning says when all scores were the same, all advantages 0, or too many responses were truncated, in so many
    steps in a row; 0: never."""
    warn_truncated_share: float = setting(0.5, ge=0, le=1, read_if={"warn_after_steps": ()})
    """Share of responses truncated at the length limit above which a step counts for ``warn_after_steps``."""
    is_num_return_sequences_expand: bool = setting(False, inert="a prompt is computed once for all of its samples")
    """Accepted for older files."""
    max_running_requests: int = setting(128, ge=1)
    """Prompts that one engine works on at a time."""
    is_use_additional_prompts: bool = False
    """Ask more prompts than a step needs, so that filtered groups are replaced without waiting."""
    max_additional_running_prompts: int = setting(16, ge=0, read_if={"is_use_additional_prompts": (True,)})
    """Prompts asked beyond the need with ``is_use_additional_prompts``."""
    user_defined_rollout_loop_cls: str | None = field(
        default=None, metadata=rules(parse=parse_dotted_path, example="~")
    )
    """Dotted path of your own rollout loop: a class whose coroutine says what becomes of a training prompt."""
    router_args: RouterConfig = field(default_factory=RouterConfig)
    """How requests are spread over generation engines."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """How the trainer's weights get to the engines."""
    async_generation_ratio: float = setting(0.0, ge=0)
    """Steps that generation may run ahead of training, fractions meant exactly; 0: synchronous. Above 0 ``actor_infer``
    generates while others compute if it has devices of its own; on shared ones (``partial_rollout`` only) a step stops
    generation when it has its samples, and partial responses go on in the next."""
    partial_rollout: bool = setting(True, read_if={"async_generation_ratio": ()})
    """Asynchronous rollout: weights are updated while samples are in flight, which go on with the new ones. false:
    every update waits until the samples in flight are finished."""
    student_train: WorkerConfig | None = None
    """On-policy distillation: the student's training role."""
    student_infer: WorkerConfig | None = None
    """On-policy distillation: the student's generating role."""
    teacher: dict[str, Any] | None = None
    """On-policy distillation: the teacher role or roles."""
    is_pure_opd: bool = False
    """On-policy distillation without rewards."""
    use_opd: bool = False
    """On-policy distillation in addition to rewards."""
    opd_kl_coef: float = setting(1.0, ge=0)
    """On-policy distillation: weight of the teacher's KL."""
    pure_opd_pipeline_type: Literal["rlvr", "agentic"] | None = None
    """On-policy distillation: the pipeline it runs on."""
