"""A pool of processes that form gloo groups of any size up to the pool's, many times over.

Jobs and answers are pickled as bytes: a pipe's own way with tensors is a shared-memory file each.

Importing torch, transformers and the backends costs seconds, so a fork server imports them once (those that are
installed), and the processes serve many jobs. Not all: groups that something still refers to keep their threads, which
in the hundreds take a fifth of the time, so now and then fresh processes take over.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_PRELOAD = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen2.modeling_qwen2",
    "roll.strategies.fsdp.fsdp2",
    "roll.strategies.megatron",
    "deepspeed",
]
_SECONDS, _SECONDS_AFTER_ERROR = 120.0, 10.0
_JOBS_OF_A_PROCESS = 40


class RankPool:
    def __init__(self, size: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._size = size
        self._runs = 0
        self._start()

    def _start(self) -> None:
        self._links: list[Connection] = []
        self._processes = []
        self._crashes = tempfile.TemporaryDirectory(prefix="ranks")
        for rank in range(self._size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs, self._crashes.name), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def run(self, folder: Path, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on ranks 0..world_size-1 of a fresh process group; the results by rank.

        An argument that is a ``list`` of ``world_size`` elements is handed out by rank.
        """
        if self._runs and self._runs % _JOBS_OF_A_PROCESS == 0:
            self.restart()
        self._runs += 1
        store = folder / f"store_{os.getpid()}_{self._runs}"
        for rank, link in enumerate(self._links[:world_size]):
            own = [arg[rank] if isinstance(arg, list) and len(arg) == world_size else arg for arg in args]
            link.send_bytes(pickle.dumps((store, world_size, function, own)))
        answers = self._collect(world_size)
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in sorted(answers.items()) if error is not None]
        silent = sorted(set(range(world_size)) - answers.keys())
        if silent or not all(process.is_alive() for process in self._processes):
            self.restart()
        assert not silent, "\n".join([f"no answer to {function.__name__} from ranks {silent}", *errors])
        assert not errors, "\n".join(errors)
        return [answers[rank][1] for rank in range(world_size)]

    def _collect(self, world_size: int) -> dict[int, tuple[str | None, Any]]:
        """Error and result by rank; of those that answer in time. After an error the others may wait for it in vain."""
        answers: dict[int, tuple[str | None, Any]] = {}
        waiting = {link: rank for rank, link in enumerate(self._links[:world_size])}
        give_up = time.monotonic() + _SECONDS
        while waiting and (left := give_up - time.monotonic()) > 0:
            for link in wait(list(waiting), timeout=left):
                assert isinstance(link, Connection)
                rank = waiting.pop(link)
                try:
                    answers[rank] = pickle.loads(link.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = self._last_words(rank), None
                if answers[rank][0] is not None:
                    give_up = min(give_up, time.monotonic() + _SECONDS_AFTER_ERROR)
        return answers

    def _last_words(self, rank: int) -> str:
        """Exit code of a process that ended, and where its threads were if a signal such as SIGSEGV ended it."""
        self._processes[rank].join(timeout=5)
        file = Path(self._crashes.name, str(rank))
        stacks = file.read_text(errors="replace") if file.exists() else ""
        return f"the process ended with exit code {self._processes[rank].exitcode}\n{stacks}"

    def restart(self) -> None:
        """Let fresh processes take over."""
        for process in self._processes:
            process.kill()
            process.join()
        self._crashes.cleanup()
        self._start()

    def close(self) -> None:
        for link in self._links:
            link.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._crashes.cleanup()


def _serve(rank: int, link: Connection, crashes: str) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable(os.open(Path(crashes, str(rank)), os.O_WRONLY | os.O_CREAT))
    torch.set_num_threads(1)
    linear = torch.nn.functional.linear
    # What was imported stays: DeepSpeed collects garbage with each engine, a third of a second over so many objects.
    gc.collect()
    gc.freeze()
    while (job := pickle.loads(link.recv_bytes())) is not None:
        store, world_size, function, args = job
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            # A rank whose job ends at once would leave while another is still connecting to it.
            dist.barrier()
            answer = None, function(*args)
        except Exception:
            answer = traceback.format_exc(), None
        finally:
            _leave_groups()
            # ZeRO-3 puts another in its place, for good; in bf16 that one rounds before it adds a bias.
            torch.nn.functional.linear = linear
            # A group that is still in a cycle would be freed within the next job, and with it the name of a new one.
            gc.collect()
        link.send_bytes(pickle.dumps(answer))
    os._exit(0)


def _leave_groups() -> None:
    """Also those that Megatron and DeepSpeed keep in module variables: the next job forms others."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None and comm.cdb is not None:
        comm.destroy_process_group()
        comm.cdb = None
    if zero := sys.modules.get("deepspeed.runtime.zero.parameter_offload"):
        # It numbers modules from the start of a process, and ranks compare the numbers.
        zero.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)
        sys.modules["deepspeed.runtime.zero.partition_parameters"].Init.param_id = 0
    # It remembers results with their meshes, and takes a later mesh of that shape for the same: its groups are gone.
    _clear_sharding_prop_cache()
    if dist.is_initialized():
        dist.destroy_process_group()
