"""What one sandboxed process may use, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

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
    """How a sandboxed process ended."""

    code: int
    """Exit status, or minus the signal that killed it."""
    timed_out: bool = False
    """Killed at the wall time limit."""
    error: str | None = None
    """Why the host could not run it; the other fields then mean nothing."""


@dataclass(frozen=True, slots=True)
class Means:
    """What the host lets the sandbox use; found by trying."""

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
