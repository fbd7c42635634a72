"""The agentic pipeline: reinforcement learning from episodes, in which agents work on tasks through the engines. The
steps of training are those that all policy pipelines share."""

from __future__ import annotations

from functools import partial

from roll.config.loader import LoadedConfig
from roll.distributed import ResourceManager
from roll.pipelines.agentic.config import AgenticConfig
from roll.pipelines.agentic.learning import EpisodeAdvantageComputer
from roll.pipelines.agentic.metrics import validation_metrics
from roll.pipelines.agentic.plan import REWARD, AgenticPlan
from roll.pipelines.agentic.rollout import (
    AsyncEpisodeRollout,
    EpisodeRollout,
    EpisodeValidation,
    load_episode_data,
)
from roll.pipelines.files import load_tokenizer
from roll.pipelines.policy_pipeline import PolicyPipeline
from roll.pipelines.rlvr.clusters import StartingClusters, start_policy_clusters
from roll.pipelines.rlvr.data import RecordedRollouts
from roll.protocol.metrics import Mean


class AgenticPipeline(PolicyPipeline[AgenticConfig, AgenticPlan, EpisodeValidation]):
    """A run, from start to summary."""

    def __init__(self, loaded: LoadedConfig[AgenticConfig]) -> None:
        config, plan = loaded.config, loaded.plan
        assert isinstance(plan, AgenticPlan)
        super().__init__(loaded, plan, RecordedRollouts(config, plan.output_dir, None))
        sampling = plan.train.generating_args
        self.temperature = sampling.temperature if sampling.do_sample else 1.0

    def start_clusters(self, resources: ResourceManager) -> StartingClusters:
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

    def build_scoring(self) -> EpisodeAdvantageComputer:
        most = max(entry.turns * entry.new_tokens for entry in self.plan.entries.values())
        return EpisodeAdvantageComputer(self.config, self.plan.norm_types, most, self.plan.normalizes_by_tag)

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
