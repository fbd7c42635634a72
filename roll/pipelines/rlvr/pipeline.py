"""The RLVR pipeline: reinforcement learning from verifiable rewards. The engines answer prompts, and rewards score the
answers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from roll.config.loader import LoadedConfig
from roll.distributed import ResourceManager
from roll.methods.policy import PolicyMethod
from roll.pipelines.batches import RecordedRollouts
from roll.pipelines.clusters import Clusters, StartingClusters, start_clusters
from roll.pipelines.policy_pipeline import PolicyPipeline
from roll.pipelines.rlvr.config import HarnessConfig, RLVRConfig
from roll.pipelines.rlvr.data import load_data
from roll.pipelines.rlvr.plan import RLVRPlan
from roll.pipelines.rlvr.rollout import PromptSource, Validation
from roll.protocol.metrics import Mean
from roll.rollout.engines import EngineClient
from roll.serving.harness import HarnessOptions, run_program
from roll.serving.server import FrontOptions, HttpFront


class RLVRPipeline(PolicyPipeline[RLVRConfig, RLVRPlan, Validation]):
    """A run, from start to summary."""

    def __init__(self, loaded: LoadedConfig[RLVRConfig]) -> None:
        config, plan = loaded.config, loaded.plan
        assert isinstance(plan, RLVRPlan)
        super().__init__(loaded, plan, RecordedRollouts(config, plan.output_dir, plan.samples_per_step))
        self.by_harness: dict[str, float] = {}
        """Metrics of ``validation.harness``, until they are reported."""

    def start_clusters(self, resources: ResourceManager) -> StartingClusters[Clusters]:
        return start_clusters(self.loaded, resources)

    def load_data(self) -> None:
        self.data = load_data(self.config, self.plan)
        self.tokenizer = self.data.tokenizer

    def build_source(self, engines: EngineClient) -> PromptSource:
        return PromptSource(self.config, self.plan, self.clusters, self.data, engines)

    def build_method(self) -> PolicyMethod:
        return PolicyMethod(self.config, self.plan.norm_types, self.plan.max_new_tokens)

    def is_validation_due(self, step: int) -> bool:
        """Every ``eval_steps`` steps, the first of them before any training unless ``before_train`` is false."""
        section = self.config.validation
        if section is None or not self.plan.eval_steps or step % self.plan.eval_steps:
            return False
        return step > 0 or section.before_train

    @property
    def validates(self) -> bool:
        return self.config.validation is not None and bool(self.plan.eval_steps)

    def validate(self, step: int) -> None:
        """Like the base class, after the program of ``validation.harness``, which has the engines to itself."""
        section = self.config.validation
        if section is not None and section.harness is not None:
            with self.context.phase("val_harness"), self.generating():
                self.by_harness = self.ask_harness(section.harness, step)
        super().validate(step)

    def ask_harness(self, harness: HarnessConfig, step: int) -> dict[str, float]:
        """The program's metrics of the engines' present weights, ``<program>/<task>/<metric>``."""
        name, model = harness.name, self.plan.roles["actor_infer"]
        include = None if harness.include is None else str(Path(harness.include).expanduser())
        options = HarnessOptions(name, tuple(harness.tasks), include, tuple(harness.arguments), harness.chat)
        front = HttpFront(FrontOptions(name, max_running_requests=self.config.max_running_requests))
        try:
            front.open(self.clusters.actor_infer, self.tokenizer)
            output = self.plan.output_dir / "validation" / name / f"step-{step}"
            metrics = run_program(options, front, str(model.model_path), output)
        finally:
            front.close()
        return {f"{name}/{metric}": value for metric, value in metrics.items()}

    def report(self, validation: Validation, step: int) -> None:
        self.context.record({"time/val_step_total": Mean(validation.seconds)})
        metrics, answered = validation.report()
        self.context.record_validation(metrics | self.by_harness, step)
        for name, groups in answered.items():
            self.context.dump_samples("validation", step, partial(self.source.table, groups), name)
