"""A generation engine as a queue: samples have lengths in place of tokens, and a step has a cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from benchmarks.simulation.clock import Clock, SimulatedCall
from roll.rollout.engines import EngineWorker
from roll.rollout.groups import EngineCommand, EngineReport, FinishedGroup
from roll.strategies.engines.requests import GenerationRequest

Draw = Callable[[str, int], tuple[int, float]]
"""From a prompt's number and a sample's index: tokens of the response, and seconds that its environment takes."""


@dataclass(frozen=True)
class EngineCosts:
    """Of one engine; seconds and tokens a second."""

    base: float = 0.010
    """A decode step, mostly the reading of the weights."""
    per_row: float = 0.00005
    """Increment for each running sample."""
    slots: int = 256
    """Samples that run at a time."""
    prefill_rate: float = 20_000.0
    """Tokens of running samples that are computed again after a weight update."""

    devices: float = 1.0
    """That the engine stands for; with fewer samples than that, some have nothing to do."""

    def step(self, rows: int) -> float:
        return self.base + self.per_row * rows


@dataclass
class _Sample:
    request_id: str
    index: int
    tokens: int
    done: float = 0.0
    """Tokens sampled before it was last taken back from an engine."""
    back_at: float | None = None
    """When its environment will have answered, where it was taken back before that."""
    begun_at: float = 0.0
    """On the engine's count of decode steps."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, first token)."""


@dataclass
class _Engine:
    costs: EngineCosts
    steps: float = 0.0
    """Decode steps done: what a running sample has gained in tokens since it began."""
    queue: deque[_Sample] = field(default_factory=deque)
    running: list[tuple[float, int, _Sample]] = field(default_factory=list)
    """A heap by the step at which each will be finished."""
    away: list[tuple[float, int, _Sample]] = field(default_factory=list)
    """Waiting for their environment: a heap by the time of return."""
    open: dict[str, tuple[GenerationRequest, list[_Sample]]] = field(default_factory=dict)
    delay: float = 0.0
    """Seconds of recomputation ahead."""
    count: int = 0

    def push(self, heap: list[tuple[float, int, _Sample]], key: float, sample: _Sample) -> None:
        self.count += 1
        heappush(heap, (key, self.count, sample))


class SimulatedEngines:
    """A cluster of engines in place of :class:`roll.distributed.Cluster`."""

    def __init__(self, world_size: int, clock: Clock, costs: EngineCosts, draw: Draw, prompt_tokens: int) -> None:
        self.world_size = world_size
        self.version = 0
        self.busy_seconds = 0.0
        """In which samples ran, over all engines."""
        self.row_seconds = 0.0
        """Samples that ran, over time and all engines."""
        self._clock = clock
        self._draw = draw
        self._prompt_tokens = prompt_tokens
        self._engines = [_Engine(costs) for _ in range(world_size)]
        self._aside: dict[str, tuple[list[_Sample], list[_Sample]]] = {}
        """Of requests that were taken back: finished samples, and the others."""

    def submit(self, rank: int, method: Callable[..., Any], command: EngineCommand) -> SimulatedCall:
        assert method is EngineWorker.advance
        engine = self._engines[rank]
        recalled = self._accept(engine, command)
        seconds, groups = self._work(engine, command.slice_seconds) if command.work else (0.0, [])
        unfinished = len(engine.queue) + len(engine.running) + len(engine.away)
        report = EngineReport(groups=groups, recalled=recalled, num_unfinished=unfinished, busy_seconds=seconds)
        return SimulatedCall(self._clock, seconds, report)

    def exchange(self, version: int, seconds: float) -> None:
        """New weights, which take a while to arrive; what is running is computed again with them."""
        self._clock.sleep(seconds)
        self.version = version
        for engine in self._engines:
            tokens = 0.0
            for _, _, sample in engine.running:
                done = engine.steps - sample.begun_at
                sample.spans.append((version, int(done)))
                tokens += self._prompt_tokens + done
            engine.delay += tokens / engine.costs.prefill_rate

    def _accept(self, engine: _Engine, command: EngineCommand) -> list[GenerationRequest]:
        if command.abort:
            gone = set(command.abort)
            for request_id in gone:
                engine.open.pop(request_id, None)
            engine.queue = deque(sample for sample in engine.queue if sample.request_id not in gone)
            for name in ("running", "away"):
                setattr(engine, name, sorted(e for e in getattr(engine, name) if e[2].request_id not in gone))
        recalled = [name for name in command.recall if name in engine.open]
        requests = [self._take_back(engine, name) for name in recalled]
        for request in command.add:
            finished, samples = self._aside.pop(request.request_id, None) or ([], self._samples_of(request))
            engine.open[request.request_id] = (request, finished)
            for sample in samples:
                if sample.back_at is not None:
                    engine.push(engine.away, sample.back_at, sample)
                else:
                    engine.queue.append(sample)
        return requests

    def _samples_of(self, request: GenerationRequest) -> list[_Sample]:
        samples = []
        for index in range(request.num_samples):
            tokens, away = self._draw(request.request_id.partition(".")[0], index)  # the number of the prompt
            back_at = self._clock.now + away if away else None
            samples.append(_Sample(request.request_id, index, tokens, back_at=back_at))
        return samples

    def _take_back(self, engine: _Engine, name: str) -> GenerationRequest:
        request, finished = engine.open.pop(name)
        running = [sample for _, _, sample in engine.running if sample.request_id == name]
        for sample in running:
            sample.done = engine.steps - sample.begun_at
        waiting = [sample for _, _, sample in engine.away if sample.request_id == name]
        queued = [sample for sample in engine.queue if sample.request_id == name]
        self._aside[name] = finished, [*running, *queued, *waiting]
        engine.running = sorted(entry for entry in engine.running if entry[2].request_id != name)
        engine.away = sorted(entry for entry in engine.away if entry[2].request_id != name)
        engine.queue = deque(sample for sample in engine.queue if sample.request_id != name)
        return request

    def _work(self, engine: _Engine, slice_seconds: float) -> tuple[float, list[FinishedGroup]]:
        """One turn as :meth:`roll.workers.generation.GenerationWorker.advance` takes it."""
        costs, begin = engine.costs, self._clock.now
        now, engine.delay = begin + engine.delay, 0.0
        groups: list[FinishedGroup] = []
        while engine.queue or engine.running or engine.away:
            now = self._admit(engine, now)
            rows, end = len(engine.running), begin + 10 * slice_seconds
            if engine.away:
                end = min(end, engine.away[0][0])
            step = costs.step(rows)
            until_finished = (engine.running[0][0] - engine.steps) * step if rows else float("inf")
            spent = max(0.0, min(until_finished, end - now)) if rows else max(0.0, end - now)
            now += spent
            engine.steps += spent / step if rows else 0.0
            self.busy_seconds += spent * min(1.0, rows / costs.devices)
            self.row_seconds += spent * rows
            while engine.running and engine.running[0][0] <= engine.steps + 1e-9:
                groups += self._finish(engine, heappop(engine.running)[2])
            if (groups and now - begin >= slice_seconds) or now - begin >= 10 * slice_seconds - 1e-9:
                break
        return now - begin, groups

    def _admit(self, engine: _Engine, now: float) -> float:
        """Let samples that are back, and queued ones, take free slots."""
        while engine.away and engine.away[0][0] <= now:
            back = heappop(engine.away)[2]
            back.back_at = None
            engine.queue.append(back)
        while engine.queue and len(engine.running) < engine.costs.slots:
            sample = engine.queue.popleft()
            sample.begun_at = engine.steps - sample.done
            sample.spans.append((self.version, int(sample.done)))
            engine.push(engine.running, sample.begun_at + sample.tokens, sample)
            if sample.done:
                now += (self._prompt_tokens + sample.done) / engine.costs.prefill_rate
        return now

    def _finish(self, engine: _Engine, sample: _Sample) -> list[FinishedGroup]:
        request, finished = engine.open[sample.request_id]
        finished.append(sample)
        if len(finished) < request.num_samples:
            return []
        del engine.open[sample.request_id]
        finished.sort(key=lambda one: one.index)
        lengths = np.array([one.tokens for one in finished])
        total = int(lengths.sum())
        return [
            FinishedGroup(
                request_id=request.request_id,
                token_ids=np.broadcast_to(np.int32(0), total),
                log_probs=np.broadcast_to(np.float32(0), total),
                lengths=lengths,
                finish_reasons=["stop"] * len(finished),
                texts=[""] * len(finished),
                weight_versions=[_spans(one) for one in finished],
            )
        ]


def _spans(sample: _Sample) -> list[tuple[int, int, int]]:
    ends = [start for _, start in sample.spans[1:]] + [sample.tokens]
    return [(version, start, end) for (version, start), end in zip(sample.spans, ends, strict=True) if start < end]
