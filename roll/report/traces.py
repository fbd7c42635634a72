"""A run's phases, worker calls and single requests as OpenTelemetry spans, and as a trace for Perfetto."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.config.reading.errors import ConfigError
from roll.report.run_files import Run, read_run

logger = logging.getLogger(__name__)

SCOPE = "roll"
_INTERNAL = 1
"""``SPAN_KIND_INTERNAL`` of OTLP."""


@dataclass(frozen=True)
class Span:
    """One piece of work.

    Attributes:
        service: who did it: ``driver``, a worker such as ``actor_train-0``, ``requests`` or ``environments``.
        name: phase or method.
        begin, end: seconds since the epoch.
        parent: the span that contains it; None: the run's root has none.
        attributes: strings and integers.
    """

    service: str
    name: str
    begin: float
    end: float
    parent: Span | None
    attributes: tuple[tuple[str, str | int], ...] = ()

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits; requests may begin and end at the same moments, and differ in their number."""
        number = dict(self.attributes).get("number")
        parts = (self.service, self.name, self.begin, self.end)
        return _digest(*parts, *([] if number is None else [number]))[:16]


def spans_of(run: Run) -> Iterator[Span]:
    """The run, its steps, their phases, and the calls of its workers, each call inside the step in which it began."""
    rows = run.timeline
    if not rows:
        return
    begin = min(row["begin"] for row in rows)
    whole = Span("driver", run.name, begin, max(row["end"] for row in rows), None, (("pipeline", run.pipeline),))
    yield whole
    steps = [
        Span("driver", f"step {row['step']}", row["begin"], row["end"], whole, (("step", row["step"]),)) for row in rows
    ]
    for row, step in zip(rows, steps, strict=True):
        yield step
        for name, first, last in row["phases"]:
            yield Span("driver", name, first, last, step)
    for worker in run.calls:
        service = f"{worker.role}-{worker.rank}"
        attributes = (("host", worker.host), ("devices", ",".join(map(str, worker.devices))))
        for name, first, last in worker.spans:
            yield Span(service, name, first, last, _containing(steps, first, whole), attributes)
    for number, (name, first, last, found) in enumerate(run.requests):
        service = "requests" if name == "request" else "environments"
        about = (("number", number), *((str(key), value) for key, value in found.items()))
        yield Span(service, name, first, last, _containing(steps, first, whole), about)


def _containing(steps: Sequence[Span], moment: float, whole: Span) -> Span:
    """The step in which something began; what began in none, is the run's."""
    return next((step for step in reversed(steps) if step.begin <= moment <= step.end), whole)


def otlp(run: Run) -> dict[str, Any]:
    """An ``ExportTraceServiceRequest`` in OTLP's JSON encoding (opentelemetry.io/docs/specs/otlp, JSON Protobuf)."""
    trace_id = _digest(str(run.folder.resolve()), run.name, run.about.get("began"))[:32]
    by_service: dict[str, list[dict[str, Any]]] = {}
    for span in spans_of(run):
        by_service.setdefault(span.service, []).append(
            {
                "traceId": trace_id,
                "spanId": span.span_id,
                **({} if span.parent is None else {"parentSpanId": span.parent.span_id}),
                "name": span.name,
                "kind": _INTERNAL,
                "startTimeUnixNano": str(round(span.begin * 1e9)),
                "endTimeUnixNano": str(round(span.end * 1e9)),
                "attributes": [_attribute(key, value) for key, value in span.attributes],
            }
        )
    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [_attribute("service.name", f"{SCOPE}.{service}"), _attribute("run", run.name)]
                },
                "scopeSpans": [{"scope": {"name": SCOPE}, "spans": spans}],
            }
            for service, spans in by_service.items()
        ]
    }


def perfetto(run: Run) -> dict[str, Any]:
    """The trace-event format of Chrome, which Perfetto reads: a track for the driver and one for each worker, and as
    many for requests and environments as are in flight at a time."""
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    ends: dict[str, list[float]] = {"requests": [], "environments": []}
    for span in sorted(spans_of(run), key=lambda one: one.begin if one.service in ends else -1.0):
        service = span.service
        if lanes := ends.get(service):
            lane = next((place for place, end in enumerate(lanes) if end <= span.begin), len(lanes))
        else:
            lane = 0
        if service in ends:
            ends[service][lane : lane + 1] = [span.end]
            service = f"{service} {lane}"
        track = tracks.setdefault(service, len(tracks))
        seconds = {"ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6}
        events.append({"name": span.name, "ph": "X", "pid": 0, "tid": track, **seconds, "args": dict(span.attributes)})
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": service}}
        for service, track in tracks.items()
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def write_traces(output_dir: Path, folder: Path) -> None:
    """One line of OTLP JSON in ``folder``, as the collector's ``otlpjsonfile`` receiver reads it; errors are logged."""
    try:
        run = read_run(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{run.name}.traces.jsonl").write_text(json.dumps(otlp(run)) + "\n", encoding="utf-8")
    except (OSError, KeyError, ConfigError) as error:
        logger.warning("the traces could not be written: %s: %s", type(error).__name__, error)


def _attribute(key: str, value: str | int) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
