"""SGLang's engine as this project runs it: a tokenizer manager here, one scheduler process a rank, nothing else."""

from __future__ import annotations

import atexit
import multiprocessing
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import run_scheduler_process

from roll.strategies.sglang.sampler import install

_SECONDS_TO_END = 10.0


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """SGLang's scheduler process, with the sampler of this project."""
    install()
    run_scheduler_process(*arguments, **keywords)


class TokenEngine(Engine):
    """An engine without a detokenizer: token ids are all that goes in and comes out."""

    send_to_rpc: Any
    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
        return [], []

    def shutdown(self) -> None:
        """End the schedulers and wait for them. SGLang's own would end every child of this process."""
        atexit.unregister(self.shutdown)
        watchdog = getattr(self.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        own = set(self.get_all_child_pids())
        schedulers = [process for process in multiprocessing.active_children() if process.pid in own]
        for process in schedulers:
            process.kill()
        for process in schedulers:
            process.join(_SECONDS_TO_END)
        socket, self.send_to_rpc = self.send_to_rpc, None
        if socket is not None:
            socket.close(linger=0)
