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
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
from roll.strategies.base import LossFunction, TensorBatch, teacher_columns
from roll.weight_sync.encoding import BucketHeader
from roll.workers.generation import GenerationWorker
from roll.workers.model import MODEL_COLUMNS, POLICY_COLUMNS, ModelWorker
from roll.workers.supervised import (
    PAIR_COLUMNS,
    SCORE_COLUMNS,
    DistillWorker,
    PreferenceWorker,
    RewardTrainWorker,
    SftWorker,
)
from roll.workers.training import LOSS_COLUMNS, TEACHER, ActorWorker
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


class DyingActor(ActorWorker):
    """The last rank is killed in an update, counted from the start of its process."""

    calls = 0

    @register(Dispatch.DP_MP_COMPUTE, columns=POLICY_COLUMNS + LOSS_COLUMNS)
    def update(self, batch: DataProto, **arguments: Any) -> Metrics:
        self.calls += 1
        if self.context.rank == self.context.world_size - 1:
            die_if_due(self.calls)
        return super().update(batch, **arguments)


STUTTER = """
import os, signal, sys, time
parent = int(sys.argv[1])
while os.getppid() == parent:
    os.kill(parent, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(parent, signal.SIGCONT)
    time.sleep(0.05)
"""


class StutteringActor(ActorWorker):
    """The process of the last rank is stopped six sevenths of the time, from its first update on."""

    stutters = False

    @register(Dispatch.DP_MP_COMPUTE, columns=POLICY_COLUMNS + LOSS_COLUMNS)
    def update(self, batch: DataProto, **arguments: Any) -> Metrics:
        if not self.stutters and self.context.rank == self.context.world_size - 1:
            self.stutters = True
            subprocess.Popen([sys.executable, "-c", STUTTER, str(os.getpid())])
        return super().update(batch, **arguments)


class DyingSft(SftWorker):
    """As :class:`DyingActor`."""

    calls = 0

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        self.calls += 1
        if self.context.rank == self.context.world_size - 1:
            die_if_due(self.calls)
        return super().update(batch)


class DyingPreference(PreferenceWorker):
    """As :class:`DyingActor`."""

    calls = 0

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + PAIR_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        self.calls += 1
        if self.context.rank == self.context.world_size - 1:
            die_if_due(self.calls)
        return super().update(batch)


class DyingReward(RewardTrainWorker):
    """As :class:`DyingActor`."""

    calls = 0

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + SCORE_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        self.calls += 1
        if self.context.rank == self.context.world_size - 1:
            die_if_due(self.calls)
        return super().update(batch)


class DyingStudent(DistillWorker):
    """As :class:`DyingActor`."""

    calls = 0

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + teacher_columns(TEACHER))
    def update(self, batch: DataProto) -> Metrics:
        self.calls += 1
        if self.context.rank == self.context.world_size - 1:
            die_if_due(self.calls)
        return super().update(batch)


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


class InfiniteLoss(SftWorker):
    """The last rank's loss is infinite in the second step that the model takes, with a finite gradient."""

    def optimizer_step(self, batch: TensorBatch, loss: LossFunction, *arguments: Any, **options: Any) -> Metrics:
        def infinite(outputs: TensorBatch, rows: TensorBatch) -> tuple[torch.Tensor, Metrics]:
            value, metrics = loss(outputs, rows)
            is_due = self.strategy.progress.step == 1 and self.context.rank == self.context.world_size - 1
            return value + (math.inf if is_due else 0.0), metrics

        return super().optimizer_step(batch, infinite, *arguments, **options)


class DyingReference(ModelWorker):
    """The last rank is killed in a call; teachers have this class as well."""

    calls = 0

    @register(Dispatch.DP_MP_COMPUTE, columns=POLICY_COLUMNS)
    def compute_log_probs(self, batch: DataProto, **arguments: Any) -> DataProto:
        self._count()
        return super().compute_log_probs(batch, **arguments)

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def compute_top_tokens(self, batch: DataProto, **arguments: Any) -> DataProto:
        self._count()
        return super().compute_top_tokens(batch, **arguments)

    def _count(self) -> None:
        self.calls += 1
        if self.context.rank == self.context.world_size - 1:
            die_if_due(self.calls)


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


class FullDiskSft(SftWorker):
    """The last rank finds no room for its second checkpoint."""

    saves = 0

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        self.saves += 1
        unlimited = resource.RLIM_INFINITY
        if self.context.rank == self.context.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if self.saves == 2 else unlimited, unlimited))
        super().save_checkpoint(path)


class _InfiniteOnce:
    """The loss of a call is infinite, with a finite gradient."""

    calls = 0

    def optimizer_step(self, batch: TensorBatch, loss: LossFunction, *arguments: Any, **options: Any) -> Metrics:
        self.calls += 1
        offset = math.inf if is_due(self.calls) else 0.0

        def spoilt(outputs: TensorBatch, rows: TensorBatch) -> tuple[torch.Tensor, Metrics]:
            value, metrics = loss(outputs, rows)
            return value + offset, metrics

        metrics: Metrics = super().optimizer_step(batch, spoilt, *arguments, **options)  # type: ignore[misc]
        return metrics


class InfiniteOnce(_InfiniteOnce, SftWorker):
    """As its first base says."""


class InfiniteStudent(_InfiniteOnce, DistillWorker):
    """As its first base says."""
