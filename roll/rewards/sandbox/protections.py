"""Limits of a sandboxed process and its end; protections: what each prevents, which of them a host gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """Exceeding one ends or fails the process, never the run."""

    wall: float = 10.0
    """Seconds until all its processes are killed."""
    memory: int = 1024 * MEBIBYTE
    """Bytes of address space, of each of its processes."""
    file_size: int = 16 * MEBIBYTE
    """Bytes of one file, its output included."""
    scratch: int = 64 * MEBIBYTE
    """Bytes of its private folder, where mounts are possible."""
    processes: int = 1
    """Processes at a time; 1: it cannot start another. Threads do not count."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a sandboxed process."""

    code: int
    """Exit status, or minus the signal that killed it."""
    timed_out: bool = False
    """Killed at the wall time limit."""
    error: str | None = None
    """Why the host could not run it; the other fields then mean nothing."""


@dataclass(frozen=True, slots=True)
class Means:
    """Means that the host lets the sandbox use; found by trying."""

    user_namespace: bool = False
    process_namespace: bool = False
    network_namespace: bool = False
    mounts: bool = False
    first_uid: int | None = None
    """A block of user ids of the sandbox's own."""
    landlock: int = 0
    """The version of its interface that is used; 0: none."""
    seccomp: bool = False


MEANS = ("namespaces", "mounts", "uid", "landlock", "seccomp")
"""Names by which a test takes means away."""


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
"""Name to what it keeps a response from, or to."""
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
"""Name to what programs may do without it."""


class MissingProtection(RuntimeError):
    """The host lacks a protection that ``require`` names."""


@dataclass(frozen=True, slots=True)
class Report:
    """Findings of the trial at the sandbox's start."""

    given: dict[str, bool]
    """Protection to whether this host gives it."""
    means: tuple[str, ...] = field(default=())
    """The means: namespaces, mounts, user ids, Landlock, seccomp."""

    @classmethod
    def of(cls, found: dict[str, Any]) -> Report:
        given = {name: name == "limits" or bool(found.get(name)) for name in PROTECTIONS}
        return cls(given, tuple(found["means"]))

    @property
    def missing(self) -> list[str]:
        return [name for name, held in self.given.items() if not held]

    @property
    def broken_promises(self) -> list[str]:
        """Promised protections that are missing."""
        return [name for name in self.missing if name in PROMISED]

    def line(self) -> str:
        """One line for the log."""
        given = ", ".join(name for name, held in self.given.items() if held)
        lacking = f"; this host does not give: {', '.join(self.missing)}" if self.missing else ""
        return f"{given} (by {', '.join(self.means) or 'nothing'}){lacking}"


def consequence(names: Sequence[str]) -> str:
    """Consequences of a host without these protections; empty: none."""
    return f"programs that the model writes {'; '.join(CONSEQUENCES[name] for name in names)}" if names else ""


def check_required(report: Report, required: Sequence[str]) -> None:
    """
    Raises:
        MissingProtection: one of ``required`` is missing.
    """
    missing = [name for name in required if not report.given[name]]
    if missing:
        lacks = "; ".join(f"{name} ({PROTECTIONS[name]})" for name in missing)
        kept = [name for name in required if name not in missing]
        raise MissingProtection(
            f"model-written code may not run here: this host does not give {lacks}. It has {report.line()}. "
            "Run where namespaces or Landlock are permitted (docs/code-rewards.md lists hosts), or on another host "
            f"(use_local: false and code_url), or accept with require: [{', '.join(kept)}] that {consequence(missing)}"
        )
