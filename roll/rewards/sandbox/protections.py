"""Limits of a sandboxed process and its end; protections: what each prevents, and which of them a host gives, found out
by attacking: a confined process tries what it must not be able to do."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """Exceeding one ends or fails the process, never the run."""

    wall: float = 10.0  # seconds until all its processes are killed
    memory: int = 1024 * MEBIBYTE  # bytes of address space, of each of its processes
    file_size: int = 16 * MEBIBYTE  # bytes of one file, its output included
    scratch: int = 64 * MEBIBYTE  # bytes of its private folder, where mounts are possible
    processes: int = 1  # processes at a time; 1: it cannot start another. Threads do not count.


@dataclass(frozen=True, slots=True)
class Ended:
    code: int  # exit status, or minus the signal that killed it
    timed_out: bool = False  # killed at the wall time limit
    error: str | None = None  # why the host could not run it; the other fields then mean nothing


@dataclass(frozen=True, slots=True)
class Means:
    """Means that the host lets the sandbox use; found by trying."""

    user_namespace: bool = False
    process_namespace: bool = False
    network_namespace: bool = False
    mounts: bool = False
    first_uid: int | None = None  # a block of user ids of the sandbox's own
    landlock: int = 0  # the version of its interface that is used; 0: none
    seccomp: bool = False


MEANS = ("namespaces", "mounts", "uid", "landlock", "seccomp")  # names of the means that tests can disable


PROTECTIONS = {
    "limits": "processor time, memory, size and number of files, wall time",
    "network": "no connection to anything, this host included",
    "files": "nothing outside the private folder can be written or changed",
    "private": "other processes' environment, memory and open files, and files beyond the system's, cannot be read",
    "signals": "no signal and no change of priority reaches another process",
    "syscalls": "a filter refuses system calls that programs do not need",
    "ends": "all its processes end with it",
    "scratch": "the private folder is limited in size",
    "user": "a user id of its own",
}
"""By name: what a protection prevents or limits."""
PROMISED = ("limits", "network", "files", "private", "signals", "syscalls", "ends")
"""Without these the reward does not start unless its configuration says so."""
CONSEQUENCES = {
    "limits": "may use up this host's memory and time",
    "network": "may reach the network and this host's services",
    "files": "may write, change and delete what this user may, checkpoints included",
    "private": "may read this user's files and keys, and the tests that judge them",
    "signals": "may kill or slow down this user's processes, the training run included",
    "syscalls": "may attack the kernel through all its calls",
    "ends": "may leave processes behind",
    "scratch": "may fill the disk that holds temporary files",
    "user": "run under this process's user id",
}
"""By name: what programs may do where it is missing."""


class MissingProtection(RuntimeError):
    """The host lacks a protection that ``require`` names."""


@dataclass(frozen=True, slots=True)
class Report:
    """Findings of the trial at the sandbox's start."""

    given: dict[str, bool]  # protection to whether this host gives it
    means: tuple[str, ...] = field(default=())  # the means: namespaces, mounts, user ids, Landlock, seccomp

    @property
    def missing(self) -> list[str]:
        return [name for name, held in self.given.items() if not held]

    def line(self) -> str:
        """One line for the log."""
        given = ", ".join(name for name, held in self.given.items() if held)
        lacking = f"; this host does not give: {', '.join(self.missing)}" if self.missing else ""
        return f"{given} (by {', '.join(self.means) or 'nothing'}){lacking}"


def consequence(names: Sequence[str]) -> str:
    """Consequences of a host without these protections; empty: none."""
    return f"programs that the model writes {'; '.join(CONSEQUENCES[name] for name in names)}" if names else ""


def check_required(report: Report, required: Sequence[str]) -> None:
    """Raise ``MissingProtection`` where the host lacks one of ``required``."""
    missing = [name for name in required if not report.given[name]]
    if missing:
        lacks = "; ".join(f"{name} ({PROTECTIONS[name]})" for name in missing)
        kept = [name for name in required if name not in missing]
        raise MissingProtection(
            f"model-written code may not run here: this host does not give {lacks}. It has {report.line()}. "
            "Run where namespaces or Landlock are permitted (docs/code-rewards.md lists hosts), or on another host "
            f"(use_local: false and code_url), or accept with require: [{', '.join(kept)}] that {consequence(missing)}"
        )


TRIAL_SLOT = 0
TRIAL_LIMITS = Limits(wall=10.0)
_UNUSED_MODULE = "colorsys"
"""One of Python's that nothing here has loaded: loading it shows that the interpreter's files can be read."""
_CANARY = b"alive"
_TIME = 1_000_000_000
_F_SETOWN = 8


def make_canary(parent: str | None) -> str | None:
    """Create a file that every user may read; none where processes do not see this host's files."""
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
            # Names of sockets belong to a network namespace, and to the files of a mount namespace.
            return os.path.exists("/run")
        except OSError:
            return False
    return True


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
    """Try every change of the file; those that report success without effect are detected afterwards."""
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
