"""Base of every evaluation: several models, one after the other, on engines that are started once.

Engines are started once for all models that share an architecture and a tokenizer; between two of them only weights are
exchanged. What is answered is on disk at once, so that an evaluation that is killed continues where it was.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from rich.text import Text

from roll.config.loader import LoadedConfig
from roll.config.model_files import loadable
from roll.config.plan.plan import RolePlan
from roll.config.run import PolicyRunConfig
from roll.distributed import Cluster, DriverLoop
from roll.distributed.signals import ending
from roll.pipelines.engine_rollout import between_turns, engine_client
from roll.pipelines.evaluate.config import (
    EvaluateConfig,
    EvaluatedModel,
    EvaluatePlan,
    EvaluationConfig,
    ModelsPlan,
    Pass,
)
from roll.pipelines.evaluate.samples import RESULTS, Record, Results, SampleFile, plain_table, settings_of, show_results
from roll.pipelines.files import load_tokenizer
from roll.pipelines.model_calls import GENERATION, WEIGHTS, Residency, start_cluster
from roll.pipelines.run_context import RunContext
from roll.rollout.engines import SLICE_SECONDS, EngineClient
from roll.rollout.flow import GroupFlow
from roll.serving.harness import HarnessConfig, run_program
from roll.serving.server import FrontOptions, HttpFront
from roll.weight_sync.encoding import MIB, SyncOptions
from roll.weight_sync.sender import WeightSync
from roll.workers import GENERATION_WORKER, STORED_WEIGHTS_WORKER
from roll.workers.generation import GenerationWorker
from roll.workers.model import StoredWeightsWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

EXIT_BELOW = 3  # exit status of an evaluation in which a model stays below a threshold

ConfigT = TypeVar("ConfigT", bound=PolicyRunConfig)
PlanT = TypeVar("PlanT", bound=ModelsPlan)


class EvaluationContext(RunContext):
    """Lifetime without checkpoints: every answer is on disk."""

    def record_validation(self, metrics: Mapping[str, float], steps_done: int) -> None:
        """Metrics of a model, under its place among the models."""
        self._tracker.log(metrics, steps_done)

    def _account(self) -> str:
        return f"what is answered is in {self.plan.output_dir}: the same command continues there"


class EngineRun(ABC, Generic[ConfigT, PlanT]):
    """Several models, one after the other, on engines that are started once; from start to table."""

    slice_seconds = SLICE_SECONDS  # see :class:`~roll.rollout.engines.EngineClient`
    router: str | None = None  # name of the router where the configuration leaves it open
    client: EngineClient
    cluster: Cluster | None = None  # the engines of ``actor_infer``, while there are some
    _source: Cluster | None = None  # sends them the weights of other models

    def __init__(self, loaded: LoadedConfig[ConfigT]) -> None:
        config: Any = loaded.config
        plan: Any = loaded.plan
        self.loaded, self.config, self.plan = loaded, loaded.config, cast(PlanT, plan)
        self.keys: EvaluationConfig = config.evaluate
        self.context = EvaluationContext(loaded)
        self.version = 0

    def run(self) -> int:
        with self.context.running() as resources:
            self.open()
            self.driver = DriverLoop()
            self.context.at_end(self.close)
            self.residency = Residency(self.plan, self.config.is_offload_states)
            self.resources = resources
            for group in self.plan.groups():
                self.evaluate_group(group)
                for cluster in (self._source, self.cluster):  # the next group has another architecture
                    if cluster is not None:
                        cluster.shutdown(graceful=True)
                self._source = self.cluster = None
                self.residency.dismiss("actor_infer")
        return EXIT_BELOW if self.finish() else 0

    def open(self) -> None:
        """Open what the run writes into."""

    @abstractmethod
    def evaluate_group(self, models: Sequence[EvaluatedModel]) -> None:
        """Have the models that share engines do their work."""

    @abstractmethod
    def finish(self) -> list[str]:
        """Write and print the results; a sentence for every threshold that was missed."""

    def start_scorers(self) -> None:
        """Start what scores the answers, once."""

    def close(self) -> None:
        """Cancel what is in flight; before the clusters end."""
        self.driver.close()

    def role_of(self, model: EvaluatedModel) -> RolePlan:
        role = self.plan.roles["actor_infer"]
        path = loadable(model.base)
        model_args = replace(role.section.model_args, model_name_or_path=path)
        return replace(role, model_path=path, section=replace(role.section, model_args=model_args))

    def load(self, model: EvaluatedModel, base: RolePlan, is_last: bool) -> Cluster:
        """Engines that hold the weights of ``model``: started with them, or updated. After the last model that they
        serve nothing exchanges their weights."""
        config, has_weights = self.config, self.cluster is None and model.checkpoint is None
        if (cluster := self.cluster) is None:
            self.start_scorers()
            # An engine loads a model folder by itself; weights of a checkpoint are sent to it after its start.
            role = base if model.checkpoint else self.role_of(model)
            worker = role.section.worker_cls or GENERATION_WORKER
            self.cluster = cluster = start_cluster(config, "actor_infer", worker, self.resources, role.section)
            self.context.watch([cluster])
            cluster.call_all(GenerationWorker.initialize).result()
            self.residency.admit(cluster, GENERATION)
            # An engine that is lost is started again: if nothing exchanges its weights it goes on, else from the next
            # model on.
            keeps = is_last and has_weights
            self.client = engine_client(config, role, cluster, self.slice_seconds, self.router, keeps)
        if not has_weights:
            self.residency.bring({"actor_infer": WEIGHTS})
            self.version += 1
            with self.context.phase("step_model_update"):
                self._exchange(model, cluster)
        self.bring()
        return cluster

    def _exchange(self, model: EvaluatedModel, cluster: Cluster) -> None:
        """Give the engines the weights of another model, verified tensor by tensor."""
        config = self.config
        if self._source is None:
            # It reads files into host memory, and needs no device.
            section = cluster.role
            section = replace(section, device_mapping=None, num_gpus_per_worker=1, world_size=1, worker_cls=None)
            self._source = start_cluster(config, "stored_weights", STORED_WEIGHTS_WORKER, self.resources, section)
            self.context.watch([self._source])
            # Through memory of the host, where the weights are read; whole, since models have nothing in common.
            options = SyncOptions(
                buffer_bytes=config.model_update_buffer_size_mb * MIB,
                deadline=config.rpc_timeout,
                patience=min(config.actor_infer.engine_timeout, config.rpc_timeout),
                transport="safetensors" if config.weight_sync.transport == "safetensors" else "shared_memory",
                directory=str(self.plan.output_dir / "weight_sync"),
            )
            self._sync = WeightSync(self._source, cluster, options)
        checkpoint = None if model.checkpoint is None else str(model.checkpoint)
        self._source.call_all(StoredWeightsWorker.open, str(loadable(model.base)), checkpoint).result()
        between_turns(self.driver, self.client, partial(self._sync.sync, self.version))

    def bring(self) -> None:
        """Everything that answers and scores, on its devices."""
        self.residency.bring({"actor_infer": GENERATION})


class ModelRun(EngineRun[ConfigT, PlanT]):
    """Models answer prompts, or play; a subclass defines what."""

    @abstractmethod
    def read(self, tokenizer: PreTrainedTokenizerBase, role: RolePlan) -> dict[str, int]:
        """Read the prompts or tasks of a group of models; how many of them each pass asks, by its name."""

    @abstractmethod
    async def answer(self, model: EvaluatedModel, way: Pass, numbers: Sequence[int], client: EngineClient) -> None:
        """Have these prompts of a pass answered; each is written when it is done (:meth:`complete`)."""

    async def complete(
        self,
        flow: GroupFlow,
        model: EvaluatedModel,
        way: Pass,
        numbers: Sequence[int],
        most: int,
        records: Callable[[Any], Iterable[Record]],
    ) -> None:
        """Have the groups of ``numbers`` done by ``flow``, ``most`` at a time, and write the records of each as soon as
        it is. ``flow`` draws the prompt or task of the number ``next_order``."""
        waiting = iter(numbers)
        try:
            while True:
                while len(flow.in_flight) < most and (number := next(waiting, None)) is not None:
                    # The draw has the prompt's own number: seeds do not depend on what was answered before an
                    # interruption.
                    flow.next_order = number
                    flow.start(1)
                if not flow.in_flight:
                    return
                for group, _, _ in await flow.progress(self.config.rpc_timeout):
                    self.samples.write(model.name, way.name, group.order, list(records(group)))
        finally:
            await flow.abort()

    def open(self) -> None:
        self.samples = SampleFile(self.plan.output_dir, settings_of(self.loaded), self.keys.resume)
        self.context.at_end(self.samples.close)
        self.results = Results(self.keys, self.plan, self.samples)

    def finish(self) -> list[str]:
        return self.results.finish()

    def evaluate_group(self, models: Sequence[EvaluatedModel]) -> None:
        """Models that share engines: the first of them that has something left to do loads its own weights."""
        base = self.role_of(models[0])
        asked = self.read(load_tokenizer(base.model_path, base.section.model_args.trust_remote_code), base)
        for model in models:
            left = []
            for way in self.plan.passes:
                answered = self.samples.answered(model.name, way.name)
                if numbers := [number for number in range(asked[way.name]) if number not in answered]:
                    left.append((way, numbers))
            origin = model.name, model.path
            if left:
                with ending.interruptible():
                    client: Any = SimpleNamespace(num_turns=0)
                    if model.url is not None:  # nothing in this run generates
                        self.start_scorers()
                        self.bring()
                    else:
                        self.load(model, base, is_last=model is models[-1])
                        client = self.client
                    for way, numbers in left:
                        logger.info("%s (%s): %s, %d x %d", *origin, way.name, len(numbers), way.num_samples)
                        self.driver.run(self.answer(model, way, numbers, client))
            metrics = self.results.of_model(model.name)
            self.context.record_validation(metrics, self.plan.models.index(model))
            shown = ", ".join(f"{way.name} {metrics[f'val/{way.name}/accuracy']:.3f}" for way in self.plan.passes)
            logger.info("%s (%s): accuracy %s", *origin, shown)


class HarnessRun(EngineRun[EvaluateConfig, EvaluatePlan]):
    """Every model works on the tasks of lm-eval or Inspect (:mod:`roll.serving.harness`)."""

    def __init__(self, loaded: LoadedConfig[EvaluateConfig], options: HarnessConfig) -> None:
        super().__init__(loaded)
        self._options = options
        self.metrics: dict[str, dict[str, float]] = {}

    def evaluate_group(self, models: Sequence[EvaluatedModel]) -> None:
        base = self.role_of(models[0])
        front = HttpFront(FrontOptions(self._options.name, max_running_requests=self.config.max_running_requests))
        self.context.at_end(front.close)
        for model in models:
            with ending.interruptible():
                is_new = self.cluster is None
                cluster = self.load(model, base, is_last=False)
                if is_new:
                    tokenizer = load_tokenizer(base.model_path, base.section.model_args.trust_remote_code)
                    front.open(cluster, tokenizer)
                output = self.plan.output_dir / self._options.name / model.name
                logger.info("%s (%s)", model.name, model.path)
                self.metrics[model.name] = run_program(self._options, front, model.base, output)
            named = {f"{self._options.name}/{name}": value for name, value in self.metrics[model.name].items()}
            self.context.record_validation(named, self.plan.models.index(model))
        front.close()

    def finish(self) -> list[str]:
        """Write ``results.json`` and print the table; a sentence for every threshold that was missed."""
        table = plain_table("metric", *self.metrics)
        for name in dict.fromkeys(name for found in self.metrics.values() for name in found):
            if not name.endswith("_stderr"):
                cells = [f"{found[name]:.4f}" if name in found else "" for found in self.metrics.values()]
                table.add_row(*map(Text, (name, *cells)))
        file, facts = self.plan.output_dir / self._options.name / RESULTS, {"harness": self._options.name}
        return show_results([table], {"results": file}, facts, self.metrics, self.keys.thresholds)
