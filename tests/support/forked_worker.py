"""Worker script of a Ray with ``warm_workers``, in place of Ray's own: asks for a worker, and ends with it.

It imports next to nothing, since that is the point.
"""

import json
import os
import socket
import struct
import sys

SOCKET_ENV = "ROLL_TEST_WARM_WORKERS"


def main() -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ[SOCKET_ENV])
        request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(link, [struct.pack("!I", len(request))], [0, 1, 2])
        link.sendall(request)
        link.recv(1)  # the other end closes when the worker is gone


if __name__ == "__main__":
    main()
