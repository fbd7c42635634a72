"""The plan of an agentic run: how each environment is played, and the sentences of ``roll check``. Reports no mistakes
itself; the checks do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roll.agents.agent_options import Context, asks_the_run
from roll.agents.programs import is_taskset, taskset_options
from roll.config.model_files import model_number
from roll.config.pipelines import Written
from roll.config.plan.planning import with_cache_length
from roll.config.reading.errors import count
from roll.config.rewards import judge_length
from roll.config.roles import GeneratingArguments, WorkerConfig
from roll.config.strategies.base import own_weights
from roll.config.strategies.registry import with_engine_size
from roll.methods.policy_plan import PolicyPlan, finished_policy, policy_roles
from roll.pipelines.agentic.config import AgenticConfig, CustomEnvConfig, EnvManagerConfig, Samples

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


def played_sentence(plan: AgenticPlan, manager: ManagerPlan, of: str) -> str:
    size = f"{manager.group_size}" + (f" + {manager.redundancy}" if manager.redundancy else "")
    shares = ", ".join(f"{tag} {number}" for tag, number in manager.groups_by_tag.items())
    tokens = 0.0
    for tag, number in manager.groups_by_tag.items():
        entry = plan.entries[tag]
        most = entry.turns * entry.new_tokens
        # Where everything is kept, an episode samples no more than one conversation has room for.
        most = min(most, plan.sequence_length) if entry.context == "append" else most
        tokens += manager.episodes * number / manager.num_groups * most
    total = f"{count(manager.groups, 'task')} x {manager.group_size} = {count(manager.episodes, 'episode')} a {of}"
    at_a_time = f"{count(manager.num_groups, 'group')} of {size} at a time ({shares})"
    return f"{total}, at most {tokens:,.0f} new tokens; {at_a_time}"


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


def norm_types(config: AgenticConfig) -> tuple[str | None, str | None]:
    """``norm_mean_type`` and ``norm_std_type`` of the rewards, from ``reward_normalization`` where it is set."""
    section = config.reward_normalization
    if section is None:
        return config.norm_mean_type, config.norm_std_type
    kind = "group" if section.grouping == "traj_group_id" else "batch"
    if section.norm_mean_type is not None or section.norm_std_type is not None:
        kinds = {None: None, "group": kind, "batch": "batch"}
        return kinds[section.norm_mean_type], kinds[section.norm_std_type]
    method = section.method or "identity"
    return (None if method == "identity" else kind), (kind if method in ("mean_std", "asym_clip") else None)


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
