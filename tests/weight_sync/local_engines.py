"""Engines in threads of the test's own process, so that an update needs no Ray."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roll.weight_sync.device_transports import BroadcastSender
from roll.weight_sync.encoding import SyncReport, Update, WeightSyncError, iter_buckets, tensor_checksum
from roll.weight_sync.sender import Answers, WeightSender
from roll.weight_sync.storage_transports import FileSender, ObjectStoreSender, TensorBundle
from roll.weight_sync.transports import Sender, SharedMemorySender, WeightReceiver

METHODS = {"start_weight_update": "start", "update_weights": "update", "finish_weight_update": "finish"}
TRANSPORTS = ("shared_memory", "object_store", "broadcast", "safetensors")


class PlainEngine:
    """Holds tensors by name and does nothing else with them."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        self.version: int | None = None
        self.updating = False
        self._updated: list[str] = []

    def start_weight_update(self, version: int) -> None:
        assert not self.updating, "as real engines say"
        self.version, self.updating = version, True
        self._updated.clear()

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.weights[name].copy_(tensor)
            self._updated.append(name)

    def held_weights(self) -> dict[str, torch.Tensor]:
        return self.weights

    takes_adapters = False

    def held_checksums(self, names: Sequence[str]) -> dict[str, int]:
        return {name: tensor_checksum(self.weights[name]) for name in names if name in self.weights}

    def finish_weight_update(self) -> dict[str, int]:
        self.updating = False
        return {name: tensor_checksum(self.weights[name]) for name in self._updated}


class LocalEngines:
    """Every engine answers in a thread of its own, in the order in which it is asked."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.workers = dict(enumerate(engines))
        self.receivers = [WeightReceiver(engine) for engine in engines]
        self._threads = [ThreadPoolExecutor(1) for _ in engines]

    def ask(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> Answers:
        futures = [
            thread.submit(getattr(receiver, METHODS[method]), *_sent(arguments(index)))
            for index, (thread, receiver) in enumerate(zip(self._threads, self.receivers, strict=True))
        ]
        return partial(_answers, method, futures)

    def close(self) -> None:
        for receiver, thread in zip(self.receivers, self._threads, strict=True):
            receiver.close()
            thread.shutdown(wait=False)


def _answers(method: str, futures: Sequence[Future[Any]], update: str, end: float) -> list[Any]:
    answers = []
    for engine, future in enumerate(futures):
        try:
            answers.append(future.result(timeout=max(0.0, end - time.monotonic())))
        except TimeoutError:
            raise WeightSyncError(f"{update}: engine {engine} was not done with {method!r} in time") from None
        except Exception as error:
            raise WeightSyncError(f"{update}: engine {engine} failed in {method!r}: {error}") from error
    return answers


def _sent(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """As another process gets them. A bundle's tensors are read-only there."""
    received = []
    for argument in arguments:
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(argument, protocol=5, buffer_callback=buffers.append)
        received.append(pickle.loads(stream, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers]))
    return tuple(received)


def local_sender(transport: str, folder: Path) -> Sender:
    """The sending end of a transport whose engines are in this process."""

    def keep(bundle: TensorBundle) -> TensorBundle:
        return bundle

    match transport:
        case "shared_memory":
            return SharedMemorySender()
        case "object_store":
            return ObjectStoreSender(put=keep)
        case "broadcast":
            return BroadcastSender("gloo", "127.0.0.1")
        case _:
            return FileSender(folder / "weights")


class World:
    """A sender and two engines that hold tensors like ``weights``."""

    def __init__(
        self, transport: str, folder: Path, weights: Mapping[str, torch.Tensor], bucket_bytes: int, delta: bool = False
    ) -> None:
        self.folder, self.bucket_bytes = folder, bucket_bytes
        self.engines = [PlainEngine(weights) for _ in range(2)]
        self.links = LocalEngines(self.engines)
        self.sender = WeightSender(local_sender(transport, folder), bucket_bytes=bucket_bytes, delta=delta)

    def send(
        self,
        weights: Mapping[str, torch.Tensor],
        version: int,
        base: int | None = None,
        *,
        scalings: Mapping[str, float] | None = None,
        bucket_bytes: int | None = None,
        deadline: float = 20,
    ) -> SyncReport:
        buckets = iter_buckets(weights.items(), bucket_bytes or self.bucket_bytes)
        return self.sender.send(buckets, self.links, Update(version, deadline, base, scalings or {}))

    def assert_held(self, weights: Mapping[str, torch.Tensor], version: int | None = None) -> None:
        """Bit for bit, by both engines."""
        for engine in self.engines:
            assert version is None or engine.version == version
            for name, tensor in weights.items():
                assert tensor_checksum(engine.weights[name]) == tensor_checksum(tensor), name
