"""A run's metrics in MLflow."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.tracking.records import SampleTable, Tracker, flattened, tracker_package

MAX_PARAMS = 100  # Parameters, or tags, of one request to MLflow's server
MAX_METRICS = 1000
MAX_VALUE = 6000  # characters of a parameter's value


class MlflowTracker(Tracker):
    """An MLflow run; a resumed run continues it, found by the id that is kept in ``folder``.

    Metrics keep their names but for characters that MLflow does not take: ``val/pass@8`` is ``val/pass_at_8``, as in
    verl. Samples are artifacts, ``samples/<name>/<step>.json``.

    Args:
        folder: of the database and the artifacts, unless another store is named.
        run_config: the run's parameters, by dotted key; secrets are masked by the caller.
        resume_step: the last step that counts; None: a new run.
        project: the experiment, made if need be.
        name: the run's name.
        tags: a mapping, or names alone.
        notes: the run's description.
        tracking_uri: the store; None: ``MLFLOW_TRACKING_URI``, else an SQLite database in ``folder``. A server's
            credentials come from the environment (``MLFLOW_TRACKING_TOKEN``, ``MLFLOW_TRACKING_USERNAME`` ...).

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: the store cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        run_config: Mapping[str, Any],
        *,
        resume_step: int | None = None,
        project: str = "roll",
        name: str | None = None,
        tags: Mapping[str, Any] | Sequence[str] = (),
        notes: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        self._module = tracker_package("mlflow")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        store = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        place = None if store else (folder.resolve() / "artifacts").as_uri()
        self._client = self._module.MlflowClient(store or f"sqlite:///{folder.resolve()}/mlflow.db")
        written = folder / "run-id"
        try:
            if resume_step is not None and written.exists():
                self._id = written.read_text(encoding="utf-8").strip()
                # The process before this one may have closed the run, which would then be shown as finished.
                self._client.update_run(self._id, status="RUNNING")
                return
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else self._client.create_experiment(project, place)
            labels = {str(key): str(tags[key]) if isinstance(tags, Mapping) else "" for key in tags}
            if notes:
                labels["mlflow.note.content"] = notes
            self._id = self._client.create_run(experiment, tags=labels, run_name=name).info.run_id
            written.write_text(self._id, encoding="utf-8")
            texts = {_name(key): str(value)[:MAX_VALUE] for key, value in flattened(run_config)}
            params = [self._module.entities.Param(key, text) for key, text in texts.items()]
            for batch in _batches(params, MAX_PARAMS):
                self._client.log_batch(self._id, params=batch)
        except self._module.MlflowException as error:
            raise ValueError(f"track_with: mlflow: {error}") from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        values = [self._module.entities.Metric(_name(key), value, now, step) for key, value in metrics.items()]
        for batch in _batches(values, MAX_METRICS):
            self._client.log_batch(self._id, metrics=batch)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        if rows:
            text = json.dumps([dict(row) for row in rows], ensure_ascii=False, indent=1, default=str)
            self._client.log_text(self._id, text, f"samples/{name}/{step}.json")

    def files(self) -> dict[str, Path]:
        return {"MLflow": self._folder}

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _name(key: str) -> str:
    return re.sub(r"[^\w\-./: ]", "_", key.replace("@", "_at_"))


def _batches(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]
