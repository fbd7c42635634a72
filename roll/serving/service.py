"""Shares the engines of a cluster between many independent callers on one event loop."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress

from roll.distributed.failures import RemoteError
from roll.rollout.engines import EngineClient
from roll.rollout.groups import FinishedGroup
from roll.rollout.routing import Generation, Listener
from roll.serving.http import BadRequest, Overloaded, Unavailable
from roll.strategies.engines.requests import GenerationRequest, PromptScore, SamplingParams

# Upper bounds of the buckets of latencies, in seconds.
BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
# Of prompts: turned away for lack of room; cancelled because the client had disconnected.
OUTCOMES = ("finished", "refused", "turned_away", "cancelled")


class EngineService:
    """Requests to an engine client with ``report_refusals``, with a pause, and a limit on those in flight, which wait
    for an engine or are in one. Everything happens on one event loop; engines compute in other processes meanwhile."""

    def __init__(self, engines: EngineClient, max_open_requests: int = 1024) -> None:
        self.engines = engines
        self._max_open_requests = max_open_requests
        self._in_flight: set[Generation] = set()
        self._num_held = 0
        self._numbers = itertools.count()
        self._awake = asyncio.Event()
        self._awake.set()
        # Prompts since the start by outcome, and the tokens of those that finished.
        self.counts = dict.fromkeys((*OUTCOMES, "prompt_tokens", "generation_tokens"), 0)
        self._latencies = [0] * (len(BOUNDS) + 1)  # finished prompts by bucket; the last has those above all bounds
        self._seconds = 0.0

    @property
    def num_open(self) -> int:
        """Requests in flight, those held by a pause included."""
        return len(self._in_flight) + self._num_held

    @property
    def num_engines(self) -> int:
        """Engines that serve."""
        return 0 if self.engines.failure is not None else self.engines.num_engines

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        num_samples: int = 1,
        listener: Listener | None = None,
    ) -> FinishedGroup:
        """Generate all samples of one prompt. Cancelling the call drops the request.

        ``listener`` receives the samples so far, about once a turn, from engines that keep such a record. Raises a
        ``Refusal``: overloaded, unavailable or a bad request.
        """
        if self.num_open >= self._max_open_requests:
            self.counts["turned_away"] += 1
            raise Overloaded(f"{self.num_open} requests are in flight, which is the most")
        # Counted while it waits: a pause must not let the queue grow without a bound.
        self._num_held += 1
        arrived = time.perf_counter()
        try:
            await self._awake.wait()
        finally:
            self._num_held -= 1
        request = GenerationRequest(f"http-{next(self._numbers)}", prompt_token_ids, params, num_samples)
        generation = self.engines.submit(request, listener)
        self._in_flight.add(generation)
        try:
            group = await generation
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        except Exception as error:
            raise Unavailable(f"the engines have failed: {error}") from error
        finally:
            self._in_flight.discard(generation)
        if group is None:
            raise Unavailable("the engines are needed for something else")
        if group.error is not None:
            self.counts["refused"] += 1
            raise BadRequest(group.error)
        self.counts["finished"] += 1
        self.counts["prompt_tokens"] += len(prompt_token_ids)
        self.counts["generation_tokens"] += int(group.lengths.sum())
        seconds = time.perf_counter() - arrived
        self._latencies[bisect.bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds
        return group

    async def prompt_score(self, prompt_token_ids: Sequence[int], top: int) -> PromptScore:
        """Log-probs of the tokens of a prompt that :meth:`generate` has accepted; raises as that does."""
        await self._awake.wait()
        try:
            found = await self.engines.prompt_score(prompt_token_ids, top)
        except RemoteError as error:
            raise Unavailable(f"the engines have failed: {error}") from error
        if isinstance(found, str):
            raise BadRequest(found)
        return found

    async def pause(self) -> None:
        """Drop the requests in flight and return when all engines are idle; later requests wait for :meth:`resume`."""
        self._awake.clear()
        self.engines.abort(self._in_flight)
        with suppress(RemoteError):  # the client keeps it
            await self.engines.drain()

    async def resume(self) -> None:
        """Accept requests again."""
        self._awake.set()

    def exposition(self) -> str:
        """Counts and latencies for Prometheus (``GET /metrics``), in its text format 0.0.4."""
        counts, waiting = self.counts, self.engines.num_waiting + self._num_held
        buckets = zip((*BOUNDS, "+Inf"), itertools.accumulate(self._latencies), strict=True)
        latency: dict[str, float] = {f'_bucket{{le="{bound}"}}': number for bound, number in buckets}
        latency |= {"_sum": self._seconds, "_count": sum(self._latencies)}
        outcomes: dict[str, float] = {f'{{outcome="{outcome}"}}': counts[outcome] for outcome in OUTCOMES}
        metrics: list[tuple[str, str, str, dict[str, float]]] = [
            ("requests_total", "counter", "Prompts by outcome.", outcomes),
            ("prompt_tokens_total", "counter", "Tokens of prompts that finished.", {"": counts["prompt_tokens"]}),
            ("generation_tokens_total", "counter", "Tokens of their responses.", {"": counts["generation_tokens"]}),
            ("requests_running", "gauge", "Prompts that an engine works on.", {"": self.num_open - waiting}),
            ("requests_waiting", "gauge", "Prompts that wait for an engine.", {"": waiting}),
            ("engines", "gauge", "Engines that serve.", {"": self.num_engines}),
            ("request_latency_seconds", "histogram", "Seconds from a prompt's arrival to its last token.", latency),
        ]
        lines = []
        for name, kind, meaning, values in metrics:
            lines += [f"# HELP roll_serve_{name} {meaning}", f"# TYPE roll_serve_{name} {kind}"]
            lines += [f"roll_serve_{name}{suffix} {value}" for suffix, value in values.items()]
        return "".join(f"{line}\n" for line in lines)
