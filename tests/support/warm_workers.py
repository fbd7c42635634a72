"""Ray's workers as forks of a process that has imported torch and transformers already.

An actor of a run is a process of its own, and its imports cost several seconds of computing, most of the time of a
short run. ``warm_workers()`` makes a Ray that is started in its block fork them instead; what a worker then does is
Ray's own script. Two things differ: the environment that ``/proc`` shows is the forking process's, so a worker is not
found by its run's mark, and its parent is not the raylet. Tests of how processes end start a Ray of their own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from tests.support import forked_worker

IMPORTED = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.tokenization_auto",
    "roll.models.build",
    "roll.protocol",
    "roll.strategies.fsdp.fsdp2",
    "roll.strategies.hf_infer",
]
INSTALLED = ["deepspeed", "peft"]
"""Ray itself is not among them: it reads its settings, the worker's job among them, when it is imported."""


@contextmanager
def warm_workers() -> Iterator[None]:
    """A Ray whose node starts within the block has its workers forked."""
    from roll.distributed import ray_node

    with TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        server = subprocess.Popen([sys.executable, "-m", __spec__.name, str(path)], stdin=subprocess.PIPE)
        try:
            parameters = partial(ray_node.RayParams, setup_worker_path=forked_worker.__file__)
            environment = {forked_worker.SOCKET_ENV: str(path)}
            with mock.patch.object(ray_node, "RayParams", parameters), mock.patch.dict(os.environ, environment):
                yield
        finally:
            server.kill()
            server.wait()


def serve(path: Path) -> None:
    """Fork a worker for every connection."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(64)  # who comes before the imports are done waits
        for name in IMPORTED:
            importlib.import_module(name)
        for name in filter(find_spec, INSTALLED):
            importlib.import_module(name)
        assert "ray" not in sys.modules
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
        while True:
            link, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _become_worker(link)
            link.close()


def _become_worker(link: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    header, streams, _, _ = socket.recv_fds(link, 4, 3)
    with link.makefile("rb") as file:
        arguments, environment, folder = json.loads(file.read(struct.unpack("!I", header)[0]))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)

    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers.setup_worker import parser

    known, sys.argv = parser.parse_known_args(arguments)
    own = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}").env_vars
    update_envs(own)
    if "PYTHONPATH" in own:
        # What is imported here already was not looked for there (transformers and torchvision, say): begin anew.
        link.set_inheritable(True)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
