"""The script of a node whose workers are forked (:mod:`roll.distributed.forked_workers`): requests a fork and ends with
it; without a server it becomes Ray's own script. It imports next to nothing: imports are what forks save."""

import contextlib
import json
import os
import socket
import struct
import sys

SOCKET_ENV = "ROLL_FORK_SERVER"
SCRIPT_ENV = "ROLL_WORKER_SCRIPT"  # path of Ray's script
RAY_SUFFIX = ".ray"  # at the end of the second server's socket
FORKED, ASK_NEXT = b"1", b"2"  # answers of a server; none: the worker starts as Ray starts it
_CONTEXT = "--serialized-runtime-env-context="


def main() -> None:
    """Arguments as Ray's ``setup_worker.py`` has them: the variables of the worker, its language, its command."""
    context = next((word[len(_CONTEXT) :] for word in sys.argv if word.startswith(_CONTEXT)), "{}")
    own = json.loads(context)
    command = [word for word in sys.argv[1:] if not word.startswith((_CONTEXT, "--language="))]
    request = json.dumps(
        {"arguments": command, "environment": {**os.environ, **own.get("env_vars", {})}, "folder": os.getcwd()}
    ).encode()
    # A worker in a container, or of another interpreter (a runtime_env with conda or uv), cannot be a fork of this one.
    is_plain = not own.get("command_prefix") and own.get("py_executable", sys.executable) == sys.executable
    first = os.environ[SOCKET_ENV]
    for path in (first, first + RAY_SUFFIX) if is_plain else ():
        with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(OSError):  # no server
            link.connect(path)
            socket.send_fds(link, [struct.pack("!I", len(request))], [0, 1, 2])
            link.sendall(request)
            answer = link.recv(1)
            if answer == FORKED:
                link.recv(1)  # the other end closes when the worker is gone
                return
            if answer != ASK_NEXT:
                break
    os.execv(sys.executable, [sys.executable, os.environ[SCRIPT_ENV], *sys.argv[1:]])


if __name__ == "__main__":
    main()
