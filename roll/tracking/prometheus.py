"""A run's metrics for Prometheus, and Grafana dashboards of them: ``python -m roll.tracking.prometheus PIPELINE``."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.pipelines import PipelineDefinition, definition_of
from roll.tracking.records import SampleTable, Tracker

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9464
"""The port of OpenTelemetry's Prometheus exporters."""


class PrometheusTracker(Tracker):
    """Serves the newest value of every metric at ``http://HOST:PORT/metrics`` as gauges with the label ``run``.

    ``actor/kl_loss`` becomes ``roll_actor_kl_loss`` (:func:`series_name`), the step ``roll_step``, and the time of the
    last step ``roll_last_step_timestamp_seconds``. Texts are not served.

    Args:
        run: value of the label.
        folder: gets ``address``, the URL that is served.
        host: address to listen at; the loopback by default, since clients are not authenticated.
        port: 0: a free one.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
        ValueError: the address cannot be listened at.
    """

    def __init__(self, run: str, folder: Path, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "track_with: prometheus needs prometheus_client; pip install 'roll-rl[prometheus]'"
            ) from error
        self._run, self._folder = run, folder
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
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "address").write_text(url + "\n", encoding="utf-8")
        logger.info("metrics for Prometheus at %s", url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self._lock:
            self._values |= metrics
            self._values |= {"step": float(step), "last_step_timestamp_seconds": time.time()}

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        """Nothing: Prometheus holds numbers."""

    def collect(self) -> Iterator[Any]:
        """The gauges, as prometheus_client asks a collector for them."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            values = dict(self._values)
        for name, value in values.items():
            family = GaugeMetricFamily(series_name(name), name, labels=["run"])
            family.add_metric([self._run], value)
            yield family

    def files(self) -> dict[str, Path]:
        return {"Prometheus": self._folder / "address"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def series_name(metric: str) -> str:
    """The name of a metric's time series: letters, digits and underscores alone, behind ``roll_``."""
    return "roll_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


_SOURCE = "${source}"
"""The dashboard's variable for the Prometheus server that it asks."""


def dashboard(pipeline: PipelineDefinition) -> dict[str, Any]:
    """A Grafana dashboard with the panels of a pipeline's own picture and the time of its phases, for any run."""
    panels = [(panel.title, [_expression(key) for key in panel.keys], panel.unit_range) for panel in pipeline.panels]
    panels += [
        ("Seconds of the step by phase", ['{__name__=~"roll_time_.*", run=~"$run"}'], False),
        ("Peak memory by phase and role", ['{__name__=~"roll_memory_.*", run=~"$run"}'], False),
        ("Tokens per second", ['roll_system_tps{run=~"$run"}'], False),
    ]
    source = {"type": "prometheus", "uid": _SOURCE}
    return {
        "title": f"roll: {pipeline.name}",
        "uid": f"roll-{pipeline.name}",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(roll_step, run)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                },
            ]
        },
        "panels": [
            {
                "id": index + 1,
                "title": title,
                "type": "timeseries",
                "datasource": source,
                "gridPos": {"x": 12 * (index % 2), "y": 8 * (index // 2), "w": 12, "h": 8},
                "fieldConfig": {"defaults": {"min": 0, "max": 1} if unit_range else {}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": "{{run}} {{__name__}}"}
                    for number, expression in enumerate(expressions)
                ],
            }
            for index, (title, expressions, unit_range) in enumerate(panels)
        ],
    }


def _expression(key: str) -> str:
    """The query of a panel's key, in which ``*`` stands for one part between slashes."""
    pattern = ".+".join(series_name(part).removeprefix("roll_") for part in key.split("*"))
    return f'{{__name__=~"roll_{pattern}", run=~"$run"}}' if "*" in key else f'{series_name(key)}{{run=~"$run"}}'


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(definition_of(*sys.argv[1:2] or ["rlvr"])), indent=1) + "\n")
