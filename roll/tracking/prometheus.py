"""A run's metrics for Prometheus."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.installation import install_command
from roll.tracking.records import SampleTable, Tracker

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9464  # the port of OpenTelemetry's Prometheus exporters


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
                f"track_with: prometheus needs prometheus_client; {install_command('prometheus')}"
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
        """Yield the gauges, for prometheus_client, which calls its collectors at each scrape."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            # A copy: a scrape runs in the server's thread, and log() may add names while the gauges are made.
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
    """The name of a metric's time series: ``roll_`` and then letters, digits and underscores alone."""
    return "roll_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
