"""Runs a command as on a host that permits less: ``python poorer_host.py JSON COMMAND...``.

``no_namespaces``: Docker's default filter, as far as it concerns the sandbox; ``no_landlock``: a kernel without it;
``docker_capabilities``: those of a container's root; ``user``: a plain user's id; ``python``: an interpreter that every
user can read, in place of the command's first word.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct
import sys

ARM = platform.machine() == "aarch64"
NAMESPACE_CALLS = (
    (97, 268, 40, 39, 41, 428, 429, 430, 432, 442) if ARM else (272, 308, 165, 166, 155, 428, 429, 430, 432, 442)
)
"""unshare, setns, mount, umount2, pivot_root, open_tree, move_mount, fsopen, fsmount, mount_setattr."""
LANDLOCK_CALLS = (444, 445, 446)
CLONE, CLONE3, NEW_NAMESPACES = (220 if ARM else 56), 435, 0x7E020080
DOCKER_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
LOAD, EQUAL, SET, RETURN, ALLOW, ERROR = 0x20, 0x15, 0x45, 0x06, 0x7FFF0000, 0x00050000

libc = ctypes.CDLL(None, use_errno=True)


def refuse(calls: dict[int, int], namespaces: bool) -> None:
    """Each call fails with its errno, and with ``namespaces`` so does ``clone`` with a flag that makes one."""
    program = [(LOAD, 0, 0, 0)]
    for number, error in calls.items():
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | error)]
    if namespaces:
        program += [(EQUAL, 0, 3, CLONE), (LOAD, 0, 0, 16), (SET, 0, 1, NEW_NAMESPACES), (RETURN, 0, 0, ERROR | 1)]
    code = b"".join(struct.pack("<HBBI", *each) for each in [*program, (RETURN, 0, 0, ALLOW)])
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    zero = ctypes.c_ulong(0)
    if os.geteuid() != 0:
        assert libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0
    assert libc.prctl(22, ctypes.c_ulong(2), header, zero, zero) == 0, os.strerror(ctypes.get_errno())


def main() -> None:
    host, command = json.loads(sys.argv[1]), sys.argv[2:]
    if host.get("docker_capabilities"):
        for capability in set(range(64)) - DOCKER_CAPABILITIES:
            libc.prctl(24, ctypes.c_ulong(capability), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    no_namespaces = host.get("no_namespaces", False)
    calls = dict.fromkeys(LANDLOCK_CALLS, errno.ENOSYS) if host.get("no_landlock") else {}
    if no_namespaces:
        calls |= {CLONE3: errno.ENOSYS, **dict.fromkeys(NAMESPACE_CALLS, errno.EPERM)}
    if calls:
        refuse(calls, no_namespaces)
    if host.get("python"):
        os.environ["PYTHONPATH"] = ":".join([os.environ["PYTHONPATH"], *host["path"]])
        command[0] = host["python"]
    if host.get("user"):
        os.setgroups([])
        os.setresgid(*[host["user"]] * 3)
        os.setresuid(*[host["user"]] * 3)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
