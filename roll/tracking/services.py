"""Trackers of other programs: Weights & Biases, SwanLab, Trackio, MLflow and Prometheus."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from roll.config.installation import install_command
from roll.tracking.records import SampleTable, TrackedRun, Tracker, flattened, tracker_package

logger = logging.getLogger(__name__)

_STEP = "global_step"


class ServiceTracker(Tracker):
    """A run of a package of a service: metrics by its ``log``, samples as a table."""

    _module: Any
    _run: Any

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        if rows:
            self.log({f"samples/{name}": self._shown(rows)}, step)

    def _shown(self, rows: SampleTable) -> Any:
        """Rows as the ``Table`` of W&B or Trackio."""
        columns = list(rows[0])
        # A table's column has one type; what is neither number nor text is shown as text.
        data = [
            [v if isinstance(v := row.get(name), str | int | float | None) else str(v) for name in columns]
            for row in rows
        ]
        return self._module.Table(columns=columns, data=data)

    def close(self) -> None:
        self._run.finish()


class OnlineTracker(ServiceTracker):
    """A run at an online service; a resumed run continues it, found by the id that is kept with the package's files.

    Args:
        options: ``project``, ``name``, ``notes``, ``tags``, ``group``, ``mode``, and the service's own.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: no key is there and the mode is online.
    """

    package: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, run: TrackedRun, log_dir: str | None = None, **options: object) -> None:
        self._module = tracker_package(self.package)
        prefix = self.package.upper()
        mode = options.pop("mode", None) or os.environ.get(f"{prefix}_MODE", "online")
        # Asked for here and not by the package, which would wait at a prompt where there is a terminal.
        if mode == "online" and not self._has_key():
            raise ValueError(
                f"track_with: {self.package} has no key; set the environment variable {prefix}_API_KEY, or keep the "
                "run on this machine with tracker_kwargs.mode=offline"
            )
        self._folder = run.folder(self.package, log_dir)
        self.paths = {self.title: self._folder}
        self._folder.mkdir(parents=True, exist_ok=True)
        written = self._folder / "run-id"
        if run.resume_step is None or not written.exists():
            written.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
        own_id = written.read_text(encoding="utf-8").strip()
        options = {"project": "roll", "name": run.exp_name, **options}
        self._run = self._start(id=own_id, mode=mode, config=dict(run.config), resume="allow", **options)

    @abstractmethod
    def _has_key(self) -> bool:
        """True when the service can be logged in to without asking anyone."""

    @abstractmethod
    def _start(self, **options: object) -> Any:
        """The package's run."""


class WandbTracker(OnlineTracker):
    """One W&B run. ``options`` are those of ``wandb.init``."""

    package, title = "wandb", "Weights & Biases"

    def _has_key(self) -> bool:
        return bool(self._module.login(prompt=False))

    def _start(self, **options: object) -> Any:
        run = self._module.init(dir=str(self._folder), **options)
        # W&B's own step only grows; with a step metric of ours a run resumed from an older step is drawn as well.
        run.define_metric("*", step_metric=_STEP)
        return run

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log({**metrics, _STEP: step})


class SwanLabTracker(OnlineTracker):
    """One SwanLab run. ``options`` are those of ``swanlab.init`` (``notes``: its description)."""

    package, title = "swanlab", "SwanLab"

    def _has_key(self) -> bool:
        return bool(os.environ.get("SWANLAB_API_KEY"))

    def _start(self, **options: object) -> Any:
        return self._module.init(log_dir=str(self._folder), description=options.pop("notes", None), **options)

    def _shown(self, rows: SampleTable) -> Any:
        texts = ["\n\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows]
        return [self._module.Text(text) for text in texts]


class TrackioTracker(ServiceTracker):
    """A Trackio run: a database on this machine, or a Space. A resumed run continues the newest run of its name.

    Args:
        log_dir: of the databases, which ``TRACKIO_DIR`` names for ``trackio show``; None: the package's own place.
        options: ``project``, ``name``, ``group``, ``space_id``, ``server_url`` of ``trackio.init``. A key for a Space
            comes from the environment (``HF_TOKEN``).

    Raises:
        ModuleNotFoundError: the package is not installed.
    """

    def __init__(self, run: TrackedRun, log_dir: str | None = None, **options: object) -> None:
        if log_dir:
            os.environ["TRACKIO_DIR"] = str(Path(log_dir))  # read when the package is imported
        self._module = tracker_package("trackio")
        options = {"project": "roll", "name": run.exp_name, **options}
        resume = "never" if run.resume_step is None else "allow"
        self._run = self._module.init(config=dict(run.config), resume=resume, embed=False, **options)
        self.paths = {"Trackio": Path(self._module.TRACKIO_DIR)}


MAX_PARAMS = 100  # Parameters, or tags, of one request to MLflow's server
MAX_METRICS = 1000
MAX_VALUE = 6000  # characters of a parameter's value


class MlflowTracker(Tracker):
    """An MLflow run; a resumed run continues it, found by the id that is kept in its folder, where the database and the
    artifacts are too unless another store is named.

    Metrics keep their names but for characters that MLflow does not take: ``val/pass@8`` is ``val/pass_at_8``, as in
    verl. Samples are artifacts, ``samples/<name>/<step>.json``.

    Args:
        project: the experiment, made if need be.
        name: the run's name; None: the experiment's.
        tags: a mapping, or names alone.
        notes: the run's description.
        tracking_uri: the store; None: ``MLFLOW_TRACKING_URI``, else an SQLite database. A server's credentials come
            from the environment (``MLFLOW_TRACKING_TOKEN``, ``MLFLOW_TRACKING_USERNAME`` ...).

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: the store cannot be used.
    """

    def __init__(
        self,
        run: TrackedRun,
        *,
        log_dir: str | None = None,
        project: str = "roll",
        name: str | None = None,
        tags: Mapping[str, Any] | Sequence[str] = (),
        notes: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        self._module = tracker_package("mlflow")
        folder = run.folder("mlflow", log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.paths = {"MLflow": folder}
        store = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        place = None if store else (folder.resolve() / "artifacts").as_uri()
        self._client = self._module.MlflowClient(store or f"sqlite:///{folder.resolve()}/mlflow.db")
        written = folder / "run-id"
        try:
            if run.resume_step is not None and written.exists():
                self._id = written.read_text(encoding="utf-8").strip()
                # The process before this one may have closed the run, which would then be shown as finished.
                self._client.update_run(self._id, status="RUNNING")
                return
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else self._client.create_experiment(project, place)
            labels = {str(key): str(tags[key]) if isinstance(tags, Mapping) else "" for key in tags}
            if notes:
                labels["mlflow.note.content"] = notes
            self._id = self._client.create_run(experiment, tags=labels, run_name=name or run.exp_name).info.run_id
            written.write_text(self._id, encoding="utf-8")
            texts = {_mlflow_name(key): str(value)[:MAX_VALUE] for key, value in flattened(run.config)}
            params = [self._module.entities.Param(key, text) for key, text in texts.items()]
            for batch in _batches(params, MAX_PARAMS):
                self._client.log_batch(self._id, params=batch)
        except self._module.MlflowException as error:
            raise ValueError(f"track_with: mlflow: {error}") from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        values = [self._module.entities.Metric(_mlflow_name(key), value, now, step) for key, value in metrics.items()]
        for batch in _batches(values, MAX_METRICS):
            self._client.log_batch(self._id, metrics=batch)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        if rows:
            text = json.dumps([dict(row) for row in rows], ensure_ascii=False, indent=1, default=str)
            self._client.log_text(self._id, text, f"samples/{name}/{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _mlflow_name(key: str) -> str:
    return re.sub(r"[^\w\-./: ]", "_", key.replace("@", "_at_"))


def _batches(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


DEFAULT_PORT = 9464  # the port of OpenTelemetry's Prometheus exporters


class PrometheusTracker(Tracker):
    """Serves the newest value of every metric at ``http://HOST:PORT/metrics`` as gauges with the label ``run``. The
    URL is in the file ``prometheus/address`` among the run's logs.

    ``actor/kl_loss`` becomes ``roll_actor_kl_loss`` (:func:`series_name`), the step ``roll_step``, and the time of the
    last step ``roll_last_step_timestamp_seconds``. Texts are not served.

    Args:
        host: address to listen at; the loopback by default, since clients are not authenticated.
        port: 0: a free one.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
        ValueError: the address cannot be listened at.
    """

    def __init__(self, run: TrackedRun, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"track_with: prometheus needs prometheus_client; {install_command('prometheus')}"
            ) from error
        self._run, address = run.exp_name, run.log_dir / "prometheus" / "address"
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ValueError(
                f"tracker_kwargs.prometheus: {host}:{port} cannot be listened at ({error.strerror}); "
                "port: 0 takes a free one"
            ) from error
        url = f"http://{host}:{self._server.server_port}/metrics"
        address.parent.mkdir(parents=True, exist_ok=True)
        address.write_text(url + "\n", encoding="utf-8")
        self.paths = {"Prometheus": address}
        logger.info("metrics for Prometheus at %s", url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self._lock:
            self._values |= metrics
            self._values |= {"step": float(step), "last_step_timestamp_seconds": time.time()}

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        """Nothing: Prometheus holds numbers."""

    def collect(self) -> Iterator[Any]:
        """Yield the gauges, for prometheus_client, which calls its collectors at each scrape."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            # A copy: a scrape runs in the server's thread, and log() may add names while the gauges are made.
            values = dict(self._values)
        for name, value in values.items():
            family = GaugeMetricFamily(series_name(name), name, labels=["run"])
            family.add_metric([self._run], value)
            yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def series_name(metric: str) -> str:
    """The name of a metric's time series: ``roll_`` and then letters, digits and underscores alone."""
    return "roll_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
