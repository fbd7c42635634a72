"""The sending half of weight sync: gather a bucket, hand it to every engine, verify what arrived.

The protocol is ``start(version) -> update(bucket)* -> finish(version)``.  A bucket goes into Ray's object store once;
engines on the same host read it from shared memory.  While the engines take over one bucket, the trainer gathers the
next: at most two buckets exist at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from roll.weight_sync.buckets import WeightBucket
from roll.weight_sync.checksum import tensor_checksum


class WeightSyncError(RuntimeError):
    """An engine does not hold what the trainer sent, or did not take it."""


@dataclass(frozen=True)
class SyncReport:
    """What one update cost, as seen by the sender."""

    version: int
    num_tensors: int
    num_bytes: int
    num_buckets: int
    seconds: float


def send_weights(
    buckets: Iterator[list[tuple[str, torch.Tensor]]],
    engines: Sequence[Any],
    version: int,
    deadline: float,
) -> SyncReport:
    """Send ``buckets`` of full tensors to ``engines`` (actor handles of generation workers) and verify them.

    Args:
        buckets: full tensors by Hugging Face name, as :meth:`ModelStrategy.named_full_weights` yields them.
        deadline: seconds for the whole exchange.

    Raises:
        WeightSyncError: an engine's checksum of a tensor differs from the trainer's, a tensor is missing there, or an
            engine died, failed, or did not answer within the deadline.
    """
    begin = time.monotonic()

    def ask(method: str, *arguments: Any) -> _Question:
        return _Question(method, [engine.call.remote(method, (), *arguments) for engine in engines])

    def wait(question: _Question) -> list[Any]:
        return question.answers(f"weight update {version}", begin + deadline)

    sent: dict[str, int] = {}
    num_bytes = num_buckets = 0
    in_flight = ask("start_weight_update", version)
    for tensors in buckets:
        bucket = WeightBucket.pack(tensors)
        sent.update((name, tensor_checksum(tensor)) for name, tensor in tensors)
        wait(in_flight)
        shared = ray.put(bucket)
        in_flight = ask("update_weights", shared)
        num_bytes += bucket.num_bytes
        num_buckets += 1
    wait(in_flight)
    held_by_engine = wait(ask("finish_weight_update"))
    for index, held in enumerate(held_by_engine):
        verify_checksums(sent, held, engine=index, version=version)
    return SyncReport(version, len(sent), num_bytes, num_buckets, time.monotonic() - begin)


@dataclass(frozen=True)
class _Question:
    """A method in progress on every engine."""

    method: str
    refs: list[Any]

    def answers(self, update: str, end: float) -> list[Any]:
        """One answer an engine, all there by ``end`` (on the monotonic clock); else the engine at fault is named."""
        answers = []
        for engine, ref in enumerate(self.refs):
            try:
                answers.append(ray.get(ref, timeout=max(0.0, end - time.monotonic())))
            except ray.exceptions.GetTimeoutError:
                raise WeightSyncError(f"{update}: engine {engine} was not done with {self.method!r} in time") from None
            except ray.exceptions.RayTaskError as error:
                cause = getattr(error.cause, "error", error.cause)
                raise WeightSyncError(f"{update}: engine {engine} failed in {self.method!r}: {cause}") from None
            except ray.exceptions.RayActorError:
                raise WeightSyncError(f"{update}: engine {engine} died in {self.method!r}") from None
        return answers


def verify_checksums(sent: dict[str, int], held: dict[str, int], engine: int, version: int) -> None:
    """Compare the trainer's checksums with an engine's.

    Raises:
        WeightSyncError: naming the first few tensors that differ or are missing.
    """
    wrong = [name for name, checksum in sent.items() if held.get(name) != checksum]
    if wrong:
        missing = [name for name in wrong if name not in held]
        raise WeightSyncError(
            f"weight update {version}: engine {engine} holds other values than the trainer sent in {len(wrong)} of "
            f"{len(sent)} tensors ({', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''})"
            + (f"; {len(missing)} of them never arrived ({missing[0]}, ...)" if missing else "")
        )
