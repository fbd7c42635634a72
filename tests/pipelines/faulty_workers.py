"""Workers that go wrong in the middle of a run."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import torch

from roll.distributed import Dispatch, register
from roll.methods.base import Loss
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
from roll.rollout.groups import EngineCommand, EngineReport
from roll.weight_sync.encoding import BucketHeader, ChecksumKind, Update
from roll.workers.generation import GenerationWorker
from roll.workers.model import TrainWorker

logger = logging.getLogger(__name__)


class HangingActor(TrainWorker):
    """Never comes back from its first update."""

    def step(self, batch: DataProto, loss: Loss, **arguments: Any) -> Metrics:
        logger.info("hangs for ever")
        wait_for_ever()
        return {}


def wait_for_ever() -> None:
    while True:
        time.sleep(1)


class OtherArithmetic(GenerationWorker):
    """Norms of the engine are not quite the model's."""

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        super().initialize()
        self.engine._decoder._epsilon *= 1.1  # type: ignore[attr-defined]


class FaultyEngine(GenerationWorker):
    """Does something wrong to the weights that it is sent, as :meth:`be_faulty` says."""

    fault = ""

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        super().initialize()
        take = self.engine.update_weights
        self.engine.update_weights = lambda tensors: take(self.spoilt(dict(tensors)))  # type: ignore[method-assign]

    def be_faulty(self, fault: str) -> None:
        self.fault = fault

    def spoilt(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        norms = [name for name in tensors if "layers.0." in name and name.endswith("layernorm.weight")]
        if self.fault == "corrupt" and norms:
            tensors[norms[0]] = tensors[norms[0]].clone()
            tensors[norms[0]][3] += 1e-6
        elif self.fault == "drop" and norms:
            del tensors[norms[0]]
        elif self.fault == "swap" and len(norms) > 1:
            tensors[norms[0]], tensors[norms[1]] = tensors[norms[1]], tensors[norms[0]]
        elif self.fault == "raise":
            raise RuntimeError("the engine has no room for this")
        elif self.fault == "die":
            os._exit(1)
        elif self.fault == "hang":
            wait_for_ever()
        return tensors


class CorruptingEngine(FaultyEngine):
    """Changes one element of one tensor at every update."""

    fault = "corrupt"


class EngineDyingInUpdate(GenerationWorker):
    """Rank 0 is killed by the first bucket of its second update."""

    num_updates = 0
    death = signal.SIGKILL

    def start_weight_update(self, start: Update) -> ChecksumKind:
        self.num_updates += 1
        return super().start_weight_update(start)

    def update_weights(self, header: BucketHeader, payload: Any) -> None:
        if self.context.rank == 0 and self.num_updates == 2:
            os.kill(os.getpid(), self.death)
        super().update_weights(header, payload)


class DyingEngine(GenerationWorker):
    """Rank 0 is killed in its second step, with samples half done."""

    version = 0

    def start_weight_update(self, start: Update) -> ChecksumKind:
        self.version = start.version
        return super().start_weight_update(start)

    def advance(self, command: EngineCommand) -> EngineReport:
        if self.context.rank == 0 and self.version == 1 and command.add:
            self._accept(command)
            self.engine.step()
            assert self.engine.num_unfinished
            self.die()
        return super().advance(command)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class StoppedEngine(DyingEngine):
    """Rank 0 answers no more."""

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class FailingEngine(DyingEngine):
    """Rank 0 raises, as an engine does that finds no memory."""

    def die(self) -> None:
        raise RuntimeError("CUDA out of memory: tried to allocate 20.00 GiB")


class EngineStoppedInUpdate(EngineDyingInUpdate):
    """Rank 0 answers no more."""

    death = signal.SIGSTOP


class EngineDyingAtWake(GenerationWorker):
    """Rank 0 is killed when it comes back to its device for the second step."""

    updates = 0

    def start_weight_update(self, start: Update) -> ChecksumKind:
        self.updates += 1
        return super().start_weight_update(start)

    @register(Dispatch.ONE_TO_ALL)
    def wake(self, weights_only: bool = False) -> None:
        if self.context.rank == 0 and self.updates == 1 and weights_only:
            os.kill(os.getpid(), signal.SIGKILL)
        super().wake(weights_only)


class EngineLosingARank(DyingEngine):
    """Of vLLM, with ranks in processes of their own, the last of which is killed."""

    def die(self) -> None:
        engine: Any = self.engine
        os.kill(engine._engine.model_executor.workers[-1].proc.pid, signal.SIGKILL)
        while self.engine.num_unfinished:
            self.engine.step()
