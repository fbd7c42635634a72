"""A cluster of real engines in threads of this process: what Ray does, without its processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.distributed import WorkerContext, WorkerDied
from roll.distributed.failures import RankReport
from roll.workers.generation import GenerationWorker


def engine_role(model: Path, max_model_len: int = 256) -> WorkerConfig:
    """A role whose engines run the model of a folder."""
    return WorkerConfig(
        name="served",
        model_args=ModelArguments(model_name_or_path=str(model), dtype="fp32"),
        strategy_args=StrategyArguments("hf_infer", {"max_num_seqs": 16, "max_model_len": max_model_len}),
    )


class LocalCall:
    def __init__(self, rank: int, future: Future[Any]) -> None:
        self.rank = rank
        self.future = future
        self.error: WorkerDied | None = None

    async def wait(self) -> None:
        await asyncio.wait([asyncio.wrap_future(self.future)])

    def result(self) -> Any:
        return self.future.result()


class LocalCluster:
    """``held`` keeps turns from being taken; ranks in ``dead`` die with their next turn."""

    def __init__(self, role: WorkerConfig, world_size: int) -> None:
        self.role = role
        self.world_size = world_size
        self.workers = [GenerationWorker(WorkerContext("served", role, rank, world_size)) for rank in range(world_size)]
        for worker in self.workers:
            worker.initialize()
        self._threads = [ThreadPoolExecutor(1) for _ in self.workers]
        self.free = threading.Event()
        self.free.set()
        self.dead: set[int] = set()
        self.turns = [0] * world_size

    def submit(self, rank: int, method: str, command: Any, deadline: float | None = None) -> LocalCall:
        call = LocalCall(rank, self._threads[rank].submit(self._turn, rank, method, command))
        return call

    def _turn(self, rank: int, method: str, command: Any) -> Any:
        self.free.wait(30)
        self.turns[rank] += 1
        if rank in self.dead:
            raise WorkerDied("served", method, 0.0, [RankReport(rank, "here", "killed")], [])
        return getattr(self.workers[rank], method)(command)

    def leave_out(self, rank: int) -> None:
        """The pool says that the rank is gone."""

    def wait_any(self, calls: Sequence[LocalCall], timeout: float | None = None) -> list[LocalCall]:
        """In place of :func:`roll.distributed.wait_any`."""
        done, _ = wait([call.future for call in calls], timeout, FIRST_COMPLETED)
        for call in calls:
            if call.future in done and isinstance(error := call.future.exception(), WorkerDied):
                call.error = error
                raise error
        return [call for call in calls if call.future in done]

    def close(self) -> None:
        for threads in self._threads:
            threads.shutdown()
