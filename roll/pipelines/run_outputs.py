"""Files that a run leaves behind: its configuration, curves, report, samples; and its summary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from roll.config.loader import LoadedConfig
from roll.config.reading.masking import masked
from roll.distributed.actor import Profiling
from roll.pipelines.files import write_samples
from roll.report.page import ending_command, write_report
from roll.report.run_files import REPORT_NAME, RunFiles
from roll.report.traces import write_traces
from roll.tracking import LOG_NAME, METRICS_NAME, RunSummary, SampleTable, TrackedRun
from roll.tracking.console import INTERVAL_ENDS
from roll.tracking.plots import plot_run

logger = logging.getLogger(__name__)

RESOLVED_CONFIG = "config.yaml"
PLOT = "curves.png"


class RunOutputs:
    """Where the files of a run are, and what writes them."""

    def __init__(self, loaded: LoadedConfig[Any], resumed: bool) -> None:
        self._loaded, self._config, self._plan = loaded, loaded.config, loaded.plan
        self._files = RunFiles(loaded, resumed)
        self.describe = self._files.write
        """Say where the files are, and with ``outcome`` how the run has ended."""
        self.metrics = self._plan.log_dir / METRICS_NAME
        self.log = self._plan.log_dir / LOG_NAME
        self._plot = self._plan.output_dir / PLOT
        self.drawn = False
        """The curves have been drawn."""

    def profiling(self) -> Profiling:
        """Measurements of the workers' processes."""
        config = self._config
        folder = Path(config.profiler_output_dir or self._plan.log_dir / "profiler").resolve()
        return Profiling(str(folder), config.profiler_timeline, config.profiler_memory, config.profiler_calls)

    def tracked_run(self, resume_step: int | None) -> TrackedRun:
        """The run as trackers see it; ``resume_step`` is the last step of the checkpoint that it continues."""
        return TrackedRun(
            log_dir=self._plan.log_dir,
            exp_name=self._plan.exp_name,
            config=masked(self._loaded.resolved),
            resume_step=resume_step,
        )

    def write_config(self) -> None:
        """Write the effective configuration, and log its warnings."""
        for warning in self._loaded.warnings:
            logger.warning("%s", warning)
        text = yaml.safe_dump(masked(self._loaded.resolved), sort_keys=False, allow_unicode=True)
        self._plan.output_dir.mkdir(parents=True, exist_ok=True)
        (self._plan.output_dir / RESOLVED_CONFIG).write_text(text, encoding="utf-8")

    def dump(self, name: str, step: int, table: Callable[[], SampleTable]) -> None:
        """Write a step's samples into ``rollout_dump_dir``, which there is."""
        assert self._plan.dump_dir is not None
        file = self._plan.dump_dir / f"{name}-{step:06d}.jsonl"
        try:
            write_samples(file, table())
        except OSError as error:
            logger.error("%s was not written: %s", file, error)

    def draw_curves(self) -> None:
        self.drawn = True
        try:
            plot_run(self.metrics, self._plot, self._plan.exp_name, self._loaded.pipeline.panels)
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("the curves could not be drawn: %s", error)

    def write_report(self) -> None:
        if self._config.report_at_end:
            write_report(self._plan.output_dir)
        if self._config.otlp_output_dir is not None:
            write_traces(self._plan.output_dir, Path(self._config.otlp_output_dir))

    def ending_command(self) -> list[str]:
        """Draws curves and report from another process, should this one end hard."""
        report = self._plan.output_dir if self._config.report_at_end else None
        panels = self._loaded.pipeline.panels
        return ending_command(self.metrics, self._plot, self._plan.exp_name, panels, report)

    def summary(
        self, validations: Mapping[int, Mapping[str, float]], seconds: float, steps: int, tracked: Mapping[str, Path]
    ) -> RunSummary:
        """Results of the run.

        Args:
            validations: metrics by the steps that were done.
            tracked: files of the trackers.
        """
        files = {"log": self.log, **tracked, "curves": self._plot}
        if self._config.report_at_end:
            files["report"] = self._plan.output_dir / REPORT_NAME
        done = sorted(validations)
        return RunSummary(
            title=self._plan.exp_name,
            before=whole_sets(validations[done[0]], True) if len(done) > 1 else {},
            after=whole_sets(validations[done[-1]], True) if done else {},
            seconds=seconds,
            steps=steps,
            files=files,
        )


def whole_sets(metrics: Mapping[str, float], intervals: bool = False) -> dict[str, float]:
    """Metrics of whole validation sets: none by tag or under a second name, ends of intervals only where asked for."""
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("val/") and name.count("/") <= 2 and (intervals or not name.endswith(INTERVAL_ENDS))
    }
