"""Calls as a type checker sees them: ``mypy`` reads this file, and an error that it no longer finds is one itself."""

from __future__ import annotations

from typing import assert_type

from roll.distributed import Cluster, PendingCall, Worker
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
from roll.rollout.groups import EngineCommand, EngineReport
from roll.workers.generation import GenerationWorker
from roll.workers.model import ModelWorker
from roll.workers.supervised import SftWorker
from roll.workers.training import TrainingWorker


def right(cluster: Cluster, batch: DataProto, command: EngineCommand) -> None:
    assert_type(cluster.call(SftWorker.update, batch), PendingCall[Metrics])
    assert_type(cluster.call(ModelWorker.compute_log_probs, batch, temperature=0.5).result(), DataProto)
    assert_type(cluster.call_all(TrainingWorker.checkpoint_saved, wait=True).result(), list[bool])
    assert_type(cluster.submit(0, GenerationWorker.advance, command).within(5.0), PendingCall[EngineReport])
    assert_type(cluster.submit(0, Worker.ping).result(), int)


def wrong(cluster: Cluster, batch: DataProto) -> None:
    cluster.call(ModelWorker.compute_log_probs, batch, temprature=0.5)  # type: ignore[call-arg]
    cluster.call(ModelWorker.compute_log_probs, batch, temperature="0.5")  # type: ignore[arg-type]
    cluster.call(SftWorker.update)  # type: ignore[call-arg]
    cluster.call_all(TrainingWorker.save_checkpoint, 3)  # type: ignore[arg-type]
    cluster.call(SftWorker.updat, batch)  # type: ignore[attr-defined]
    cluster.update(batch)  # type: ignore[attr-defined]
