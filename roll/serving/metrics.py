"""Counters and latencies of a served model for Prometheus (``GET /metrics``), in its text format 0.0.4."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
"""Upper bounds of the buckets of latencies, in seconds."""


@dataclass
class Latencies:
    """Seconds from a prompt's arrival to its last token."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    """Prompts by bucket; the last has those above all bounds."""
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass
class ServiceCounts:
    """Prompts since the start, by outcome, and the tokens of those that finished."""

    finished: int = 0
    refused: int = 0
    turned_away: int = 0
    """Prompts turned away for lack of room."""
    cancelled: int = 0
    """The client had disconnected."""
    prompt_tokens: int = 0
    generation_tokens: int = 0


def exposition(counts: ServiceCounts, latencies: Latencies, running: int, waiting: int, engines: int) -> str:
    """The text of ``GET /metrics``."""
    return "".join(f"{line}\n" for line in _lines(counts, latencies, running, waiting, engines))


def _lines(counts: ServiceCounts, latencies: Latencies, running: int, waiting: int, engines: int) -> Iterator[str]:
    yield from _head("requests_total", "counter", "Prompts by outcome.")
    for outcome in ("finished", "refused", "turned_away", "cancelled"):
        yield f'roll_serve_requests_total{{outcome="{outcome}"}} {getattr(counts, outcome)}'
    for name, kind, value, meaning in (
        ("prompt_tokens_total", "counter", counts.prompt_tokens, "Tokens of prompts that finished."),
        ("generation_tokens_total", "counter", counts.generation_tokens, "Tokens of their responses."),
        ("requests_running", "gauge", running, "Prompts that an engine works on."),
        ("requests_waiting", "gauge", waiting, "Prompts that wait for an engine."),
        ("engines", "gauge", engines, "Engines that serve."),
    ):
        yield from _head(name, kind, meaning)
        yield f"roll_serve_{name} {value}"
    name = "request_latency_seconds"
    yield from _head(name, "histogram", "Seconds from a prompt's arrival to its last token.")
    for bound, number in zip((*BOUNDS, "+Inf"), itertools.accumulate(latencies.buckets), strict=True):
        yield f'roll_serve_{name}_bucket{{le="{bound}"}} {number}'
    yield f"roll_serve_{name}_sum {latencies.total}"
    yield f"roll_serve_{name}_count {sum(latencies.buckets)}"


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP roll_serve_{name} {meaning}"
    yield f"# TYPE roll_serve_{name} {kind}"
