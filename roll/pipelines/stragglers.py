"""A watch over ranks that are slower than their peers.

Ranks that compute together wait for each other, so the wall-clock time of a phase is the same for all of them and says
nothing about who is late. What says it is the time in which each has worked or was kept from working
(:class:`roll.distributed.worker.Effort`): who waits for a peer does neither. On accelerators that is the host's part of
the work (launching kernels, preparing data): a device that is throttled does not show in it.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from roll.distributed import Cluster, RemoteError, Worker

logger = logging.getLogger(__name__)

SLOW = 2.0  # times the median
LEAST_SECONDS = 1.0  # shortest phase that is compared: in shorter ones a busy host makes such differences now and then
MOST_RANKS = 16  # ranks of a role whose seconds are each a metric; of more, the median and the slowest
_ASK_SECONDS = 30.0


def stragglers(seconds: Sequence[float]) -> list[int]:
    """The ranks that needed twice as long as the median (of two: as the other)."""
    median = statistics.median_low(seconds)
    return [rank for rank, own in enumerate(seconds) if own >= max(SLOW * median, LEAST_SECONDS)]


@dataclass
class StragglerWatch:
    """Measures the ranks of clusters that have several, in the phases that the caller chooses; the list may grow."""

    clusters: Sequence[Cluster]
    metrics: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block, as ``time/<phase>/<role>/rank_<n>``, ``median`` and ``slowest``."""
        before = self._read()
        yield
        after = self._read()
        for cluster in self.clusters:
            role = cluster.name
            # Of other numbers of ranks: one was lost during the phase.
            if len(before.get(role, ())) == len(after.get(role, ())) > 1:
                self._note(name, cluster, [late - early for early, late in zip(before[role], after[role], strict=True)])

    def pop(self) -> dict[str, float]:
        """The metrics since the last call."""
        metrics, self.metrics = self.metrics, {}
        return metrics

    def _note(self, phase: str, cluster: Cluster, seconds: Sequence[float]) -> None:
        prefix = f"time/{phase}/{cluster.name}"
        if len(seconds) <= MOST_RANKS:
            self.metrics |= {f"{prefix}/rank_{rank}": own for rank, own in enumerate(seconds)}
        median = statistics.median(seconds)
        self.metrics |= {f"{prefix}/median": median, f"{prefix}/slowest": max(seconds)}
        for rank in stragglers(seconds):
            where = cluster.addresses[rank]
            logger.warning(
                "%s rank %d (pid %d on %s) is slow: it needed %.2f s in %s, the median of %d ranks is %.2f s",
                *(cluster.name, rank, where.pid, where.node_ip, seconds[rank], phase, len(seconds), median),
            )

    def _read(self) -> Mapping[str, Sequence[float]]:
        """Seconds of every rank so far, by role."""
        several = [cluster for cluster in self.clusters if len(cluster.live_ranks) > 1]
        calls = [(one.name, one.call_all(Worker.effort_seconds).within(_ASK_SECONDS)) for one in several]
        readings = {}
        for name, call in calls:
            try:
                readings[name] = call.result()
            except RemoteError as error:  # the next call of the phase decides
                logger.debug("no measurement of %s: %s", name, error)
        return readings
