"""Workers that go wrong in the middle of a run."""

from __future__ import annotations

import time

from roll.distributed import Dispatch, register
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
from roll.workers.actor import LOSS_COLUMNS, ActorWorker
from roll.workers.model import MODEL_COLUMNS


class HangingActor(ActorWorker):
    """Never comes back from its first update."""

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + LOSS_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        wait_for_ever()
        return {}


def wait_for_ever() -> None:
    while True:
        time.sleep(1)
