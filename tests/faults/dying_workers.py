"""Workers that are killed, as often as a file says: each line of ``DEATHS`` (an environment variable) is a call."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from roll.distributed import Dispatch, register
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
from roll.workers.model import MODEL_COLUMNS, POLICY_COLUMNS
from roll.workers.training import LOSS_COLUMNS, PAIR_COLUMNS, ActorWorker, PreferenceWorker, SftWorker

DEATHS_ENV = "DEATHS"


def die_if_due(call: int) -> None:
    """Kill this process (SIGKILL) if the first line of the file names this call; the line is used up."""
    file = Path(os.environ[DEATHS_ENV])
    due = file.read_text().split() if file.exists() else []
    if due and int(due[0]) == call:
        file.write_text("\n".join(due[1:]))
        os.kill(os.getpid(), signal.SIGKILL)


class DyingActor(ActorWorker):
    """The last rank is killed in an update, counted from the start of its process."""

    calls = 0

    @register(Dispatch.DP_MP_COMPUTE, columns=POLICY_COLUMNS + LOSS_COLUMNS)
    def update(self, batch: DataProto, **arguments: Any) -> Metrics:
        self.calls += 1
        if self.context.rank == self.context.world_size - 1:
            die_if_due(self.calls)
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
