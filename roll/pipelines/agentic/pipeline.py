"""The agentic pipeline: reinforcement learning from episodes, in which agents work on tasks through the engines.

The steps of training are those that all policy pipelines share; the rollout turns tasks into a batch of episodes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.distributed import DriverLoop
from roll.environments.off_loop import EnvironmentProcesses
from roll.methods.episodes import EpisodeMethod
from roll.pipelines.agentic.config import REWARD, AgenticConfig, AgenticPlan, EnvManagerConfig
from roll.pipelines.agentic.definition import own_group_filter
from roll.pipelines.agentic.metrics import episode_metrics, episode_table, token_checks, validation_metrics
from roll.pipelines.agentic.players import TaskSource, build_players, close_players, read_tasks
from roll.pipelines.clusters import ClusterStarter
from roll.pipelines.engine_rollout import RolloutSource, Validation
from roll.pipelines.files import load_tokenizer, pad_token_id
from roll.pipelines.policy_pipeline import PolicyPipeline, temperature_of
from roll.pipelines.sample_records import episode_notes
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.rollout.engines import EngineClient
from roll.rollout.episodes import EpisodeGroup, EpisodeLoop, build_episode_batch, episode_codec
from roll.rollout.flow import GroupFlow, build_filter, collected
from roll.rollout.loops import GroupSettings
from roll.rollout.rewarding import SampleQuarantine
from roll.tracking import SampleTable

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

SLICE_SECONDS = 0.02  # duration of an engine's turn: short, since agents wait for their next observation


class EpisodeSource(RolloutSource):
    """Tasks, on each of which a group of episodes is played; seeds depend on the number of tasks drawn so far."""

    filtered_metric = "scheduler/group_filter_count"

    def __init__(
        self,
        config: AgenticConfig,
        plan: AgenticPlan,
        judge: Mapping[str, str] | None = None,
    ) -> None:
        """Build environments and agents, and read chat templates and data sets; ``judge``: address and key of the role
        ``reward``. :meth:`connect` comes next."""
        self._config, self._plan, role = config, plan, plan.roles["actor_train"]
        self.tokenizer = load_tokenizer(role.model_path, role.section.model_args.trust_remote_code)
        self._processes: list[EnvironmentProcesses] = []  # of environments that do not live in the driver
        # Agents without an environment, tools around environments and their verifiers.
        self._shared: dict[str, Any] = {}

        validation = plan.validation
        shared = self.tokenizer, self._processes, self._shared, judge
        self._players = build_players(config, plan, plan.train, *shared)
        self._validation_players = {} if validation is None else build_players(config, plan, validation, *shared)
        data, in_order = read_tasks(plan, self._players | self._validation_players)
        self._tasks = TaskSource(plan.train, f"train/{config.seed}", data, in_order)
        # Without the run's seed: runs of other seeds are validated on the same tasks.
        in_validation = None if validation is None else TaskSource(validation, "validation", data, in_order)
        self._validation_tasks = in_validation

    def connect(self, engines: EngineClient) -> None:
        self._engines = engines
        config, plan = self._config, self._plan
        train, keeps = plan.train, group_filter(plan.train.section, config.train_roles)
        self._quarantine = SampleQuarantine(plan.log_dir)
        name, quarantine = f"{config.seed}/", self._quarantine
        loop = EpisodeLoop(self._players, name, train.redundancy, train.num_groups, quarantine=quarantine)
        settings = GroupSettings(train.group_size, keeps=keeps, filter_key="train_env_manager.group_filter_config")
        self.flow = GroupFlow(engines, None, self._tasks.draw, settings, loop=loop)
        self.codec = episode_codec(self._players)
        self._counts_before = dict(self.flow.counts)
        self._engine_counts_before: Counter[str] = Counter()

    def batch(self, groups: list[EpisodeGroup], driver: DriverLoop) -> tuple[DataProto, Metrics]:
        batch = build_episode_batch(
            groups,
            {tag: entry.samples for tag, entry in self._plan.entries.items()},
            pad_token_id(self.tokenizer),
            roles=self._config.train_roles or None,
            bootstrap=self._config.bootstraps,
        )
        metrics = episode_metrics(groups) | token_checks(batch, groups)
        # Episodes since the last step by their end, quarantined samples, and processes that died.
        before, now = self._counts_before, dict(self.flow.counts)
        self._counts_before = now
        for name in ("ended", "retried", "cancelled"):
            metrics[f"scheduler/episodes_{name}"] = Mean(now.get(name, 0) - before.get(name, 0))
        if quarantined := self._quarantine.num_samples:
            metrics["scheduler/set_aside_samples"] = Mean(quarantined)
        metrics["env/process_deaths"] = Mean(sum(one.num_deaths for one in self._processes))
        # The share of the prompts' tokens since the last step that came from a prefix cache, where engines count it.
        counts = self._engines.counts - self._engine_counts_before
        self._engine_counts_before = Counter(self._engines.counts)
        if sent := counts["prompt_tokens"]:
            metrics["engine/prefix_hit"] = Mean(float(counts["reused_tokens"]), sent)
        return batch, metrics

    def close(self, driver: DriverLoop) -> None:
        close_players(driver, self._processes, self._shared.values())

    async def validation(self) -> Validation:
        """Play the same tasks with the same seeds each time: two validations differ by the policy alone."""
        manager, tasks = self._plan.validation, self._validation_tasks
        assert manager is not None and tasks is not None
        began = time.perf_counter()
        numbers = iter(range(manager.groups))
        flow = GroupFlow(
            self._engines,
            None,
            # range() first: the other way round zip would take a number more than it returns.
            lambda count: [tasks.task(number) for _, number in zip(range(count), numbers, strict=False)],
            GroupSettings(manager.group_size),
            loop=EpisodeLoop(self._validation_players, "validation/", manager.redundancy, manager.num_groups),
        )
        result = await collected(flow, manager.groups, 0, self._config.rpc_timeout)
        seconds = time.perf_counter() - began
        return Validation(validation_metrics(result.groups), {"": result.groups}, seconds)

    def table(self, groups: Sequence[EpisodeGroup]) -> SampleTable:
        players = self._validation_players | self._players
        templates = {tag: player.template for tag, player in players.items()}
        return episode_table(groups, templates, self._plan.dump_dir)

    notes = staticmethod(episode_notes)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tasks.num_drawn = int(state["num_drawn"])


def group_filter(section: EnvManagerConfig, roles: Collection[str] = ()) -> Callable[[EpisodeGroup], bool]:
    """Combine ``group_filter_config`` and ``group_filter_cls``: true for groups that both keep. Where episodes have
    several roles, a group is kept if the scores of any trained role (empty: of all) are: those of opponents may sum to
    zero."""
    keep = build_filter(section.group_filter_config.type, section.group_filter_config.filter_args)
    own = None if section.group_filter_cls is None else own_group_filter(section.group_filter_cls)

    def keeps(group: EpisodeGroup) -> bool:
        found = {call.role for episode in group.members for call in episode.calls}
        trained: list[str | None] = [None]
        if len(found) > 1:
            trained = [*sorted(found & set(roles) if roles else found)]
        sound = [episode for episode in group.members if not episode.failed]
        scores = ([one.reward_of(role) for one in sound] or [np.nan] for role in trained)
        if not any(keep(np.array(own, dtype=np.float32)) for own in scores):
            return False
        identity = f"{group.item.tag}_{group.item.seed}"
        return own is None or not own.filter(identity, group.order, group.members)

    return keeps


class AgenticPipeline(PolicyPipeline[AgenticConfig, AgenticPlan]):
    slice_seconds = SLICE_SECONDS
    router = "EnvAffinityRouter"

    def __init__(self, loaded: LoadedConfig[AgenticConfig]) -> None:
        super().__init__(loaded)
        self.validates_first = self.config.val_before_train
        self.temperature = temperature_of(self.plan.train.generating_args)

    def start_scorers(self, starter: ClusterStarter) -> dict[str, Any]:
        return starter.start_judges([REWARD] if REWARD in self.plan.roles else [])

    def load_data(self) -> EpisodeSource:
        judge = self.clusters.judges.get(REWARD)
        return EpisodeSource(self.config, self.plan, None if judge is None else judge.options)

    def build_method(self) -> EpisodeMethod:
        most = max(entry.turns * entry.new_tokens for entry in self.plan.entries.values())
        return EpisodeMethod(self.config, self.plan.norm_types, most, self.plan.normalizes_by_tag)
