"""The driver's side of weight sync: its options, which cluster sends to which engines, and under which version."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, Protocol

from roll.config.plan.plan import Plan
from roll.config.policy import WeightSyncConfig, transport_name, update_mode
from roll.config.roles import GenerationWorkerConfig
from roll.config.run import RunConfig
from roll.distributed import Cluster, RemoteError, Worker, WorkerFailed
from roll.distributed.failures import RankReport
from roll.platforms import current_platform
from roll.protocol.metrics import Mean, Metrics
from roll.weight_sync.encoding import MIB, LostEngines, SyncOptions, SyncReport

logger = logging.getLogger(__name__)


def sync_options(run: RunConfig, keys: WeightSyncConfig, engines: GenerationWorkerConfig, plan: Plan) -> SyncOptions:
    """Those of a run on hosts like this one."""
    train, infer = (plan.roles[role].device_mapping for role in ("actor_train", "actor_infer"))
    return SyncOptions(
        buffer_bytes=run.model_update_buffer_size_mb * MIB,
        deadline=run.rpc_timeout,
        patience=min(engines.engine_timeout, run.rpc_timeout),
        transport=transport_name(keys, train, infer, current_platform().device_type),
        directory=keys.directory or str(plan.output_dir / "weight_sync"),
        mode=update_mode(keys, engines.strategy_args.strategy_name),
        adapters_apart=keys.lora == "adapter",
    )


def _for_hosts_of(source: Cluster, target: Cluster, options: SyncOptions) -> SyncOptions:
    """Memory is shared on one host only: between several Ray carries the weights."""
    nodes = {source.addresses[0].node_id, *(address.node_id for address in target.addresses)}
    if options.transport != "shared_memory" or len(nodes) == 1:
        return options
    logger.info("weights travel by object_store: %s has engines on other hosts than the sender", target.name)
    return replace(options, transport="object_store")


class SendingWorker(Protocol):
    """A trainer's worker (:class:`roll.workers.training.ActorWorker`)."""

    def send_weights(
        self, engines: dict[int, Any], version: int, base_version: int | None, options: SyncOptions
    ) -> SyncReport | LostEngines | None: ...


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
        """Bring the engines to ``version``; no turn of theirs may be in flight. Engines that have died, fail or do not
        answer are killed and left out; where that happens on the way, the others are sent everything once more.

        Raises:
            WorkerFailed: an engine holds other values than it was sent (caused by a ``WeightSyncError``).
            RemoteError: what became of the last engine, or of a trainer.
        """
        self._leave_out_lost()
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
        """An update of the engines that are there; None: one of them was lost in it."""
        engines = {rank: self._target.workers[rank] for rank in self._target.live_ranks}
        can_build_on_it = self._options.mode != "full" and self._holders.issuperset(engines)
        base_version = self._held_version if can_build_on_it else None
        self._holders = set()
        begin = time.monotonic()
        call = self._source.call_all(SendingWorker.send_weights, engines, version, base_version, self._options)
        reports = call.result()
        report = next(report for report in reports if report is not None)
        if isinstance(report, LostEngines):
            self._lose(report, time.monotonic() - begin)
            return None
        self._holders, self._held_version = set(engines), version
        return report

    def _leave_out_lost(self) -> None:
        """Find the engines that have been lost since they last answered; the loss of the last one is raised."""
        ping = self._options.patience
        pings = {rank: self._target.submit(rank, Worker.ping).within(ping) for rank in self._target.live_ranks}
        for rank, call in pings.items():
            try:
                call.result()
            except RemoteError as loss:
                self._leave_out(rank, loss)
                logger.warning("weights go to the other engines:\n%s", loss)

    def _lose(self, lost: LostEngines, seconds: float) -> None:
        """Go on without the engines that an update failed of."""
        for rank in lost.ranks:
            address = self._target.addresses[rank]
            report = RankReport(rank, f"pid {address.pid} on {address.node_ip}", lost.text, log_file=address.log_file)
            self._leave_out(rank, WorkerFailed(self._target.name, "update_weights", seconds, [report], []))
        logger.warning("an engine is lost in a weight update, which is repeated with the others: %s", lost.text)

    def _leave_out(self, rank: int, loss: RemoteError) -> None:
        if self._target.live_ranks == [rank]:
            raise loss
        self._target.leave_out(rank)
