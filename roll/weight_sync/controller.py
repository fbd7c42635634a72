"""The driver's side of weight sync: which cluster sends to which engines, and under which version."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from roll.distributed import Cluster, RemoteError, WorkerDied, WorkerFailed
from roll.protocol.metrics import Mean, Metrics
from roll.weight_sync.messages import SyncReport
from roll.weight_sync.options import SyncOptions

logger = logging.getLogger(__name__)

_PING_SECONDS = 5.0


def _for_hosts_of(source: Cluster, target: Cluster, options: SyncOptions) -> SyncOptions:
    """Memory is shared on one host only: between several Ray carries the weights."""
    nodes = {source.addresses[0].node_id, *(address.node_id for address in target.addresses)}
    if options.transport != "shared_memory" or len(nodes) == 1:
        return options
    logger.info("weights travel by object_store: %s has engines on other hosts than the sender", target.name)
    return replace(options, transport="object_store")


class WeightSync:
    """Carries the weights of ``source`` to every engine of ``target``, verified."""

    def __init__(self, source: Cluster, target: Cluster, options: SyncOptions) -> None:
        self._source = source
        self._target = target
        self._options = _for_hosts_of(source, target, options)
        self._holders: set[int] = set()
        """Ranks of the engines that hold ``_held_version``, and can be sent what has changed since."""
        self._held_version: int | None = None

    def sync(self, version: int) -> Metrics:
        """Bring the engines to ``version``; no turn of theirs may be in flight. Engines that have died are left out;
        where one dies on the way, the others are sent everything once more.

        Raises:
            WorkerFailed: an engine does not hold what was sent, or did not take it (caused by a ``WeightSyncError``).
            WorkerDied: the last engine's, or a trainer's, process ended.
        """
        self._leave_dead_out()
        begin = time.monotonic()
        while (report := self._try(version)) is None:
            pass
        return {
            "time/actor_train/model_update/total": Mean(time.monotonic() - begin),
            "model_update/bytes": Mean(report.num_bytes),
            "model_update/buckets": Mean(report.num_buckets),
            "model_update/version": Mean(report.version),
        }

    def _try(self, version: int) -> SyncReport | None:
        """An update of the engines that are alive; None: one of them died in it."""
        engines = {rank: self._target.workers[rank] for rank in self._target.live_ranks}
        can_build_on_it = self._options.mode != "full" and self._holders.issuperset(engines)
        base_version = self._held_version if can_build_on_it else None
        self._holders = set()
        try:
            reports: list[SyncReport | None] = self._source.send_weights(engines, version, base_version, self._options)
        except WorkerFailed as failure:
            if not self._lost_an_engine(failure):
                raise
            return None
        self._holders, self._held_version = set(engines), version
        return next(report for report in reports if report is not None)

    def _leave_dead_out(self) -> None:
        """Find the engines that have died since they last answered; the death of the last one is raised."""
        pings = {rank: self._target.submit(rank, "ping", deadline=_PING_SECONDS) for rank in self._target.live_ranks}
        for rank, ping in pings.items():
            try:
                ping.result()
            except WorkerDied as death:
                self._target.leave_out(rank)
                if not self._target.live_ranks:
                    raise
                logger.warning("weights go to the other engines:\n%s", death)

    def _lost_an_engine(self, failure: WorkerFailed) -> bool:
        """Whether the trainer failed because an engine died; that is left out, and if it was the last one its death is
        raised: it is the one to look at."""
        lost = False
        for rank in self._target.live_ranks:
            try:
                self._target.submit(rank, "ping", deadline=_PING_SECONDS).result()
            except WorkerDied as death:
                self._target.leave_out(rank)
                if not self._target.live_ranks:
                    raise WorkerDied(
                        death.cluster, "update_weights", failure.seconds, death.reports, death.silent_ranks
                    ) from failure
                lost = True
                logger.warning("an engine died in a weight update, which is repeated with the others:\n%s", death)
            except RemoteError as error:
                logger.warning("after a failed weight update: %s", error)
        return lost
