"""Stands in for a helper of Ray's node daemon until it is needed: ``ray_agent.py SCRIPT [ARGUMENT ...]``.

The daemon waits at its start for the ports of two helpers, whose imports cost a second of computing, and ends with
them. The dashboard's reports that it has none, which its own minimal form does, too. The one that prepares environments
of workers (``runtime_env``) is run at the first connection, and takes over the socket. Imports next to nothing.
"""

import os
import runpy
import select
import socket
import sys
from pathlib import Path

UNUSED_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
ENVIRONMENT_PORT = "runtime_env_agent_port"


def main() -> None:
    """Tell the daemon the ports of SCRIPT, then wait for work or for the daemon's end."""
    script, *words = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words if "=" in word)

    def report(name: str, port: int) -> None:
        file = Path(options["--session-dir"]) / f"{name}_{options['--node-id']}"
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(str(port))
        unfinished.rename(file)  # the daemon reads the file as soon as it is there

    wanted = options.get("--runtime-env-agent-port")
    if wanted is None:
        for name in UNUSED_PORTS:
            report(name, -1)
        sys.stdin.read()  # closed at the daemon's end
        return
    listener = socket.create_server((options["--node-ip-address"], int(wanted)))
    report(ENVIRONMENT_PORT, listener.getsockname()[1])
    ready, _, _ = select.select([listener, sys.stdin], [], [])
    if listener in ready:
        become(script, words, listener)


def become(script: str, words: list[str], listener: socket.socket) -> None:
    """Run the helper, whose own socket is bound by giving it the one on which somebody waits."""

    class Bound(socket.socket):
        def bind(self, address: object) -> None:
            os.dup2(listener.fileno(), self.fileno())

    socket.socket = Bound  # type: ignore[misc]
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
