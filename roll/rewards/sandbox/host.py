"""What this host permits: entered once by the process that forks all others, found by trying."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence, Set
from dataclasses import replace

from roll.rewards.sandbox import kernel, landlock, mounts, seccomp
from roll.rewards.sandbox.limits import Means

UIDS = 16
"""User ids of one sandbox, one a process at a time."""
_FIRST_UID, _BLOCKS, _BLOCK = 60578, 35, UIDS + 1
"""A range that distributions assign to nobody; the last of each block ends the processes of the others."""
LATEST_ABI = 99

_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def find_means(without: Set[str], landlock_abi: int | None = None) -> tuple[Means, object]:
    """The means that need no preparation.

    Args:
        without: names of :data:`~roll.rewards.sandbox.limits.MEANS` that are left alone.
        landlock_abi: the highest version of Landlock that is used; None: the kernel's.

    Returns:
        The means, and an object that must live as long as this process.
    """
    first_uid, claim = (None, None) if "uid" in without or os.geteuid() != 0 else claim_uids()
    means = Means(
        first_uid=first_uid,
        landlock=0 if "landlock" in without else min(landlock.abi(), landlock_abi or LATEST_ABI),
        seccomp="seccomp" not in without and seccomp.supported(),
    )
    return means, claim


def enter_view(means: Means, readable: Sequence[str]) -> Means:
    """See only ``readable`` from now on, where the host permits it."""
    with contextlib.suppress(OSError):
        mounts.enter_view(readable)
        return replace(means, mounts=True)
    return means


def enter_namespaces(means: Means) -> Means:
    """All namespaces or none: as the superuser, else inside a user namespace, where any user is one."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            kernel.unshare(_NAMESPACES)
            return replace(means, process_namespace=True, network_namespace=True)
    uid, gid = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.CLONE_NEWUSER | _NAMESPACES)
    except OSError:
        return means
    for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(content)
    return replace(means, user_namespace=True, process_namespace=True, network_namespace=True, first_uid=None)


def claim_uids() -> tuple[int | None, socket.socket | None]:
    """User ids that no other sandbox of this host uses: the claim is a name that the kernel gives to one socket."""
    for block in range(_BLOCKS):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0roll-sandbox-{block}")
            return _FIRST_UID + block * _BLOCK, claim
        except OSError:
            claim.close()
    return None, None
