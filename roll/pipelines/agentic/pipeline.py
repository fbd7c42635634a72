"""The agentic pipeline: reinforcement learning from episodes, in which agents work on tasks through the engines.

The steps of training are those that all policy pipelines share; the rollout turns tasks into a batch of episodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.agents.episode import EpisodeGroup, Task
from roll.config.loader import LoadedConfig
from roll.distributed import DriverLoop, ResourceManager
from roll.environments.off_loop import EnvironmentProcesses
from roll.methods.episodes import EpisodeMethod
from roll.pipelines.agentic.config import AgenticConfig, EnvManagerConfig
from roll.pipelines.agentic.metrics import dumped_episodes, episode_metrics, token_checks, validation_metrics
from roll.pipelines.agentic.plan import REWARD, AgenticPlan, ManagerPlan
from roll.pipelines.agentic.players import (
    TaskSource,
    build_players,
    close_agents,
    fitting_rows,
    read_data,
    tags_in_order,
)
from roll.pipelines.agentic.preflight import own_group_filter
from roll.pipelines.batches import RecordedRollouts
from roll.pipelines.clusters import Clusters, StartingClusters, start_policy_clusters
from roll.pipelines.engine_rollout import RolloutSource
from roll.pipelines.files import load_tokenizer, pad_token_id
from roll.pipelines.policy_pipeline import PolicyPipeline
from roll.pipelines.sample_records import Notes, episode_notes
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.rollout.engines import EngineClient
from roll.rollout.episode_batch import build_episode_batch
from roll.rollout.episodes import EpisodeCodec, EpisodeFlow, EpisodeSettings, Player
from roll.rollout.filters import build_filter
from roll.rollout.rewarding import SampleQuarantine
from roll.rollout.scheduling import collected
from roll.tracking import SampleTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLICE_SECONDS = 0.02
"""Duration of an engine's turn: short, since agents wait for their next observation."""


@dataclass(frozen=True)
class EpisodeData:
    """Environments and agents of a run."""

    tokenizer: PreTrainedTokenizerBase
    players: dict[str, Player]
    validation_players: dict[str, Player]
    tasks: TaskSource
    validation_tasks: TaskSource | None
    processes: list[EnvironmentProcesses]
    """Processes of environments that do not live in the driver."""
    shared: list[Any]
    """Agents without an environment, tools around environments and their verifiers."""


def load_episode_data(
    config: AgenticConfig,
    plan: AgenticPlan,
    tokenizer: PreTrainedTokenizerBase,
    judge: Mapping[str, str] | None = None,
) -> EpisodeData:
    """Build environments and agents, and read chat templates and data sets.

    Args:
        judge: address and key of the role ``reward``, for verifiers.

    Raises:
        DataError: a file that cannot be read.
        TemplateError: a chat template whose conversations cannot grow.
    """
    validation = plan.validation
    processes: list[EnvironmentProcesses] = []
    shared: dict[str, Any] = {}
    players = build_players(config, plan, plan.train, tokenizer, processes, shared, judge)
    others = {} if validation is None else build_players(config, plan, validation, tokenizer, processes, shared, judge)
    data, in_order = fitting_rows(read_data(plan), players | others), tags_in_order(plan)
    return EpisodeData(
        tokenizer,
        players,
        others,
        TaskSource(plan.train, f"train/{config.seed}", data, in_order),
        # Without the run's seed: runs of other seeds are validated on the same tasks.
        None if validation is None else TaskSource(validation, "validation", data, in_order),
        processes,
        list(shared.values()),
    )


@dataclass(frozen=True)
class EpisodeValidation:
    """The episodes of a validation."""

    groups: list[EpisodeGroup]
    seconds: float


class EpisodeSource(RolloutSource[Task, EpisodeGroup, EpisodeValidation]):
    """Tasks, on each of which a group of episodes is played; seeds depend on the number of tasks drawn so far."""

    flow: EpisodeFlow
    filter_key = "train_env_manager.group_filter_config"
    filtered_metric = "scheduler/group_filter_count"

    def __init__(self, config: AgenticConfig, plan: AgenticPlan, data: EpisodeData, engines: EngineClient) -> None:
        self._config, self._plan, self._data, self._engines = config, plan, data, engines
        train, keeps = plan.train, group_filter(plan.train.section, config.train_roles)
        settings = EpisodeSettings(train.group_size, f"{config.seed}/", train.redundancy, train.num_groups, keeps=keeps)
        quarantine = SampleQuarantine(plan.log_dir)
        self.flow = EpisodeFlow(engines, data.tasks.draw, data.players, settings, 0, quarantine)
        self.codec = EpisodeCodec(data.players)
        self._counts_before = dict(self.flow.counts)
        self._prompts_before = (0, 0)

    def batch(self, groups: list[EpisodeGroup], driver: DriverLoop) -> tuple[DataProto, Metrics]:
        batch = build_episode_batch(
            groups,
            {tag: entry.samples for tag, entry in self._plan.entries.items()},
            pad_token_id(self._data.tokenizer),
            roles=self._config.train_roles or None,
            on_error=self._config.failed_episodes,
            bootstrap=self._config.bootstraps,
        )
        metrics = episode_metrics(groups) | token_checks(batch, groups) | self._flow_metrics() | self._prefix_hits()
        return batch, metrics

    def _flow_metrics(self) -> Metrics:
        """Episodes since the last step by their end, quarantined samples, and processes that died."""
        before, now = self._counts_before, dict(self.flow.counts)
        self._counts_before = now
        metrics: Metrics = {
            f"scheduler/episodes_{name}": Mean(now.get(name, 0) - before.get(name, 0))
            for name in ("ended", "retried", "cancelled")
        }
        if quarantined := self.flow.quarantine.num_samples:
            metrics["scheduler/set_aside_samples"] = Mean(quarantined)
        return metrics | {"env/process_deaths": Mean(sum(one.num_deaths for one in self._data.processes))}

    def _prefix_hits(self) -> Metrics:
        """Share of the prompts' tokens since the last step that came from a prefix cache, where engines count it."""
        sent = self._engines.prompt_tokens - self._prompts_before[0]
        reused = self._engines.reused_tokens - self._prompts_before[1]
        self._prompts_before = self._engines.prompt_tokens, self._engines.reused_tokens
        return {"engine/prefix_hit": Mean(float(reused), sent)} if sent else {}

    def close(self, driver: DriverLoop) -> None:
        """End agents, tasks and environments' processes; a second call does nothing."""
        if driver.is_closed:
            return
        with ExitStack() as stack:  # all of it, also where an agent of the user's raises
            for processes in self._data.processes:
                stack.callback(processes.close)
            stack.callback(driver.close)
            driver.run(close_agents(self._data.shared))

    def validation(self) -> Coroutine[Any, Any, EpisodeValidation]:
        """Play the same tasks with the same seeds each time: two validations differ by the policy alone."""
        manager = self._plan.validation
        assert manager is not None and self._data.validation_tasks is not None
        return self._validate(manager, self._data.validation_tasks)

    async def _validate(self, manager: ManagerPlan, tasks: TaskSource) -> EpisodeValidation:
        began = time.perf_counter()
        numbers = iter(range(manager.groups))
        flow = EpisodeFlow(
            self._engines,
            # range() first: the other way round zip would take a number more than it returns.
            lambda count: [tasks.task(number) for _, number in zip(range(count), numbers, strict=False)],
            self._data.validation_players,
            EpisodeSettings(manager.group_size, "validation/", manager.redundancy, manager.num_groups),
            0,
        )
        result = await collected(flow, manager.groups, 0, self._config.rpc_timeout)
        return EpisodeValidation(result.groups, time.perf_counter() - began)

    def table(self, groups: Sequence[EpisodeGroup]) -> SampleTable:
        players = self._data.validation_players | self._data.players
        templates = {tag: player.template for tag, player in players.items()}
        return dumped_episodes(groups, templates, self._plan.dump_dir)

    def notes(self, groups: Sequence[EpisodeGroup]) -> Notes:
        return episode_notes(groups)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._data.tasks.num_drawn = int(state["num_drawn"])


def group_filter(section: EnvManagerConfig, roles: Collection[str] = ()) -> Callable[[EpisodeGroup], bool]:
    """Combine ``group_filter_config`` and ``group_filter_cls``: true for groups that both keep.

    Where episodes have several roles, a group is kept if the scores of any trained role are: those of opponents may sum
    to zero.

    Args:
        roles: trained roles; empty: all.
    """
    keep = build_filter(section.group_filter_config.type, section.group_filter_config.filter_args)
    own = None if section.group_filter_cls is None else own_group_filter(section.group_filter_cls)

    def keeps(group: EpisodeGroup) -> bool:
        found = {call.role for episode in group.episodes for call in episode.calls}
        trained: list[str | None] = [None]
        if len(found) > 1:
            trained = [*sorted(found & set(roles) if roles else found)]
        if not any(keep(np.array(group.scores(role) or [np.nan], dtype=np.float32)) for role in trained):
            return False
        identity = f"{group.task.tag}_{group.task.seed}"
        return own is None or not own.filter(identity, group.order, group.episodes)

    return keeps


class AgenticPipeline(PolicyPipeline[AgenticConfig, AgenticPlan, EpisodeValidation]):
    """A run, from start to summary."""

    slice_seconds = SLICE_SECONDS
    router = "EnvAffinityRouter"

    def __init__(self, loaded: LoadedConfig[AgenticConfig]) -> None:
        config, plan = loaded.config, loaded.plan
        assert isinstance(plan, AgenticPlan)
        super().__init__(loaded, plan, RecordedRollouts(config, plan.output_dir, None))

    @property
    def temperature(self) -> float:
        sampling = self.plan.train.generating_args
        return sampling.temperature if sampling.do_sample else 1.0

    def start_clusters(self, resources: ResourceManager) -> StartingClusters[Clusters]:
        starting = start_policy_clusters(self.config, self.plan, resources, REWARD)
        judge = starting.clusters.judges.get(REWARD)
        self.judge = judge.options if judge is not None else None
        return starting

    def load_data(self) -> None:
        role = self.plan.roles["actor_train"]
        self.tokenizer = load_tokenizer(role.model_path, role.section.model_args.trust_remote_code)
        self.data = load_episode_data(self.config, self.plan, self.tokenizer, self.judge)

    def build_source(self, engines: EngineClient) -> EpisodeSource:
        return EpisodeSource(self.config, self.plan, self.data, engines)

    def build_method(self) -> EpisodeMethod:
        most = max(entry.turns * entry.new_tokens for entry in self.plan.entries.values())
        return EpisodeMethod(self.config, self.plan.norm_types, most, self.plan.normalizes_by_tag)

    def is_validation_due(self, step: int) -> bool:
        """Every ``eval_steps`` steps, the first before any training."""
        return self.validates and step % self.plan.eval_steps == 0

    @property
    def validates(self) -> bool:
        return self.plan.validation is not None and bool(self.plan.eval_steps)

    def report(self, validation: EpisodeValidation, step: int) -> None:
        self.context.record({"time/val_step_total": Mean(validation.seconds)})
        self.context.record_validation(validation_metrics(validation.groups), step)
        self.context.dump_samples("validation", step, partial(self.source.table, validation.groups))
