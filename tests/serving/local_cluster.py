"""A cluster of real engines in threads of this process: what Ray does, without its processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

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

    def within(self, seconds: float | None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self.future).__await__()


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

    def submit(self, rank: int, method: Callable[..., Any], command: Any) -> LocalCall:
        call = LocalCall(rank, self._threads[rank].submit(self._turn, rank, method.__name__, command))
        return call

    def _turn(self, rank: int, method: str, command: Any) -> Any:
        self.free.wait(30)
        self.turns[rank] += 1
        if rank in self.dead:
            raise WorkerDied("served", method, 0.0, [RankReport(rank, "here", "killed")], [])
        return getattr(self.workers[rank], method)(command)

    def leave_out(self, rank: int) -> None:
        """The pool says that the rank is gone."""

    def close(self) -> None:
        for threads in self._threads:
            threads.shutdown()
