"""Ray's workers as forks of a process that has imported torch and transformers already.

A worker is a process of its own, and its imports cost about four seconds of computing: on a host with few cores, most
of the time until the first step. With :func:`forking` a run on a CPU host pays for them once, while Ray starts: the
node's Ray runs ``worker_script.py`` in place of its own script, which asks the process that is started here for a fork.
What the worker then does is Ray's own script again.

A worker is forked only where it could not tell the difference: not if a variable of its environment is another than the
server's (a library may have read it when it was imported), and not if the server has more than one thread. Otherwise,
and if there is no server, it starts as Ray starts it. Hosts with accelerators have no server: CUDA cannot be used after
a fork if its driver was asked anything before.

Ray reads the settings of a worker when it is imported. So a second server, a fork of the first, imports it with those
of the first worker, and forks the workers that have the same: all those of a driver. It also imports what the backends
of the roles need, since some of them (vLLM) import Ray.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.strategies.registry import BACKENDS
from roll.distributed.guard import MARK_ENV, session_dir
from roll.distributed.nodes import LOG_DIR_ENV, absent_here, environment
from roll.distributed.signals import ENDING
from roll.distributed.worker_script import ASK_NEXT, FORKED, RAY_SUFFIX, SCRIPT_ENV, SOCKET_ENV
from roll.platforms import current_platform

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

logger = logging.getLogger(__name__)

_IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_layers",
    "roll.models.build",
)
"""Imported by the workers of every role with a model; none of them imports Ray."""
_WITH_RAY = (
    "ray._private.workers.default_worker",
    "roll.distributed.actor",
    "roll.workers.generation",
    "roll.rollout.rewarding",
    "roll.workers.model",
)
"""Imported where Ray's settings are known."""
_READ_WHEN_USED = (MARK_ENV, LOG_DIR_ENV, SOCKET_ENV, SCRIPT_ENV, "SPT_NOENV")
"""The last one is for the title that Ray gives a worker's process."""
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_PATIENCE_SECONDS = 5.0  # time limit for reading a worker's request, which is sent in one piece

_running: ForkServer | None = None


class ForkServer:
    """The process that is forked, as the driver sees it.

    Args:
        folder: of its socket, which only this user may enter.
        num_devices: of this node, by which threads are divided.
        modules: to import, in addition to what every model needs.
        system_envs: variables of all workers.
    """

    def __init__(self, folder: Path, num_devices: int, modules: Iterable[str], system_envs: Mapping[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        """The run's mark: /proc shows this server's environment, mark included, as that of each fork."""
        self._socket = folder / "socket"
        root = str(Path(__file__).parents[2])
        begin = f"import sys; sys.path.insert(0, {root!r}); from roll.distributed.forked_workers import serve; serve()"
        # As for Ray's daemons: a signal to the whole process group is the driver's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self._process = subprocess.Popen(
                # -P keeps the working directory off the path, where a file such as json.py would replace a standard
                # module.
                [sys.executable, "-P", "-c", begin, str(self._socket), *modules],
                env={**os.environ, **absent_here(num_devices, self.mark), **system_envs, MARK_ENV: self.mark},
                stdin=subprocess.PIPE,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid

    def environment(self, script: str) -> dict[str, str]:
        """Variables of a node whose workers are forked; ``script`` is the path of Ray's own."""
        return {SOCKET_ENV: str(self._socket), SCRIPT_ENV: script}

    def close(self) -> None:
        """End the server; its forks keep running. A second call does nothing."""
        self._process.kill()
        self._process.communicate()


def forking(loaded: LoadedConfig[Any]) -> AbstractContextManager[None]:
    """:func:`forked` for the roles of a run."""
    names = {role.strategy_args.strategy_name for role in loaded.pipeline.started(loaded.config).values()}
    backends = [BACKENDS[name] for name in names if name in BACKENDS]
    classes = {path for backend in backends for path in (backend.computes, backend.generates) if path}
    modules = sorted(path.rpartition(".")[0] for path in classes)
    return forked(loaded.plan.num_devices_per_node, modules, loaded.config.system_envs)


@contextmanager
def forked(num_devices: int, modules: Iterable[str], system_envs: Mapping[str, str] | None = None) -> Iterator[None]:
    """Let the workers of a Ray that this process starts in the block be forks, on a host where they can be; see
    :class:`ForkServer`."""
    global _running
    has_ray = bool(os.environ.get("RAY_ADDRESS")) or ("ray" in sys.modules and sys.modules["ray"].is_initialized())
    if has_ray or current_platform().device_type != "cpu" or not sys.platform.startswith("linux"):
        yield
        return
    with session_dir() as folder:
        _running = ForkServer(folder, num_devices, modules, system_envs or {})
        try:
            yield
        finally:
            _running.close()
            _running = None


def fork_server() -> ForkServer | None:
    """The server of this process's runs; None: workers start as Ray starts them."""
    return _running


def serve() -> None:
    """Fork a worker for each connection to the socket of the first argument, as long as standard input is open."""
    path, *modules = sys.argv[1:]
    begun_with = dict(os.environ)  # imports add to it
    gc.disable()  # imports make a million objects that stay: a fifth of their time goes to looking for others
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)  # who comes before the imports are done waits
        # Threads of OpenBLAS, which it starts when it is loaded, would be missing in a fork.
        with environment({_BLAS_THREADS: "1"}):
            import_module("numpy")
        if not _import_all(_IMPORTED):
            return
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
        settings: Mapping[str, str] | None = None
        for request in _requests(server):
            if request.would_import({**begun_with, **request.settings_of_ray}):
                if settings is None:
                    settings = request.settings_of_ray
                    _serve_with_ray(path + RAY_SUFFIX, modules, {**begun_with, **settings}, server, request)
                if request.settings_of_ray == settings:
                    with suppress(OSError):  # the worker is gone
                        request.link.sendall(ASK_NEXT)
                elif os.fork() == 0:
                    server.close()
                    request.become_worker()
            request.close()


def _serve_with_ray(
    path: str, modules: Iterable[str], variables: Mapping[str, str], first: socket.socket, request: _Request
) -> None:
    """Start the second server, which imports Ray and ``modules``; its workers import under ``variables``."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        if os.fork():
            return
        first.close()  # What is open here would seem to be open at its owner's.
        request.close()
        os.environ.update(request.settings_of_ray)
        for request in _requests(server) if _import_all((*_WITH_RAY, *modules)) else ():
            if request.would_import(variables) and os.fork() == 0:
                server.close()
                request.become_worker()
            request.close()
    os._exit(0)  # not a return, which would continue the first server's loop


def _import_all(names: Iterable[str]) -> bool:
    """Import the modules; False, with a warning, where one cannot be imported."""
    for name in names:
        try:
            import_module(name)
        except Exception as error:  # The worker that needs it fails with an account of its own.
            logger.warning("workers are not forked, since %s cannot be imported: %s", name, error)
            return False
    return True


def _requests(server: socket.socket) -> Iterator[_Request]:
    """Requests of workers, as long as standard input is open and this process can be forked."""
    while True:
        # What was imported leaves the collector's generations: a collection in a fork would write to every page and
        # copy it.
        gc.freeze()
        # Only the thread that calls fork() lives on in the child: locks held by any other would stay locked there for
        # ever.
        if len(os.listdir("/proc/self/task")) > 1:
            return
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in ready:  # closed: the driver is gone
            return
        link, _ = server.accept()
        with link, suppress(OSError, ValueError, struct.error):  # a client that is gone, or none of ours
            yield _Request(link)


class _Request:
    """Request of a worker's script: its arguments and environment, with its standard streams."""

    def __init__(self, link: socket.socket) -> None:
        # A client that connects and says nothing would block the forks of all others.
        link.settimeout(_PATIENCE_SECONDS)
        header, self._streams, _, _ = socket.recv_fds(link, 4, 3)
        with link.makefile("rb") as file:
            message: dict[str, Any] = json.loads(file.read(struct.unpack("!I", header)[0]))
        link.settimeout(None)
        self.link = link
        self._arguments: list[str] = message["arguments"]
        self._environment: dict[str, str] = message["environment"]
        self._folder: str = message["folder"]
        self.settings_of_ray = {k: v for k, v in self._environment.items() if k.startswith("RAY_")}

    def would_import(self, variables: Mapping[str, str]) -> bool:
        """True if the worker imports under these variables; what the run reads later may differ."""
        names = (self._environment.keys() | variables.keys()).difference(_READ_WHEN_USED)
        return all(self._environment.get(name) == variables.get(name) for name in names)

    def close(self) -> None:
        self.link.close()
        for stream in self._streams:
            os.close(stream)

    def become_worker(self) -> None:
        """Run Ray's script in this process, whose end is the worker's."""
        # The server ignores SIGCHLD; inherited, it would keep a worker from learning how its own subprocesses ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, stream in enumerate(self._streams):
            os.dup2(stream, number)
            os.close(stream)
        self.link.sendall(FORKED)
        os.chdir(self._folder)
        os.environ.update(self._environment)
        sys.argv = self._arguments
        gc.enable()
        runpy.run_path(sys.argv[0], run_name="__main__")
        # Not a return: the fork would continue in the server's loop, and remove its socket at the end.
        os._exit(0)
