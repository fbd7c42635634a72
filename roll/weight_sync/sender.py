"""The sending half of weight sync. The driver says which engines get which version; the trainer gathers a bucket, hands
it to every engine, and verifies what arrived.

While the engines load one bucket, the trainer gathers the next: at most two buckets exist at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from roll.config.plan.plan import Plan
from roll.config.roles import GenerationWorkerConfig
from roll.config.run import RunConfig, TransportName, WeightSyncConfig, transport_name, update_mode
from roll.distributed import Cluster, DeadlineExceeded, PendingCall, RemoteError, WorkerFailed
from roll.distributed.calls import is_peer_trouble
from roll.distributed.dispatch import in_rank_order
from roll.distributed.failures import RankReport
from roll.platforms import current_platform
from roll.protocol.metrics import Mean, Metrics
from roll.weight_sync.device_transports import BroadcastSender, CudaIpcSender
from roll.weight_sync.encoding import (
    MIB,
    BucketHeader,
    DeltaEncoder,
    LostEngines,
    SyncOptions,
    SyncReport,
    Update,
    WeightSyncError,
    tensor_checksum,
    verify_checksums,
)
from roll.weight_sync.storage_transports import FileSender, ObjectStoreSender
from roll.weight_sync.transports import Sender, SharedMemorySender, Tensors

logger = logging.getLogger(__name__)


def sync_options(run: RunConfig, keys: WeightSyncConfig, engines: GenerationWorkerConfig, plan: Plan) -> SyncOptions:
    """The settings of every weight update of a run, for hosts like this one."""
    train, infer = (plan.roles[role].device_mapping for role in ("actor_train", "actor_infer"))
    return SyncOptions(
        buffer_bytes=run.model_update_buffer_size_mb * MIB,
        deadline=run.rpc_timeout,
        patience=min(engines.engine_timeout, run.rpc_timeout),
        transport=transport_name(keys, train, infer, current_platform().device_type),
        directory=str(plan.output_dir / "weight_sync"),
        mode=update_mode(keys, engines.strategy_args.strategy_name),
        adapters_apart=keys.lora == "adapter",
        quantization=keys.quantization,
    )


class SendingWorker(Protocol):
    """A trainer's worker (:class:`roll.workers.model.TrainWorker`)."""

    def send_weights(
        self, engines: dict[int, Any], version: int, base_version: int | None, options: SyncOptions
    ) -> SyncReport | LostEngines | None: ...


class WeightSync:
    """Carries the weights of ``source`` to every engine of ``target``, verified."""

    def __init__(self, source: Cluster, target: Cluster, options: SyncOptions) -> None:
        self._source, self._target = source, target
        nodes = {source.addresses[0].node_id, *(address.node_id for address in target.addresses)}
        if options.transport == "shared_memory" and len(nodes) > 1:
            # A memory file can be mapped on its own host only; Ray's object store copies to the others by itself.
            logger.info("weights travel by object_store: %s has engines on other hosts than the sender", target.name)
            options = replace(options, transport="object_store")
        self._options = options
        self._holders: set[int] = set()
        """Ranks of the engines that hold ``_held_version``, and can be sent what has changed since."""
        self._held_version: int | None = None

    def sync(self, version: int) -> Metrics:
        """Bring the engines to ``version``; none of them may be generating. Engines that have died, fail or do not
        answer are killed and left out; if that happens during the update, it is repeated with the others, in full.

        Raises:
            WorkerFailed: an engine holds other values than it was sent (caused by a ``WeightSyncError``).
            RemoteError: the last engine is lost, or a trainer failed.
        """
        # An engine found dead here costs a ping; found during the update it costs a second gather of the whole model.
        ping = self._options.patience
        pings = {rank: self._target.ping(rank).within(ping) for rank in self._target.live_ranks}
        for rank, call in pings.items():
            try:
                call.result()
            except RemoteError as loss:
                self._leave_out(rank, loss)
                logger.warning("weights go to the other engines:\n%s", loss)
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
        engines = {rank: self._target.workers[rank] for rank in self._target.live_ranks}
        can_build_on_it = self._options.mode != "full" and self._holders.issuperset(engines)
        base_version = self._held_version if can_build_on_it else None
        # Until this update has succeeded: one that fails half-way leaves the engines with tensors of two versions, on
        # which no delta can be built.
        self._holders = set()
        begin = time.monotonic()
        call = self._source.call_all(SendingWorker.send_weights, engines, version, base_version, self._options)
        reports = call.result()
        report = next(report for report in reports if report is not None)  # rank 0's: the others only gather
        if isinstance(report, LostEngines):
            for rank in report.ranks:
                address = self._target.addresses[rank]
                where = f"pid {address.pid} on {address.node_ip}"
                died = RankReport(rank, where, report.text, log_file=address.log_file)
                seconds = time.monotonic() - begin
                self._leave_out(rank, WorkerFailed(self._target.name, "update_weights", seconds, [died], []))
            logger.warning("an engine is lost in a weight update, which is repeated with the others: %s", report.text)
            return None
        self._holders, self._held_version = set(engines), version
        return report

    def _leave_out(self, rank: int, loss: RemoteError) -> None:
        if self._target.live_ranks == [rank]:
            raise loss  # nothing is left that could generate
        self._target.leave_out(rank)


Answers = Callable[[str, float], list[Any]]
"""Waits for a method that all engines are running and returns their results, in order. Arguments: the name of the
update in messages, and the deadline on the monotonic clock.

Raises:
    WeightSyncError: an engine died, failed or did not answer; it is named.
"""


@dataclass(frozen=True)
class RayEngines:
    """A fixed number of engines."""

    workers: Mapping[int, Any]
    """Actor handles of generation workers by rank, which names them in messages: equal ones are the same engine, with
    what it holds."""

    def ask(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> Answers:
        """Call ``method`` of the workers of all engines; ``arguments(i)`` are those of the i-th engine."""
        calls = enumerate(self.workers.items())
        refs = {rank: worker.call.remote(method, (), *arguments(index)) for index, (rank, worker) in calls}
        # Its deadline comes with the wait.
        return partial(_answers, PendingCall("actor_infer", method, refs, math.inf, (), in_rank_order))


def _answers(call: PendingCall[list[Any]], update: str, end: float) -> list[Any]:
    try:
        return call.within(end - call.began).result()
    except DeadlineExceeded as error:
        late = ", ".join(map(str, error.silent_ranks))
        text = f"{update}: engine {late} was not done with {call.method!r} in time"
        raise WeightSyncError(text, lost=error.silent_ranks) from None
    except RemoteError as error:
        reason = error.reports[0].error
        # An engine that fails because of a peer is sound, and gets the update again without the one that hangs.
        lost = error.silent_ranks if is_peer_trouble(reason) and error.silent_ranks else [error.rank]
        text = f"{update}: engine {error.rank} {error.verb} in {call.method!r}: {reason}"
        raise WeightSyncError(text, lost=lost) from None


_BLAME_SECONDS = 2.0
"""Seconds to wait for an engine's error when the sender's end of the transport fails: an engine that died mid-transfer
is the usual cause, and its error names it where "connection closed" names nobody."""

NamedBuckets = Iterable[list[tuple[str, torch.Tensor]]]


class WeightSender:
    """Lives as long as the sending rank, and remembers what the engines hold.

    Args:
        bucket_bytes: with ``delta``, the size to which changed elements are collected before they are sent.
        delta: send only the changed elements of a tensor, where that is less than the tensor.
    """

    def __init__(self, transport: Sender, bucket_bytes: int = 0, delta: bool = False) -> None:
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._delta = DeltaEncoder() if delta else None
        self._checksums: dict[str, int] = {}
        """Checksums of every tensor that the engines should hold."""

    def send(self, buckets: NamedBuckets, engines: RayEngines, update: Update) -> SyncReport:
        """Send ``buckets`` of full tensors to ``engines`` and verify all that they hold.

        Args:
            buckets: full tensors by Hugging Face name, as :meth:`ModelStrategy.named_full_weights` yields them. They
                must stay as they are until the next but one is taken.

        Raises:
            WeightSyncError: an engine's checksum of a tensor differs from the trainer's, a tensor is missing there, or
                an engine died, failed, or did not answer within the deadline. What is left of ``buckets`` can still be
                taken.
        """
        if update.base_version is None:
            self._checksums.clear()
            if self._delta is not None:
                self._delta = DeltaEncoder()  # the next tensors are sent whole
        name = f"weight update {update.version}"
        exchange = _Exchange(self._transport, engines, update, self._checksums, name, time.monotonic())
        encode = (lambda name, tensor: {name: tensor}) if self._delta is None else self._delta.encode
        try:
            return exchange.run(buckets, encode, self._bucket_bytes if self._delta is not None else 0)
        except BaseException:
            # Engines may be left reading a buffer or waiting in a collective of this update: reuse neither.
            self._transport.end(succeeded=False)
            raise

    def try_send(self, buckets: NamedBuckets, engines: RayEngines, update: Update) -> SyncReport | LostEngines:
        """:meth:`send`, or the engines without which the update can be repeated. All of ``buckets`` is taken."""
        try:
            return self.send(buckets, engines, update)
        except WeightSyncError as error:
            # Other ranks take part in the rest of the gathering, so this one must.
            for _ in buckets:
                pass
            if error.lost:
                return LostEngines(error.lost, str(error))
            raise


@dataclass
class _Exchange:
    """One update."""

    transport: Sender
    engines: RayEngines
    update: Update
    checksums: dict[str, int]
    name: str
    begin: float

    def run(
        self, buckets: NamedBuckets, encode: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], collect_bytes: int
    ) -> SyncReport:
        """``encode``: from a tensor to what is sent of it, which is collected to ``collect_bytes``."""
        update = self.update
        links = self.transport.start(list(self.engines.workers.values()), update.version, self._seconds_left)
        question = self.engines.ask("start_weight_update", lambda engine: (replace(update, link=links[engine]),))
        # After the call, not before: both ends have to be in the rendezvous of a process group at the same time.
        self._transporting(question, lambda: self.transport.connect(self._seconds_left))
        # One kind on all engines: the trainer hashes each tensor once.
        (kind,) = set(self._answers(question))
        # Also the tensors of earlier updates that this one does not bring are verified at its end.
        unsent = dict.fromkeys(self.checksums)
        in_flight: deque[Answers] = deque()
        hashing: Future[None] | None = None
        parts: dict[str, torch.Tensor] = {}
        num_bytes = num_buckets = 0
        with ThreadPoolExecutor(1) as pool:
            for named in chain(buckets, [None]):
                if hashing is not None:
                    hashing.result()  # a bucket's memory may be reused once the next but one is gathered
                # In parallel with packing and sending: xxhash, torch and memcpy all release the GIL.
                # The tensors are hashed in the pool's thread, as update() takes them from this generator.
                checksums = ((name, tensor_checksum(tensor, kind)) for name, tensor in named or ())
                hashing = pool.submit(self.checksums.update, checksums)
                for name, tensor in named or ():
                    if encoded := encode(name, tensor.detach()):
                        parts |= encoded
                        unsent.pop(name, None)
                    else:
                        unsent[name] = None
                size = sum(part.nbytes for part in parts.values())
                if parts and (named is None or size >= collect_bytes):
                    # Packing overwrites the oldest slot, so the engines must have copied out of it.
                    if len(in_flight) == self.transport.slots:
                        self._wait(in_flight.popleft())
                    in_flight.append(self._hand_over(BucketHeader(update.version, num_buckets), parts))
                    num_bytes, num_buckets, parts = num_bytes + size, num_buckets + 1, {}
            while in_flight:
                self._wait(in_flight.popleft())
        held_by_engine = self._answers(self.engines.ask("finish_weight_update", lambda _: (list(unsent),)))
        for rank, held in zip(self.engines.workers, held_by_engine, strict=True):
            verify_checksums(self.checksums, held, engine=rank, version=update.version)
        self.transport.end(succeeded=True)
        seconds = time.monotonic() - self.begin
        return SyncReport(update.version, len(self.checksums), num_bytes, num_buckets, seconds)

    def _hand_over(self, header: BucketHeader, tensors: Tensors) -> Answers:
        payload = self.transport.pack(tensors)  # of which nothing may be held once the engines have it
        question = self.engines.ask("update_weights", lambda _: (header, payload))
        self._transporting(question, lambda: self.transport.deliver(self._seconds_left))
        return question

    def _wait(self, question: Answers) -> None:
        # The engines have copied the bucket, so its slot is free.
        self._answers(question)
        self._transporting(question, self.transport.release)

    def _transporting(self, question: Answers, act: Callable[[], None]) -> None:
        """Run the sender's end of ``question``. If it fails, an engine's own error takes precedence."""
        try:
            act()
        except (RuntimeError, OSError) as error:
            question(self.name, min(self.begin + self.update.deadline, time.monotonic() + _BLAME_SECONDS))
            raise WeightSyncError(f"{self.name}: the transport failed: {error}") from error

    def _answers(self, question: Answers) -> list[Any]:
        return question(self.name, time.monotonic() + self._seconds_left)

    @property
    def _seconds_left(self) -> float:
        """Time limit of the next message, never 0 or less."""
        left = self.begin + self.update.deadline - time.monotonic()
        return max(1e-3, left if self.update.patience is None else min(left, self.update.patience))


def build_transport(name: TransportName, directory: str | None, backend: str, host: str) -> Sender:
    """The sending rank's end of a transport: ``directory`` is that of ``safetensors``, ``backend`` the collective
    backend of the rank's device, ``host`` its address."""
    match name:
        case "shared_memory":
            return SharedMemorySender()
        case "object_store":
            return ObjectStoreSender()
        case "broadcast":
            return BroadcastSender(backend, host)
        case "safetensors":
            assert directory is not None, "safetensors needs a directory"
            return FileSender(Path(directory))
        case "cuda_ipc":
            return CudaIpcSender()
