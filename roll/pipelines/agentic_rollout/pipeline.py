"""Episodes without training: every model plays the same tasks from the same seeds, and the models are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.loader import LoadedConfig
from roll.config.plan.plan import RolePlan
from roll.environments.off_loop import EnvironmentProcesses
from roll.pipelines.agentic.metrics import episode_table
from roll.pipelines.agentic.pipeline import SLICE_SECONDS
from roll.pipelines.agentic.players import TaskSource, build_players, close_agents, read_tasks
from roll.pipelines.agentic_rollout.definition import AgenticRolloutConfig, AgenticRolloutPlan, settings_of
from roll.pipelines.evaluate.config import EvaluatedModel, Pass
from roll.pipelines.evaluate.models import ModelRun
from roll.pipelines.evaluate.samples import Record
from roll.rollout.engines import EngineClient
from roll.rollout.episodes import TRUNCATED, EpisodeGroup, EpisodeLoop, Player
from roll.rollout.flow import GroupFlow
from roll.rollout.loops import GroupSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AgenticRolloutPipeline(ModelRun[AgenticRolloutConfig, AgenticRolloutPlan]):
    """The episodes of ``val_env_manager`` as a training run's validation plays them, or those of
    ``train_env_manager``, of every model."""

    slice_seconds = SLICE_SECONDS
    router = "EnvAffinityRouter"
    players: dict[str, Player]
    tasks: TaskSource

    def __init__(self, loaded: LoadedConfig[AgenticRolloutConfig]) -> None:
        super().__init__(loaded)
        self._processes: list[EnvironmentProcesses] = []
        self._shared: dict[str, Any] = {}

    settings_of = staticmethod(settings_of)

    def read(self, tokenizer: PreTrainedTokenizerBase, role: RolePlan) -> dict[str, int]:
        plan, played = self.plan, self.plan.played
        self.players = build_players(self.config, plan, played, tokenizer, self._processes, self._shared)
        name = "validation" if plan.is_validation else f"train/{self.config.seed}"
        self.tasks = TaskSource(played, name, *read_tasks(plan, self.players))
        return {way.name: played.groups for way in plan.passes}

    async def answer(self, model: EvaluatedModel, way: Pass, numbers: Sequence[int], client: EngineClient) -> None:
        """``num_env_groups`` tasks are in flight at a time. Tasks and seeds are those of a training run."""
        played = self.plan.played
        name = "validation/" if self.plan.is_validation else f"{self.config.seed}/"
        loop = EpisodeLoop(self.players, name, played.redundancy, played.num_groups)
        settings = GroupSettings(played.group_size)
        flow = GroupFlow(client, None, lambda count: [self.tasks.task(flow.next_order)], settings, loop=loop)
        await self.complete(flow, model, way, numbers, played.num_groups, partial(self.records, model, way))

    def records(self, model: EvaluatedModel, way: Pass, group: EpisodeGroup) -> Iterator[Record]:
        templates = {tag: player.template for tag, player in self.players.items()}
        for row, episode in zip(episode_table([group], templates), group.members, strict=True):
            yield {
                **row,
                "model": model.name,
                "pass": way.name,
                "order": group.order,
                "prompt_id": f"{group.item.tag}/{group.order}",
                "sample": row["member"],
                "of": len(group.members),
                "score": None if episode.failed else episode.reward,
                "numbers": {**episode.metrics, "turns": float(len(episode.calls))},
                "vote": None,
                "tokens": sum(len(call.response_ids) for call in episode.calls),
                "finish_reason": "length" if episode.outcome in TRUNCATED else "stop",
            }

    def close(self) -> None:
        with ExitStack() as stack:  # all of it, also where an agent of the user's raises
            for processes in self._processes:
                stack.callback(processes.close)
            stack.callback(super().close)
            self.driver.run(close_agents(self._shared.values()))
