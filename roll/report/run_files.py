"""The files of a run: ``record/run.json``, and all of them read back."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from roll.checkpoint.folders import atomic_file
from roll.config.loader import LoadedConfig
from roll.config.pipelines import Panel
from roll.config.plan.render import defaults_in_force
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.masking import masked, masked_text
from roll.config.run import RESOLVED_CONFIG
from roll.tracking.records import METRICS_NAME, read_metrics
from roll.tracking.run_record import (
    RECORD_FOLDER,
    SAMPLES_NAME,
    TIMELINE_NAME,
    WorkerCalls,
    decoded,
    read_blocks,
    read_calls,
    read_timeline,
)

logger = logging.getLogger(__name__)

ABOUT_NAME = "run.json"
REPORT_NAME = "report.html"
WORKERS_FOLDER = "workers"


def describe_run(loaded: LoadedConfig[Any], began: float, resumed: bool, outcome: str | None = None) -> None:
    """Write ``record/run.json`` of a run in progress; ``outcome``: how it has ended."""
    plan, pipeline = loaded.plan, loaded.pipeline
    path = plan.output_dir / RECORD_FOLDER / ABOUT_NAME
    if resumed and path.is_file():
        began = min(began, _began(_read_json(path)) or began)
    about = {
        "exp_name": plan.exp_name,
        "pipeline": pipeline.name,
        "log_dir": os.path.relpath(plan.log_dir, plan.output_dir),
        "began": began,
        "ended": None if outcome is None else time.time(),
        "outcome": None if outcome is None else masked_text(outcome)[:4000],
        "panels": [asdict(panel) for panel in pipeline.panels],
        "defaults": masked(defaults_in_force(loaded)),
    }
    try:
        with atomic_file(path) as part:
            part.write_text(json.dumps(about, indent=1, default=str), encoding="utf-8")
    except OSError as error:
        logger.error("%s was not written; the report will not know how the run ended: %s", path, error)


@dataclass(frozen=True)
class Run:
    """A run on disk; its files are read when they are needed."""

    folder: Path  # ``output_dir``
    log_dir: Path
    about: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.about.get("exp_name") or self.folder.resolve().name)

    @property
    def pipeline(self) -> str:
        return str(self.about.get("pipeline") or self.config.get("pipeline") or "")

    @property
    def panels(self) -> list[Panel]:
        kept = self.about.get("panels")
        return [Panel(**{**panel, "keys": tuple(panel["keys"])}) for panel in kept] if isinstance(kept, list) else []

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, secrets masked; {} where it was not kept, or cannot be read."""
        path = self.folder / RESOLVED_CONFIG
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError, yaml.YAMLError) as error:
            logger.warning("%s cannot be read: %s", path, error)
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One row a step, in order; rows of validations and of steps merged."""
        path = self.log_dir / METRICS_NAME
        return read_metrics(path) if path.is_file() else []

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of training steps."""
        return [row for row in self.metrics if "system/global_step" in row]

    def values(self, name: str) -> list[float]:
        """A metric over the training steps that have it, numbers that are not finite included."""
        return [float(row[name]) for row in self.steps if name in row]

    @cached_property
    def timeline(self) -> list[dict[str, Any]]:
        return read_timeline(self.folder / RECORD_FOLDER / TIMELINE_NAME)

    @cached_property
    def calls(self) -> list[WorkerCalls]:
        since = _began(self.about) - 1.0
        return read_calls(self.log_dir / WORKERS_FOLDER, since)

    def payloads(self) -> Iterator[str]:
        """Data of blocks, see :mod:`roll.tracking.run_record`."""
        return read_blocks(self.folder / RECORD_FOLDER / SAMPLES_NAME)

    def blocks(self) -> Iterator[dict[str, Any]]:
        return map(decoded, self.payloads())


def read_run(path: Path) -> Run:
    """The run whose ``output_dir`` is ``path``; its log folder and ``metrics.jsonl`` are accepted too. Raises
    ``ConfigError``: nothing of a run is there."""
    folder = path.parent if path.is_file() else path
    for candidate in (folder, folder.parent):
        about = candidate / RECORD_FOLDER / ABOUT_NAME
        if about.is_file():
            facts = _read_json(about)
            return Run(candidate, (candidate / str(facts.get("log_dir", "logs"))).resolve(), facts)
    for log_dir in (folder, folder / "logs"):
        if (log_dir / METRICS_NAME).is_file():
            return Run(folder, log_dir, {})
    rule = f"must be the output_dir of a run: there is neither {RECORD_FOLDER}/{ABOUT_NAME} nor {METRICS_NAME} in it"
    raise ConfigError([Problem("RUN", str(path), rule, "output/tiny_grpo/seed0")])


def _began(about: Mapping[str, Any]) -> float:
    """Seconds since the epoch; 0 where it was not kept."""
    began = about.get("began")
    return float(began) if isinstance(began, int | float) else 0.0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return {}
    return found if isinstance(found, dict) else {}
