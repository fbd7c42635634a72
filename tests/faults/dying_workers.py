"""Workers that are killed, as often as a file says: each line of ``DEATHS`` (an environment variable) is a call."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import torch

from roll.distributed import Dispatch, register
from roll.methods.base import LOG_PROBS, Ask, Loss
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
from roll.weight_sync.encoding import BucketHeader
from roll.workers.generation import GenerationWorker
from roll.workers.model import ModelWorker, TrainWorker
from tests.pipelines.agentic_environments import Letters

DEATHS_ENV = "DEATHS"


def die_if_due(call: int) -> None:
    """Kill this process (SIGKILL) in a call that :func:`is_due`."""
    if is_due(call):
        os.kill(os.getpid(), signal.SIGKILL)


def is_due(call: int) -> bool:
    """The first line of the file names this call; the line is used up."""
    file = Path(os.environ[DEATHS_ENV])
    due = file.read_text().split() if file.exists() else []
    if not due or int(due[0]) != call:
        return False
    rewrite(file, "\n".join(due[1:]))
    return True


def rewrite(file: Path, text: str) -> None:
    """At once: the other workers read it meanwhile."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(file)


class DyingTrainer(TrainWorker):
    """The last rank is killed in an update, counted from the start of its process."""

    calls = 0

    def step(self, batch: DataProto, loss: Loss, **arguments: Any) -> Metrics:
        self.calls += 1
        if self.context.rank == self.context.world_size - 1:
            die_if_due(self.calls)
        return super().step(batch, loss, **arguments)


STUTTER = """
import os, signal, sys, time
parent = int(sys.argv[1])
while os.getppid() == parent:
    os.kill(parent, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(parent, signal.SIGCONT)
    time.sleep(0.05)
"""


class StutteringActor(TrainWorker):
    """The process of the last rank is stopped six sevenths of the time, from its first update on."""

    stutters = False

    def step(self, batch: DataProto, loss: Loss, **arguments: Any) -> Metrics:
        if not self.stutters and self.context.rank == self.context.world_size - 1:
            self.stutters = True
            subprocess.Popen([sys.executable, "-c", STUTTER, str(os.getpid())])
        return super().step(batch, loss, **arguments)


class DyingEngine(GenerationWorker):
    """Killed in its turn of that number, counted from the start of its process."""

    turns = 0

    def advance(self, *arguments: Any, **options: Any) -> Any:
        self.turns += 1
        die_if_due(self.turns)
        return super().advance(*arguments, **options)


class DyingLetters(Letters):
    """Its process is killed in a step as long as a file says so; the file is gone then."""

    instant: ClassVar[bool] = False

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        file = Path(f"{os.environ[DEATHS_ENV]}-environment")
        if file.exists():
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


SIGNPOSTS_ENV = "SIGNPOSTS"
"""A folder; what is going on there touches a file of that name."""


def signpost(name: str) -> None:
    (Path(os.environ[SIGNPOSTS_ENV]) / name).write_text(str(time.monotonic()))


class SignpostedEngine(GenerationWorker):
    """Says when weights arrive, and takes its time with them."""

    def update_weights(self, header: BucketHeader, payload: Any) -> None:
        signpost("weights")
        time.sleep(0.02)
        super().update_weights(header, payload)


def signposted_digit_share(response: str) -> float:
    """Share of the characters that are digits; says when samples are scored, and takes its time."""
    signpost("samples")
    time.sleep(0.01)
    return sum(character.isdigit() for character in response) / max(len(response), 1)


class SpoiltLoss:
    """A loss with something added to its value, and the same gradient."""

    def __init__(self, loss: Loss, offset: float) -> None:
        self._loss, self._offset = loss, offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Metrics]:
        value, metrics = self._loss(*arguments, **options)
        return value + self._offset, metrics


class InfiniteLoss(TrainWorker):
    """The last rank's loss is infinite in the second step that the model takes, with a finite gradient."""

    def step(self, batch: DataProto, loss: Loss, **arguments: Any) -> Metrics:
        is_due = self.strategy.progress.step == 1 and self.context.rank == self.context.world_size - 1
        spoilt: Any = SpoiltLoss(loss, math.inf if is_due else 0.0)
        return super().step(batch, spoilt, **arguments)


class DyingReference(ModelWorker):
    """The last rank is killed in a call; teachers have this class as well."""

    calls = 0

    def forward(self, batch: DataProto, ask: Ask = LOG_PROBS) -> DataProto:
        self.calls += 1
        if self.context.rank == self.context.world_size - 1:
            die_if_due(self.calls)
        return super().forward(batch, ask)


def digit_share(response: str) -> float:
    """Share of the characters that are digits; a response that stands in the file ``KILLERS`` kills its worker, each
    time that it stands there."""
    file = Path(os.environ[KILLERS_ENV])
    killers = json.loads(file.read_text()) if file.exists() else []
    if response in killers:
        killers.remove(response)
        rewrite(file, json.dumps(killers))
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(character.isdigit() for character in response) / max(len(response), 1)


KILLERS_ENV = "KILLERS"


class FullDiskSft(TrainWorker):
    """The last rank finds no room for its second checkpoint."""

    saves = 0

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        self.saves += 1
        unlimited = resource.RLIM_INFINITY
        if self.context.rank == self.context.world_size - 1:
            sys.dont_write_bytecode = True  # or a module's compiled form would be cut, too, for every later process
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if self.saves == 2 else unlimited, unlimited))
        super().save_checkpoint(path)


class InfiniteOnce(TrainWorker):
    """The loss of a call is infinite, with a finite gradient."""

    calls = 0

    def step(self, batch: DataProto, loss: Loss, **arguments: Any) -> Metrics:
        self.calls += 1
        spoilt: Any = SpoiltLoss(loss, math.inf if is_due(self.calls) else 0.0)
        return super().step(batch, spoilt, **arguments)
