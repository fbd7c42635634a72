"""The plan of an agentic run: which environments are played how, and the sentences of ``roll check``."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from roll.config.plan.plan import RunAhead
from roll.config.reading.errors import count
from roll.config.roles import GeneratingArguments
from roll.pipelines.agentic.config import CustomEnvConfig, EnvManagerConfig
from roll.pipelines.policy import PolicyPlan

Context = Literal["append", "observation", "last", "own"]
Samples = Literal["trajectory", "step"]


@dataclass(frozen=True)
class EntryPlan:
    """An entry of ``custom_envs``, as it is played."""

    tag: str
    section: CustomEnvConfig
    context: Context
    """What a prompt holds."""
    samples: Samples
    """What a row of the batch is."""
    turns: int
    """Most model calls of an episode."""
    new_tokens: int
    """Most tokens of a response."""
    seconds: float | None
    """Of a whole episode."""
    agent: str | None
    """Who works on the task in place of an environment; None: the section's environment is played."""
    agent_config: dict[str, Any]
    """What the agent is made with."""
    concurrent: int | None
    """Most calls of ``reset`` and ``step`` at a time; None: no limit."""

    @property
    def most_rows(self) -> int:
        """Rows of an episode; conversations that branch leave more."""
        return self.turns if self.samples == "step" else 1


@dataclass(frozen=True)
class ManagerPlan:
    """``train_env_manager`` or ``val_env_manager``."""

    section: EnvManagerConfig
    groups_by_tag: dict[str, int]
    """Groups of each tag among ``num_groups``."""
    group_size: int
    redundancy: int
    """Further episodes of a group, of which the last to end are dropped."""
    episodes: int
    """Of one step, or one validation."""
    generating_args: GeneratingArguments

    @property
    def num_groups(self) -> int:
        """Groups at a time."""
        return sum(self.groups_by_tag.values())

    @property
    def places(self) -> int:
        """Episodes at a time."""
        return self.num_groups * (self.group_size + self.redundancy)

    @property
    def groups(self) -> int:
        """Of one step, or one validation."""
        return self.episodes // self.group_size

    @property
    def workers(self) -> int:
        """Processes that environments ask for with ``max_env_num_per_worker``."""
        most = self.section.max_env_num_per_worker
        return ceil(self.places / most) if most else 1


@dataclass(frozen=True)
class AgenticPlan(PolicyPlan):
    """Plan of an agentic run. A prompt of :class:`PolicyPlan` is a task, a sample an episode."""

    entries: dict[str, EntryPlan]
    """The environments that are played, by tag."""
    train: ManagerPlan
    validation: ManagerPlan | None
    normalizes_by_tag: bool
    """Rewards of each environment are normalised apart, as ``grouping: tags`` has it."""

    @property
    def max_sequence_length(self) -> int:
        """Longest conversation."""
        return self.sequence_length

    @property
    def most_rows(self) -> int:
        """Rows of one step, where no conversation branches."""
        shares = self.train.groups_by_tag
        rows = max(self.entries[tag].most_rows for tag in shares)
        return self.train.episodes * rows


def agentic_facts(plan: AgenticPlan) -> list[tuple[str, str]]:
    """Label and sentence of what only this pipeline has."""
    facts = [("episodes", _played(plan, plan.train, "step"))]
    if plan.validation is not None and plan.eval_steps:
        facts.append(("validation", _played(plan, plan.validation, "validation")))
    facts += [("environment", f"{entry.tag}: {_entry(entry, plan.sequence_length)}") for entry in plan.entries.values()]
    reference = "reference log-probs" + ("" if "reference" in plan.roles else " (actor_train without its adapters)")
    passes = {reference: plan.needs_reference, "old log-probs": plan.needs_old_log_probs, "values": plan.needs_critic}
    needed = ", ".join(name for name, needed in passes.items() if needed) or "none"
    facts.append(("passes", f"{needed} (in addition to generation and training)"))
    return [*facts, ("ahead", run_ahead_sentence(plan))] if plan.is_async else facts


def _played(plan: AgenticPlan, manager: ManagerPlan, of: str) -> str:
    size = f"{manager.group_size}" + (f" + {manager.redundancy}" if manager.redundancy else "")
    shares = ", ".join(f"{tag} {number}" for tag, number in manager.groups_by_tag.items())
    tokens = sum(
        manager.episodes * number / manager.num_groups * _most_new_tokens(plan.entries[tag], plan.sequence_length)
        for tag, number in manager.groups_by_tag.items()
    )
    total = f"{count(manager.groups, 'task')} x {manager.group_size} = {count(manager.episodes, 'episode')} a {of}"
    at_a_time = f"{count(manager.num_groups, 'group')} of {size} at a time ({shares})"
    return f"{total}, at most {tokens:,.0f} new tokens; {at_a_time}"


def _most_new_tokens(entry: EntryPlan, sequence_length: int) -> int:
    """Tokens that an episode can sample: its limits times its turns, within one conversation where all is kept."""
    most = entry.turns * entry.new_tokens
    return min(most, sequence_length) if entry.context == "append" else most


def _entry(entry: EntryPlan, sequence_length: int) -> str:
    seconds = f", {entry.seconds:g} s" if entry.seconds is not None else ""
    rows = "a row a conversation" if entry.samples == "trajectory" else "a row a turn"
    name = entry.section.env_type or f"agent {entry.agent}"
    limits = f"at most {count(entry.turns, 'turn')} of {entry.new_tokens} tokens, {sequence_length} tokens of context"
    return f"{name}; {limits}{seconds}; context {entry.context}, {rows}"


def batch_facts(plan: AgenticPlan) -> list[tuple[str, str]]:
    """Episodes divide into optimizer steps; the rows that they leave are what they are."""
    rows = f"{count(plan.train.episodes, 'episode')}, at most {count(plan.most_rows, 'row')}"
    return [
        ("batch" if name == "actor_train" else name, f"{rows}; {training.sentence()} (by episodes)")
        for name, training in plan.training.items()
    ]


def run_ahead_sentence(plan: AgenticPlan) -> str:
    """Say how far episodes may run ahead, and how old samples may be."""
    ahead = RunAhead.of(plan.async_generation_ratio, plan.prompts_per_step, plan.num_additional_prompts)
    steps = "1 step" if plan.async_generation_ratio == 1 else f"{plan.async_generation_ratio:g} steps"
    old = "; ratios against the engine's log-probs" if plan.engine_log_probs_as_old else ""
    groups = f"{count(ahead.capacity, 'group')} in flight or waiting at a time"
    return (
        f"episodes up to {steps}: {groups}; samples at most {count(ahead.max_lag, 'version')} of the weights old{old}"
    )
