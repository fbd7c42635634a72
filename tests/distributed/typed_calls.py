"""Calls as a type checker sees them: ``mypy`` reads this file, and an error that it no longer finds is one itself."""

from __future__ import annotations

from typing import assert_type

from roll.distributed import Cluster, PendingCall, Worker
from roll.methods.base import Ask
from roll.methods.sft import SftLoss
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
from roll.rollout.groups import EngineCommand, EngineReport
from roll.workers.generation import GenerationWorker
from roll.workers.model import ModelWorker, TrainWorker


def right(cluster: Cluster, batch: DataProto, command: EngineCommand) -> None:
    assert_type(cluster.call(TrainWorker.step, batch, SftLoss()), PendingCall[Metrics])
    assert_type(cluster.call(ModelWorker.forward, batch, Ask()).result(), DataProto)
    assert_type(cluster.call_all(TrainWorker.checkpoint_saved, wait=True).result(), list[bool])
    assert_type(cluster.submit(0, GenerationWorker.advance, command).within(5.0), PendingCall[EngineReport])
    assert_type(cluster.submit(0, Worker.peak_memory).result(), int)


def wrong(cluster: Cluster, batch: DataProto) -> None:
    cluster.call(TrainWorker.step, batch, SftLoss(), epoch=2)  # type: ignore[call-arg]
    cluster.call(TrainWorker.step, batch, Ask())  # type: ignore[arg-type]
    cluster.call(TrainWorker.step)  # type: ignore[call-arg]
    cluster.call_all(TrainWorker.save_checkpoint, 3)  # type: ignore[arg-type]
    cluster.call(TrainWorker.update, batch)  # type: ignore[attr-defined]
    cluster.update(batch)  # type: ignore[attr-defined]
