"""The agentic pipeline's configuration: reinforcement learning from episodes in environments, with tools or agents; and
the plan of a run, how each environment is played. Reports no mistakes itself; the checks do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.agents.agent_options import AGENTS, Context, ToolWrapperArguments, asks_the_run
from roll.agents.call_formats import TOOL_FORMATS
from roll.agents.programs import is_taskset, taskset_options
from roll.config.choices import traits
from roll.config.data import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.model_files import model_number
from roll.config.pipelines import Written
from roll.config.plan.planning import with_cache_length
from roll.config.reading.fields import parse_dotted_path, rules, setting
from roll.config.rewards import FilterConfig, judge_length
from roll.config.roles import (
    DataArguments,
    GeneratingArguments,
    GenerationWorkerConfig,
    StrategyArguments,
    WorkerConfig,
)
from roll.config.strategies.base import own_weights
from roll.config.strategies.registry import with_engine_size
from roll.methods.policy_plan import PolicyConfig, PolicyPlan, finished_policy, policy_roles

NORMALIZATIONS = ("identity", "mean", "mean_std", "asym_clip")
GROUPINGS = ("batch", "tags", "traj_group_id")
TOOL_IDS = ("python_code", "search", "mcp")
Samples = Literal["trajectory", "step"]  # a row of the batch: a whole conversation, or one model call with its prompt


@dataclass(frozen=True)
class EnvManagerConfig(WorkerConfig):
    """``train_env_manager`` and ``val_env_manager``: which environments are played, and how many of them at a time.

    Of a role's keys only ``generating_args`` and ``system_envs`` count; the engines are those of ``actor_infer``.
    ``system_envs`` are for environments in processes of their own (``max_env_num_per_worker``).
    """

    strategy_args: StrategyArguments = field(default_factory=lambda: StrategyArguments(strategy_name="hf_infer"))
    """Has no effect: the engines are those of ``actor_infer``."""
    num_env_groups: int = setting(128, ge=1)
    """Groups of episodes that are played at a time."""
    group_size: int = setting(1, ge=1)
    """Episodes of a group: the same task with the same seed, which share a baseline."""
    group_size_redundancy: int = setting(0, ge=0)
    """Further episodes of every group: the first ``group_size`` to end well count, the others are dropped."""
    tags: list[str] = field(default_factory=list)
    """Which of ``custom_envs`` are played."""
    num_groups_partition: list[int] = field(default_factory=list)
    """Groups of each tag, which sum to ``num_env_groups``; empty: equal shares."""
    max_env_num_per_worker: int = setting(0, ge=0)
    """Most environments of one process; 0: all in the driver."""
    group_filter_cls: str | None = field(default=None, metadata=rules(parse=parse_dotted_path, example="~"))
    """Dotted path of your own class with ``filter(group_id, episode_id, group) -> bool``: true replaces the group by
    another."""
    group_filter_config: FilterConfig = field(default_factory=FilterConfig)
    """Which groups are kept for training, by the rewards of their episodes; others are played in place of the rest."""


@dataclass(frozen=True)
class RewardNormalizationConfig:
    """``reward_normalization``: how the rewards of episodes are compared with one another."""

    grouping: str = setting("batch", choices=GROUPINGS)
    """Which rewards are normalised together: of the ``batch``, of an environment (``tags``) or of a group
    (``traj_group_id``)."""
    method: str | None = setting(None, choices=NORMALIZATIONS)
    """``identity``: rewards stay as they are; ``mean``: less their mean; ``mean_std``: divided by their spread as well.
    ``asym_clip`` is ``mean_std``. null: as the next two say."""
    norm_mean_type: Literal["batch", "group"] | None = None
    """Mean taken off: of the ``batch``, of the ``group`` (what ``grouping`` says) or none. Before ``method``."""
    norm_std_type: Literal["batch", "group"] | None = None
    """Spread divided by, likewise. Before ``method``."""


@dataclass(frozen=True)
class ToolArgumentsConfig:
    """An entry of ``custom_envs.<tag>.tool_wrapper.tool_configs``."""

    tool_id: str = setting("python_code", choices=TOOL_IDS, dotted_path=True)
    """``python_code``, ``search``, ``mcp``, or the dotted path of a function of your own."""
    tool_args: dict[str, Any] = field(default_factory=dict)
    """Options of the tool."""


@dataclass(frozen=True)
class ToolWrapperConfig:
    """``custom_envs.<tag>.tool_wrapper``: tools whose calls stand in the text of a response, around an environment."""

    wrapper_args: ToolWrapperArguments = field(default_factory=ToolWrapperArguments)
    """Rewards and largest number of tool calls."""
    tool_configs: list[ToolArgumentsConfig] = field(default_factory=list)
    """The tools."""


@dataclass(frozen=True)
class CustomEnvConfig:
    """``custom_envs.<tag>``: an environment, or an agent of your own, and how it is played."""

    env_type: str | None = None
    """``frozen_lake``, ``sokoban`` and the other built-in names; ``gem:ID``, ``gymnasium:ID``,
    ``textarena:ID``, ``reasoning_gym:NAME``, ``skyrl:ID``, ``openenv:URL``, ``verifiers:ID``; or the dotted path of
    a class of your own."""
    env_config: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment; checked by the environment itself. Of ``verifiers:ID``: ``python``, the interpreter
    that has the package, ``select``, which tasks, and the package's own section ``env``."""
    agent: str | None = setting(None, choices=AGENTS, dotted_path=True, plugins="agents")
    """In place of ``env_type``, who works on the task: ``tools`` (the policy with tools), ``black_box`` (a program that
    speaks to the policy over HTTP), ``verl`` (verl's loop with its tools and interactions), or the dotted path of a
    coroutine ``run(task, model)``."""
    agent_config: dict[str, Any] = field(default_factory=dict)
    """Options of the agent; of a coroutine its keyword arguments."""
    tools: list[Any] = field(default_factory=list)
    """Short for ``agent: tools`` with ``agent_config.tools``: ``python``, ``search`` and ``mcp`` with their options,
    or dotted paths of functions."""
    command: str | list[str] | None = None
    """Short for ``agent: black_box`` with ``agent_config.command``: the program and its arguments."""
    verifier: dict[str, Any] = field(default_factory=dict)
    """Short for ``agent_config.verifier``: the reward of an answer, by ``worker_cls``, ``reward_kwargs`` and
    ``answer_key``, or by a ``command``. Of an environment: a reward of whole episodes in addition to its own.
    ``scores`` (``answer``, ``episode``, ``solution``) says what is judged."""
    tool_format: str | None = setting(None, choices=tuple(TOOL_FORMATS))
    """Format of the model's tool calls; null: that of its chat template."""
    env_manager_cls: str | None = field(default=None, metadata=rules(parse=parse_dotted_path, example="~"))
    """Class path in ROLL's files that says what ``context`` and ``samples`` say here."""
    agent_system_template: str | None = None
    """System message of every conversation; null or empty: none."""
    agent_template: str | None = None
    """Text of a turn, a format string; null: the observation alone. With ``context: append`` and ``last``:
    ``{observation} {turn_idx} {suffix} {actions_left} {max_response_length}``; with ``observation``:
    ``{env_instruction} {history} {step_count} {history_length} {current_step} {current_observation}``."""
    max_steps: int = setting(10, ge=1)
    """Model calls of an episode."""
    max_tokens_per_step: int = setting(128, ge=1)
    """Most tokens of a response. ``actor_infer.generating_args.max_new_tokens`` counts where it is smaller."""
    history_length: int = setting(5, ge=0)
    """Turns that ``context: observation`` and ``last`` remember."""
    use_thread_lock: bool = False
    """One call of ``reset`` or ``step`` at a time in a process, as ``max_env_step_concurrent: 1``."""
    max_env_step_concurrent: int = setting(0, ge=0)
    """Most calls of ``reset`` and ``step`` at a time in a process, for this tag; 0: no limit."""
    context: Context | None = None
    """Contents of a prompt: ``append``: everything so far; ``observation``: the current observation and the last turns,
    in ``agent_template``; ``last``: the last turns as messages; ``own``: the messages that the environment returns;
    ``response``: everything so far as one message of the policy, with raw observations. null: as ``env_manager_cls``
    says, else ``append``."""
    samples: Samples | None = None
    """A row of the batch: a whole conversation (``trajectory``), or one model call with its prompt (``step``). null: as
    ``env_manager_cls`` says, else by ``context``: ``trajectory`` with ``append`` and ``response``."""
    data_args: DataArguments | None = None
    """Tasks from a data set: ``reset`` is given a row as ``task``, an agent has it as ``task.row``."""
    time_limit: float | None = setting(None, gt=0)
    """Seconds of a whole episode; null: none."""
    reset_timeout: float = setting(60.0, gt=0)
    """Seconds that a call of ``reset`` may take, the start of the environment's process with it."""
    step_timeout: float = setting(60.0, gt=0)
    """Seconds that a call of ``step`` may take."""
    thinking: Literal["keep", "new_sample"] = "keep"
    """Where the chat template drops thoughts of earlier turns: ``keep`` them in the ids, or begin a ``new_sample``."""
    tool_wrapper: ToolWrapperConfig | None = None
    """Tools around the environment, in ROLL's form."""
    config: dict[str, Any] = field(default_factory=dict)
    """Options of agents in sandboxes, in ROLL's files."""
    pre_step_template: str | None = None
    """Without ``agent_template``: the text of a turn before the observation, with the same names."""
    next_step_template: str | None = None
    """Without ``agent_template``: the text of a turn after the observation, with the same names."""


@dataclass(frozen=True)
class AgenticConfig(PolicyConfig):
    """Configuration of an agentic run. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    group_key: ClassVar[str] = "train_env_manager.group_size"

    rollout_batch_size: int = setting(128, ge=1)
    """Episodes of one step, a multiple of ``train_env_manager.group_size``."""
    val_batch_size: int = setting(128, ge=1, read_if={"val_env_manager": ()})
    """Episodes of one validation, a multiple of ``val_env_manager.group_size``."""
    val_before_train: bool = setting(True, read_if={"val_env_manager": ()})
    """Validate before the first step."""
    sequence_length: int = setting(1024, ge=2)
    """Most tokens of a conversation: prompt and response of its longest model call."""
    global_template: str | None = setting(None, choices=TEMPLATES, endings=TEMPLATE_ENDINGS)
    """Chat template of all roles; null: ``actor_train.data_args.template``, else the model's own."""
    train_env_manager: EnvManagerConfig = field(default_factory=EnvManagerConfig)
    """The environments of training."""
    val_env_manager: EnvManagerConfig | None = None
    """The environments of validation; null: none."""
    custom_envs: dict[str, CustomEnvConfig] = field(default_factory=dict)
    """Environments and agents by tag."""
    reward: GenerationWorkerConfig | None = None
    """Engines that judge episodes, where a ``verifier`` asks them: ``worker_cls: llm_judge`` with
    ``reward_kwargs.model_type: cluster``."""
    reward_normalization: RewardNormalizationConfig | None = None
    """Normalisation of the rewards of episodes; null: as ``norm_mean_type`` and ``norm_std_type`` say."""
    train_roles: list[str] = field(default_factory=list)
    """Roles of agents that speak in several (``model.as_(role)``) whose calls are trained; empty: all. What others say
    is context."""
    bootstrap_truncated: bool = setting(True, read_if={"critic": ()})
    """Episodes that a limit has ended are bootstrapped with the critic's value of their last state; false: they count
    as ended."""
    partial_gpu_mode: bool = True
    """Asynchronous rollout with engines on the trainer's devices and on others."""

    @property
    def group_size(self) -> int:
        return self.train_env_manager.group_size

    @property
    def samples_per_step(self) -> int:
        return self.rollout_batch_size

    @property
    def longest_sequence(self) -> int:
        return self.sequence_length + self.bootstraps

    @property
    def bootstraps(self) -> bool:
        """The critic looks one token further."""
        return self.bootstrap_truncated and traits(self.estimator).needs_values


REWARD = "reward"  # the role that judges episodes


@dataclass(frozen=True)
class EntryPlan:
    """An entry of ``custom_envs`` with its settings resolved."""

    tag: str
    section: CustomEnvConfig
    context: Context  # contents of a prompt
    samples: Samples  # a row of the batch
    turns: int  # most model calls of an episode
    new_tokens: int  # most tokens of a response
    seconds: float | None  # duration of a whole episode; None: unlimited
    agent: str | None  # agent that works on the task; None: the section's environment is played
    agent_config: dict[str, Any]  # arguments of the agent
    concurrent: int | None  # most calls of `reset` and `step` at a time; None: no limit


@dataclass(frozen=True)
class ManagerPlan:
    """``train_env_manager`` or ``val_env_manager``."""

    section: EnvManagerConfig
    groups_by_tag: dict[str, int]  # number of groups of each tag that are played at a time
    group_size: int
    redundancy: int  # additional episodes of a group; the last ones to end are dropped
    episodes: int  # episodes of one step, or one validation
    generating_args: GeneratingArguments

    @property
    def num_groups(self) -> int:
        """Groups at a time."""
        return sum(self.groups_by_tag.values())

    @property
    def groups(self) -> int:
        """Groups of one step, or one validation."""
        return self.episodes // self.group_size


@dataclass(frozen=True)
class AgenticPlan(PolicyPlan):
    """Plan of an agentic run. A prompt of :class:`PolicyPlan` is a task, a sample an episode."""

    entries: dict[str, EntryPlan]  # the environments that are played, by tag
    train: ManagerPlan
    validation: ManagerPlan | None
    normalizes_by_tag: bool  # rewards are normalised separately for each environment (`grouping: tags`)


PlayedAs = tuple[Context, Samples]
# What the classes of ROLL's files imply.
MANAGERS: dict[str, PlayedAs] = {
    "TrajEnvManager": ("append", "trajectory"),
    "StepEnvManager": ("observation", "step"),
    "StepConcatEnvManager": ("last", "step"),
    "AgentNativeStepEnvManager": ("own", "step"),
    "ProxyEnvManager": ("append", "trajectory"),
    "VLTrajEnvManager": ("append", "trajectory"),
}


def played_as(section: CustomEnvConfig) -> PlayedAs:
    """Context and samples of an entry: its own keys, else its ``env_manager_cls``."""
    name = (section.env_manager_cls or "TrajEnvManager").rpartition(".")[2]
    context, samples = MANAGERS.get(name, MANAGERS["TrajEnvManager"])
    if name == "StepConcatEnvManager" and re.search(r"{(history|current_observation)}", section.agent_template or ""):
        context, samples = MANAGERS["StepEnvManager"]
    if name == "ProxyEnvManager" and section.config.get("trajectory_mode") == "step":
        samples = "step"
    if section.context is not None:
        context, samples = section.context, "trajectory" if section.context in ("append", "response") else "step"
    return context, section.samples or samples


def agent_of(section: CustomEnvConfig) -> tuple[str | None, dict[str, Any]]:
    """The agent of an entry (None: an environment), and its options with the short keys merged in."""
    options, command = dict(section.agent_config), section.command
    if is_taskset(section.env_type):
        played = taskset_options(section.env_type or "", section.env_config, section.max_steps)
        return "black_box", played | options
    if section.tools:
        options["tools"] = section.tools
    if command is not None:
        options["command"] = shlex.split(command) if isinstance(command, str) else command
    if section.verifier:
        options["verifier"] = section.verifier
    short = "tools" if section.tools else "black_box" if command is not None else None
    return section.agent or short, options


def partition(section: EnvManagerConfig) -> dict[str, int]:
    """Groups of each tag: as written, else equal shares, with the remainder going to the first tags."""
    if section.num_groups_partition:
        return dict(zip(section.tags, section.num_groups_partition, strict=True))
    share, rest = divmod(section.num_env_groups, max(1, len(section.tags)))
    return {tag: share + (index < rest) for index, tag in enumerate(section.tags)}


def managers(config: AgenticConfig) -> Iterator[tuple[str, EnvManagerConfig, int]]:
    """Key, section and episodes of training, and of validation where there is one."""
    yield "train_env_manager", config.train_env_manager, config.rollout_batch_size
    if config.val_env_manager is not None:
        yield "val_env_manager", config.val_env_manager, config.val_batch_size


def used_entries(config: AgenticConfig) -> dict[str, CustomEnvConfig]:
    tags = dict.fromkeys(tag for _, section, _ in managers(config) for tag in section.tags)
    return {tag: config.custom_envs[tag] for tag in tags if tag in config.custom_envs}


def training_sampling(config: AgenticConfig, written: Written) -> GeneratingArguments:
    """Sampling of training episodes: ``actor_infer.generating_args``, else those of ``train_env_manager``."""
    if written("actor_infer.generating_args"):
        return config.actor_infer.generating_args
    return config.train_env_manager.generating_args


def entry_plan(config: AgenticConfig, tag: str, most_new_tokens: int | None) -> EntryPlan:
    section = config.custom_envs[tag]
    context, samples = played_as(section)
    agent, agent_config = agent_of(section)
    # A response leaves room for one token of prompt at least.
    new_tokens = min(section.max_tokens_per_step, config.sequence_length - 1)
    return EntryPlan(
        tag=tag,
        section=section,
        context=context,
        samples=samples,
        turns=section.max_steps,
        new_tokens=new_tokens if most_new_tokens is None else min(new_tokens, most_new_tokens),
        seconds=section.time_limit,
        agent=agent,
        agent_config=agent_config,
        concurrent=1 if section.use_thread_lock else section.max_env_step_concurrent or None,
    )


def model_roles(config: AgenticConfig) -> dict[str, WorkerConfig]:
    """The sections of roles that hold a model and that this run starts."""
    roles = policy_roles(config)
    if config.reward is not None and judged_entries(config):
        roles[REWARD] = with_engine_size(config.reward)
    return roles


def judged_entries(config: AgenticConfig) -> list[str]:
    """The tags whose verifiers ask the role ``reward``."""
    verifiers = {tag: agent_of(section)[1].get("verifier") for tag, section in used_entries(config).items()}
    return [tag for tag, verifier in verifiers.items() if isinstance(verifier, dict) and asks_the_run(verifier)]


def finished(config: AgenticConfig, name: str, section: WorkerConfig) -> WorkerConfig:
    """The section of a role as its workers get it, with engines that have room for the longest conversation."""
    if name == REWARD:
        positions = model_number(section.model_args.model_name_or_path, "max_position_embeddings")
        return own_weights(with_cache_length(section, judge_length(config.sequence_length, positions)))
    return finished_policy(name, section, config, config.sequence_length)
