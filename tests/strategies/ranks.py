"""A pool of processes that form gloo groups of any size up to the pool's, many times over.

Importing torch and transformers costs seconds, so a fork server imports them once, and the processes live as long as
the test session.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PRELOAD = ["torch", "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2", "roll.strategies.fsdp2"]


class RankPool:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        self._runs = 0

    def run(self, folder: Path, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on ranks 0..world_size-1 of a fresh process group; the results by rank.

        An argument that is a ``list`` of ``world_size`` elements is handed out by rank.
        """
        self._runs += 1
        store = folder / f"store_{os.getpid()}_{self._runs}"
        for rank, link in enumerate(self._links[:world_size]):
            own = [arg[rank] if isinstance(arg, list) and len(arg) == world_size else arg for arg in args]
            link.send((store, world_size, function, own))
        answers = []
        for rank, link in enumerate(self._links[:world_size]):
            if not link.poll(120):
                errors = [other.recv()[0] for other in self._links[rank + 1 : world_size] if other.poll()]
                raise AssertionError(
                    f"rank {rank} of {world_size} did not answer {function.__name__} within two minutes; "
                    f"the others: {errors}"
                )
            answers.append(link.recv())
        for rank, (error, _) in enumerate(answers):
            assert error is None, f"rank {rank} of {world_size}:\n{error}"
        return [result for _, result in answers]

    def close(self) -> None:
        for link in self._links:
            link.send(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, link: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (job := link.recv()) is not None:
        store, world_size, function, args = job
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            answer = None, function(*args)
        except Exception:
            answer = traceback.format_exc(), None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        link.send(answer)
    os._exit(0)
