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

from roll.agents.episode import EpisodeGroup
from roll.config.loader import LoadedConfig
from roll.config.plan.plan import RunAhead
from roll.distributed import ResourceManager
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
from roll.pipelines.engine_rollout import EngineRollout, RunsAhead
from roll.pipelines.files import load_tokenizer, pad_token_id
from roll.pipelines.policy_pipeline import PolicyPipeline
from roll.pipelines.sample_records import episode_notes
from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean, Metrics
from roll.rollout.episode_batch import build_episode_batch
from roll.rollout.episodes import EpisodeCodec, EpisodeFlow, EpisodeSettings, Player
from roll.rollout.filters import build_filter
from roll.rollout.replay import ReplayBuffer
from roll.rollout.rewarding import SampleQuarantine
from roll.rollout.scheduling import AsyncScheduler, collected
from roll.tracking import SampleTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLICE_SECONDS = 0.02
"""Duration of an engine's turn: short, since agents wait for their next observation."""
FILTER_KEY = "train_env_manager.group_filter_config"


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
        None if validation is None else TaskSource(validation, "validation", data, in_order),
        processes,
        list(shared.values()),
    )


@dataclass(frozen=True)
class EpisodeValidation:
    """The episodes of a validation."""

    groups: list[EpisodeGroup]
    seconds: float


class EpisodeRollout(EngineRollout[EpisodeValidation]):
    """Draws tasks and plays groups of episodes on them; seeds depend on the number of tasks drawn so far."""

    def __init__(self, config: AgenticConfig, plan: AgenticPlan, clusters: Clusters, data: EpisodeData) -> None:
        super().__init__(config, plan, clusters.actor_infer, SLICE_SECONDS, router="EnvAffinityRouter")
        self._config, self._plan, self._data = config, plan, data
        train, keeps = plan.train, group_filter(plan.train.section, config.train_roles)
        settings = EpisodeSettings(train.group_size, f"{config.seed}/", train.redundancy, train.num_groups, keeps=keeps)
        quarantine = SampleQuarantine(plan.log_dir)
        self._flow = EpisodeFlow(self._engines, data.tasks.draw, data.players, settings, 0, quarantine)
        self._counts_before = dict(self._flow.counts)
        self._prompts_before = (0, 0)

    def collect(self, step: int) -> tuple[DataProto, Callable[[], SampleTable], Metrics]:
        groups, metrics = self._groups_of(step)
        batch = build_episode_batch(
            groups,
            {tag: entry.samples for tag, entry in self._plan.entries.items()},
            pad_token_id(self._data.tokenizer),
            roles=self._config.train_roles or None,
            on_error=self._config.failed_episodes,
            bootstrap=self._config.bootstraps,
        )
        sampled = float(batch.batch["response_mask"].sum())
        context = float(batch.batch["attention_mask"].sum()) - sampled
        metrics |= self._size_metrics(len(batch), sampled, context) | self._loss_metrics()
        metrics |= episode_metrics(groups) | token_checks(batch, groups) | self._flow_metrics() | self._prefix_hits()
        templates = {tag: player.template for tag, player in self._data.players.items()}
        self.notes = partial(episode_notes, groups)
        return batch, partial(dumped_episodes, groups, templates, self._plan.dump_dir), metrics

    def _groups_of(self, step: int) -> tuple[list[EpisodeGroup], Metrics]:
        self._busy_before = self._engines.busy_seconds

        async def collect() -> Any:
            deadline = self._config.rpc_timeout
            result = await collected(self._flow, self._plan.prompts_per_step, 0, deadline, rejected_by=FILTER_KEY)
            await self._engines.drain()
            return result

        result = self.driver.run(collect())
        return result.groups, {
            "scheduler/collect_query_count": Mean(result.num_drawn),
            "scheduler/query_use_count": Mean(len(result.groups)),
            "scheduler/group_filter_count": Mean(result.num_filtered),
            "scheduler/aborted_query_count": Mean(result.num_aborted),
        }

    def _flow_metrics(self) -> Metrics:
        """Episodes since the last step by their end, quarantined samples, and processes that died."""
        before, now = self._counts_before, dict(self._flow.counts)
        self._counts_before = now
        metrics: Metrics = {
            f"scheduler/episodes_{name}": Mean(now.get(name, 0) - before.get(name, 0))
            for name in ("ended", "retried", "cancelled")
        }
        if quarantined := self._flow.quarantine.num_samples:
            metrics["scheduler/set_aside_samples"] = Mean(quarantined)
        return metrics | {"env/process_deaths": Mean(sum(one.num_deaths for one in self._data.processes))}

    def _prefix_hits(self) -> Metrics:
        """Share of the prompts' tokens since the last step that came from a prefix cache, where engines count it."""
        sent = self._engines.prompt_tokens - self._prompts_before[0]
        reused = self._engines.reused_tokens - self._prompts_before[1]
        self._prompts_before = self._engines.prompt_tokens, self._engines.reused_tokens
        return {"engine/prefix_hit": Mean(float(reused), sent)} if sent else {}

    def close(self) -> None:
        """End agents, tasks and environments' processes; a second call does nothing."""
        if self.driver.is_closed:
            return
        with ExitStack() as stack:  # all of it, also where an agent of the user's raises
            for processes in self._data.processes:
                stack.callback(processes.close)
            stack.callback(super().close)
            self.driver.run(close_agents(self._data.shared))

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
            lambda count: [tasks.task(number) for _, number in zip(range(count), numbers, strict=False)],
            self._data.validation_players,
            EpisodeSettings(manager.group_size, "validation/", manager.redundancy, manager.num_groups),
            0,
        )
        result = await collected(flow, manager.groups, 0, self._config.rpc_timeout)
        return EpisodeValidation(result.groups, time.perf_counter() - began)

    def validation_table(self, groups: Sequence[EpisodeGroup]) -> SampleTable:
        """The episodes of a validation as rows of the sample table."""
        templates = {tag: player.template for tag, player in self._data.validation_players.items()}
        return dumped_episodes(groups, templates, self._plan.dump_dir)

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self._data.tasks.num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._data.tasks.num_drawn = self._flow.next_order = int(state["num_drawn"])


class AsyncEpisodeRollout(RunsAhead[EpisodeValidation, EpisodeGroup], EpisodeRollout):
    """Like :class:`EpisodeRollout`, but runs ahead of training by up to ``async_generation_ratio`` steps."""

    _filtered_key = "scheduler/group_filter_count"

    def __init__(self, config: AgenticConfig, plan: AgenticPlan, clusters: Clusters, data: EpisodeData) -> None:
        super().__init__(config, plan, clusters, data)
        ahead = RunAhead.of(plan.async_generation_ratio, plan.prompts_per_step, plan.num_additional_prompts)
        scheduler = AsyncScheduler(
            self._engines,
            self._flow,
            ReplayBuffer(ahead, EpisodeCodec(data.players)),
            config.max_steps,
            config.rpc_timeout,
            in_flight=config.partial_rollout,
            takes_turns=plan.engines_take_turns,
            rejected_by=FILTER_KEY,
        )
        self._run_ahead(scheduler)

    def _groups_of(self, step: int) -> tuple[list[EpisodeGroup], Metrics]:
        groups, metrics = self._collected_ahead(step)
        return groups, metrics | staleness_metrics(groups, step)

    def state_dict(self) -> dict[str, Any]:
        ahead = self.driver.run(self._ahead.state_dict())
        return super().state_dict() | {"ahead": ahead}

    def state_between_steps(self) -> dict[str, Any]:
        return super().state_dict() | {"ahead": self._ahead.state_between_steps()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._take_up(state)


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


def staleness_metrics(groups: Sequence[EpisodeGroup], step: int) -> Metrics:
    """Number of steps by which the sampling weights are older than the trained ones, by episode and by token."""
    episodes = [
        np.concatenate([call.versions for call in episode.calls])
        for group in groups
        for episode in group.episodes
        if any(call.versions for call in episode.calls)
    ]
    oldest = np.array([step - versions.min() for versions in episodes])
    lags = step - np.concatenate(episodes)
    mixed = sum(len(np.unique(versions)) > 1 for versions in episodes)
    return {
        "scheduler/version_lag/mean": Mean(float(lags.sum()), len(lags)),
        "scheduler/version_lag/max": Max(float(oldest.max())),
        "scheduler/off_policy_ratio": Mean(float((oldest > 0).sum()), len(oldest)),
        "scheduler/partial_ratio": Mean(float(mixed), len(episodes)),
    }


class AgenticPipeline(PolicyPipeline[AgenticConfig, AgenticPlan, EpisodeValidation]):
    """A run, from start to summary."""

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

    def build_rollout(self) -> EpisodeRollout:
        phase = AsyncEpisodeRollout if self.plan.is_async else EpisodeRollout
        return phase(self.config, self.plan, self.clusters, self.data)

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
        assert isinstance(self.rollout, EpisodeRollout)
        self.context.record({"time/val_step_total": Mean(validation.seconds)})
        self.context.record_validation(validation_metrics(validation.groups), step)
        self.context.dump_samples("validation", step, partial(self.rollout.validation_table, validation.groups))
