"""Finds out which protections a host gives, by attacking: a confined process tries what it must not be able to do."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import socket
from collections.abc import Callable

from roll.rewards.sandbox.protections import Limits

SLOT = 0
LIMITS = Limits(wall=10.0)
_UNUSED_MODULE = "colorsys"
"""One of Python's that nothing here has loaded: loading it shows that the interpreter's files can be read."""
_CANARY = b"alive"
_TIME = 1_000_000_000
_F_SETOWN = 8


def make_canary(parent: str | None) -> str | None:
    """A file of the zygote's that everybody may read, where processes see this host's files at all."""
    if parent is None:
        return None
    path = f"{parent}/canary"
    with open(path, "wb") as file:
        file.write(_CANARY)
    os.chmod(path, 0o644)
    os.utime(path, (_TIME, _TIME))
    return path


def is_unchanged(canary: str | None) -> bool:
    if canary is None:
        return True
    found = os.stat(canary)
    return (found.st_mode & 0o7777, int(found.st_mtime), found.st_size) == (0o644, _TIME, len(_CANARY))


def attack(parent: int, inside_own_namespace: bool, private_shared_memory: bool, canary: str | None) -> None:
    """Write what was found to descriptor 1."""
    libc = ctypes.CDLL(None)
    found = {
        "runs": can(lambda: importlib.import_module(_UNUSED_MODULE)),
        "network": not reaches_network() and not reaches_sockets_of_this_host(),
        "files": not can_create("/var/tmp")
        and (private_shared_memory or not can_create("/dev/shm"))
        and (canary is None or not can_change(canary)),
        "private": not can(lambda: open(f"/proc/{parent}/environ", "rb").close())
        and not can(lambda: os.listdir(f"/proc/{parent}/fd"))
        and (canary is None or not can(lambda: open(canary, "rb").close())),
        "signals": inside_own_namespace or not can_disturb(parent),
        "syscalls": libc.ptrace(0, 0, 0, 0) == -1 and libc.unshare(0) == -1,
    }
    os.write(1, json.dumps(found).encode())
    os._exit(0)


def can(action: Callable[[], object]) -> bool:
    try:
        action()
    except (OSError, ImportError):
        return False
    return True


def reaches_network() -> bool:
    """A refused connection has reached a network: at least this host's own."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(("127.0.0.1", 9))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def reaches_sockets_of_this_host() -> bool:
    """True if a datagram may be addressed; that nobody has the address does not matter."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        try:
            ours.sendto(b"", "\0roll-sandbox-nobody")
        except ConnectionRefusedError:
            return not is_isolated_from_names()
        except OSError:
            return False
    return True


def is_isolated_from_names() -> bool:
    """Names of sockets belong to a network namespace, and to the files of a mount namespace."""
    return not os.path.exists("/run")


def can_disturb(pid: int) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return any(
            can(action)
            for action in (
                lambda: os.kill(pid, 0),
                lambda: os.setpriority(os.PRIO_PROCESS, pid, 1),
                lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
                lambda: fcntl.fcntl(ours, _F_SETOWN, pid),
            )
        )


def can_create(folder: str) -> bool:
    path = f"{folder}/.roll-sandbox-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except OSError:
        return False
    os.unlink(path)
    return True


def can_change(path: str) -> bool:
    """Try to change the file in every way; the quiet ones are looked for afterwards."""
    for quiet in (lambda: os.chmod(path, 0o600), lambda: os.utime(path, (0, 0))):
        can(quiet)
    return any(
        can(action)
        for action in (
            lambda: os.truncate(path, 0),
            lambda: os.close(os.open(path, os.O_RDONLY | os.O_TRUNC)),
            lambda: os.close(os.open(path, os.O_WRONLY | os.O_APPEND)),
            lambda: os.setxattr(path, "user.roll", b""),
            lambda: os.rename(path, f"{path}-moved"),
        )
    )
