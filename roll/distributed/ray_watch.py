"""Ray's own daemons on this node, watched: without them calls hang or fail in ways that do not name the cause."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from roll.distributed.failures import RayLost
from roll.distributed.worker_logs import tail

if TYPE_CHECKING:
    from ray._private.node import Node

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_LOG_LINES = 8
DAEMONS = {"gcs_server": "the cluster's control service", "raylet": "the node's daemon"}


class RayWatch:
    """Looks after the daemons that ``node`` has started.

    Args:
        on_loss: called once, in the watching thread.
    """

    def __init__(self, node: Node, folder: Path, on_loss: Callable[[RayLost], None]) -> None:
        self._node = node
        self._folder = folder
        self._on_loss = on_loss
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._lost: RayLost | None = None
        threading.Thread(target=self._watch, name="ray watch", daemon=True).start()

    def look(self) -> RayLost | None:
        """What has happened to them; None: they run."""
        with self._lock:
            if self._lost is None and not self._stopped.is_set():
                dead = [(name, process) for name, process in self._node.dead_processes() if name in DAEMONS]
                if dead:
                    self._lost = self._describe(*dead[0])
            return self._lost

    def stop(self) -> None:
        """They are about to be ended."""
        with self._lock:
            self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            lost = self.look()
            if lost is not None:
                self._on_loss(lost)
                return

    def _describe(self, name: str, process: object) -> RayLost:
        status = int(getattr(process, "returncode", 0) or 0)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        files = [*self._folder.glob(f"session_2*/logs/{name}.out"), *self._folder.glob(f"session_2*/logs/{name}.err")]
        lines = [line for file in files for line in tail(file, _LOG_LINES)]
        what = f"Ray's {name} ({DAEMONS[name]}, pid {getattr(process, 'pid', '?')}) {how}"
        return RayLost(name, what, lines[-_LOG_LINES:])


def daemon_pids(node: Node) -> dict[str, int]:
    """The daemons that ``node`` has started, by name."""
    return {name: infos[0].process.pid for name, infos in node.all_processes.items() if name in DAEMONS and infos}


_current: RayWatch | None = None


def set_current(watch: RayWatch | None) -> None:
    """Whom :func:`ray_lost` asks: a process has one connection to Ray at a time."""
    global _current
    _current = watch


def ray_lost() -> RayLost | None:
    """What has happened to the daemons of the Ray that this process has started; None: nothing. Where they are gone,
    Ray must not be called any more: it would look for them for a minute."""
    return None if _current is None else _current.look()
