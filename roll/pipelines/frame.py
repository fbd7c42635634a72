"""The frame that every pipeline runs in: Ray, logs, trackers, phases, checkpoints, summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll.checkpoint import Checkpoint, CheckpointManager
from roll.checkpoint.state import load_state, save_state
from roll.config.loader import LoadedConfig
from roll.distributed import Cluster, ResourceManager, ray_runtime
from roll.protocol.metrics import Metrics, merge_metrics, to_floats
from roll.tracking.jsonl import JsonlTracker

logger = logging.getLogger(__name__)


class RunFrame:
    """What a run needs besides its algorithm. Metrics of a step are collected by :meth:`record` and written by
    :meth:`end_step`."""

    def __init__(self, loaded: LoadedConfig[Any]) -> None:
        self.config, self.plan = loaded.config, loaded.plan
        self._loaded = loaded
        self._clusters: list[Cluster] = []
        self._recorded: list[Metrics] = []
        self._times: dict[str, float] = {}
        upload = self.config.checkpoint_config
        self._checkpoints = CheckpointManager(
            self.plan.checkpoint_dir,
            self.config.max_ckpt_to_keep,
            upload_dir=upload.output_dir,
            async_upload=upload.async_upload,
            keep_local_file=upload.keep_local_file,
        )
        self._resume = self._checkpoints.resolve(self.config.resume_from_checkpoint)

    @contextmanager
    def running(self) -> Iterator[ResourceManager]:
        self._tracker = JsonlTracker(self.plan.log_dir / "metrics.jsonl")
        with ray_runtime(
            self.plan.num_devices_per_node, self.plan.num_nodes, self.config.system_envs, self.plan.log_dir / "workers"
        ):
            resources = ResourceManager(self.plan.num_devices_per_node, self.plan.num_nodes)
            try:
                yield resources
            except BaseException:
                for cluster in self._clusters:
                    cluster.shutdown(graceful=False)
                raise
            for cluster in self._clusters:
                cluster.shutdown()
        self._tracker.close()

    def watch(self, clusters: Sequence[Cluster]) -> None:
        self._clusters += clusters

    def steps(self, first: int, end: int) -> Iterator[int]:
        for step in range(first, end):
            self._step_began = time.perf_counter()
            yield step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._times[f"time/{name}"] = time.perf_counter() - began

    def record(self, metrics: Metrics) -> None:
        self._recorded.append(metrics)

    def end_step(self, step: int) -> None:
        m = to_floats(merge_metrics(self._recorded)) | self._times
        m["time/step_total"] = time.perf_counter() - self._step_began
        self._tracker.log(m, step)
        keys = ("critic/score/mean", "token/response_length/mean", "sft_train/loss", "time/step_total", "time/step_generate", "time/step_train", "time/step_model_update")
        if step % 10 == 0 or "critic/score/mean" in m: print(step, {k: round(m[k], 3) for k in keys if k in m}, flush=True)
        self._recorded, self._times = [], {}

    def dump_samples(self, name: str, step: int, table: Callable[[], Any]) -> None:
        pass

    def record_validation(self, metrics: Mapping[str, float], step: int) -> None:
        print("VAL", step, {k: round(v, 3) for k, v in metrics.items()}, flush=True)

    def is_save_due(self, step: int) -> bool:
        return bool(self.plan.save_steps) and (step + 1) % self.plan.save_steps == 0

    @contextmanager
    def writing_checkpoint(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        with self._checkpoints.writing(step) as path:
            yield path
            save_state(path / "pipeline", state)

    def checkpoint_to_resume(self) -> Checkpoint | None:
        return self._resume

    def load_state(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return load_state(checkpoint.role("pipeline"))

    def finish(self, steps: int) -> None:
        pass
