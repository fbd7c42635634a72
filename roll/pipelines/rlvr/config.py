"""The RLVR pipeline's configuration, and the plan of a run: batch arithmetic, lengths, passes, how far generation runs
ahead, and how all of it is derived. Assumes that the checks have passed or reports nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

from roll.config.data import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.model_files import model_number
from roll.config.pipelines import Written, find_own_modules
from roll.config.plan.planning import validation_data, validation_sampling, with_cache_length
from roll.config.reading.fields import parse_dotted_path, rules, setting
from roll.config.rewards import (
    JUDGE_ROLE,
    RewardConfig,
    judge_length,
    judge_role,
    judged_domains,
    model_inputs,
    own_judges,
    reward_workers,
)
from roll.config.roles import (
    DataArguments,
    GeneratingArguments,
    GenerationWorkerConfig,
    StrategyArguments,
    WorkerConfig,
)
from roll.config.strategies.base import own_weights
from roll.config.strategies.registry import with_engine_size
from roll.methods.policy_plan import PolicyConfig, PolicyPlan, finished_policy, looks_at_samples, policy_roles
from roll.rewards.base import RewardOptionError
from roll.rewards.registry import concurrent_calls
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


@dataclass(frozen=True)
class ValidationSet:
    """One set of questions, and how they are answered."""

    name: str  # empty for the set of `validation.data_args`
    data_args: DataArguments  # columns and template that the set leaves out are filled in
    generating_args: GeneratingArguments
    prompt_length: int
    sequence_length: int
    max_new_tokens: int
    samples_per_prompt: int
    greedy: bool  # every question is also answered greedily


@dataclass(frozen=True)
class RLVRPlan(PolicyPlan):
    prompt_length: int
    response_length: int
    validation_sets: tuple[ValidationSet, ...]
    needs_greedy_baseline: bool  # every prompt is also answered greedily, for the advantages

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence that an engine meets, validation included."""
        # The 0 is for runs without sets: max() of a single number would look for its items.
        return max(self.sequence_length, *(one.sequence_length for one in self.validation_sets), 0)


def validation_sets(config: RLVRConfig, sequence_length: int, written: Written) -> tuple[ValidationSet, ...]:
    """The set of ``validation.data_args``, if it has files, and those of ``validation.sets``."""
    section = config.validation
    if section is None:
        return ()
    data = validation_data("validation.data_args", section.data_args, config.actor_train.data_args, written)
    common = ValidationSetConfig(data, section.generating_args, section.greedy)
    found = [planned_set("", common, config, sequence_length)] if data.file_name else []
    for name, own in section.sets.items():
        key = f"validation.sets.{name}"
        filled = replace(
            own,
            data_args=validation_data(f"{key}.data_args", own.data_args, data, written),
            generating_args=validation_sampling(
                f"{key}.generating_args", own.generating_args, section.generating_args, written
            ),
            greedy=section.greedy if own.greedy is None else own.greedy,
        )
        found.append(planned_set(name, filled, config, sequence_length))
    return tuple(found)


def sharing_roles(roles: Mapping[str, WorkerConfig]) -> dict[str, list[str]]:
    """The roles that answer or score questions and share devices, each with the roles that it shares them with. None
    of them can work at any time."""
    devices = {name: set(role.device_mapping or ()) for name, role in roles.items()}
    sharing = {name: [other for other in roles if other != name and devices[name] & devices[other]] for name in roles}
    return {name: others for name, others in sharing.items() if others and not looks_at_samples(name)}


def validates_concurrently(config: RLVRConfig, roles: Mapping[str, WorkerConfig]) -> bool:
    """True if validation runs while ``roles`` train: where devices allow it, unless the file says no. The program
    of a harness needs the engines to itself."""
    section = config.validation
    if section is None or section.concurrent is False or section.harness is not None:
        return False
    return not sharing_roles(roles)


def planned_set(name: str, filled: ValidationSetConfig, config: RLVRConfig, sequence_length: int) -> ValidationSet:
    prompt = filled.prompt_length or config.val_prompt_length or config.prompt_length
    sequence = filled.sequence_length or config.val_sequence_length or sequence_length
    room, arguments = sequence - prompt, filled.generating_args
    return ValidationSet(
        name=name,
        data_args=filled.data_args,
        generating_args=arguments,
        prompt_length=prompt,
        sequence_length=sequence,
        max_new_tokens=min(room, arguments.max_new_tokens or room),
        samples_per_prompt=arguments.num_return_sequences or 1,
        greedy=bool(filled.greedy),
    )


def model_roles(config: RLVRConfig) -> dict[str, WorkerConfig]:
    """The sections of roles that hold a model and that this run starts."""
    roles = policy_roles(config)
    if config.reward_model is not None and (judged_domains(config.rewards) or model_inputs(config.rewards)):
        roles[JUDGE_ROLE] = with_engine_size(config.reward_model)
    return roles | {name: with_engine_size(role) for name, role in own_judges(config.rewards).items()}


def reward_roles(config: RLVRConfig) -> dict[str, WorkerConfig]:
    """The sections of the reward domains, whose workers hold no model."""
    return {f"rewards.{name}": reward_workers(name, role) for name, role in config.rewards.items()}


def started_roles(config: RLVRConfig) -> dict[str, WorkerConfig]:
    """Every role whose workers this run starts."""
    return model_roles(config) | reward_roles(config)


def max_new_tokens(config: RLVRConfig) -> int:
    response = config.response_and_sequence[0]
    return min(response, config.actor_infer.generating_args.max_new_tokens or response)


def finished(config: RLVRConfig, longest: int, name: str, section: WorkerConfig) -> WorkerConfig:
    """The section of a role as its workers get it; ``longest``: tokens of the longest sequence that an engine meets,
    validation included."""
    if isinstance(section, RewardConfig):
        domain, calls = name.removeprefix("rewards."), None
        find_own_modules()  # the reward may be a module in the working directory
        with suppress(RewardOptionError):  # of a reward that cannot be built, which `roll.preflight` refuses
            calls = concurrent_calls(domain, section)
        return replace(section, name=domain, max_concurrency=calls)
    if name in judge_roles(config):
        positions = model_number(section.model_args.model_name_or_path, "max_position_embeddings")
        return own_weights(with_cache_length(section, judge_length(longest, positions)))
    return finished_policy(name, section, config, longest)


def judge_roles(config: RLVRConfig) -> set[str]:
    """The roles whose engines answer judges."""
    judging = {judge_role(name, section) for name, section in config.rewards.items()}
    return {role for role in judging if role is not None}
