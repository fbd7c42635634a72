"""What a forked process does to itself before any code of a response runs. Nothing of it can be taken back."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence

from roll.rewards.sandbox import kernel, landlock, mounts, seccomp
from roll.rewards.sandbox.limits import Limits, Means

MAX_THREADS = 32
MAX_OPEN_FILES = 64
STACK = 128 * 2**20
"""Bytes; programs of contests recurse deeply."""
SHARERS = 8
"""Processes that may share one user id, and so one count of processes, on hosts that give the sandbox none."""


def confine(means: Means, limits: Limits, uid: int | None, scratch: str, readable: Sequence[str], proc: bool) -> None:
    """Give up everything that ``means`` allows to give up.

    Args:
        uid: the user to become; None: stay.
        scratch: the folder that stays writable; the working folder afterwards.
        readable: paths that stay readable.
        proc: whether programs need ``/proc``, as other languages' do.

    Raises:
        OSError: a means that the host had at the start failed; nothing may run then.
    """
    os.setsid()
    if means.mounts:
        mounts.mount_scratch(limits.scratch, readable)
        if proc:
            try_proc()
    os.chdir(scratch)
    limit_resources(limits, uid is not None or means.user_namespace, uid is None)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if means.user_namespace or os.geteuid() == 0:
        kernel.drop_capabilities()
    kernel.hide_from_other_processes()
    # The kernel clears it when the user changes, so it comes after that.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if means.landlock and not means.mounts:
        landlock.restrict(readable, [scratch, *mounts.DEVICES], means.landlock)
    if means.seccomp:
        reachable = means.process_namespace or uid is not None
        seccomp.install(
            new_processes=limits.processes > 1 and reachable,
            only_process=None if reachable else os.getpid(),
            # The superuser owns the host's devices, of which the standard streams are open files.
            own_files=means.mounts and os.geteuid() != 0,
            truncate=means.mounts or means.landlock >= landlock.TRUNCATE_ABI,
        )


def try_proc() -> None:
    """Mount ``/proc`` where that is permitted; most programs do without."""
    try:
        mounts.mount_proc()
    except OSError:
        return


def limit_resources(limits: Limits, processes_counted_apart: bool, shared: bool) -> None:
    """Set the kernel's limits, hard and soft.

    Args:
        processes_counted_apart: whether the count of this user's processes leaves out those of the host.
        shared: whether other sandboxed processes are in that count.
    """
    cpu = math.ceil(limits.wall) + 1
    hard = {
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_FSIZE: limits.file_size,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if processes_counted_apart:
        hard[resource.RLIMIT_NPROC] = (limits.processes + MAX_THREADS) * (SHARERS if shared else 1)
    for kind, value in hard.items():
        _, highest = resource.getrlimit(kind)
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(kind, (value, value))
    _, highest = resource.getrlimit(resource.RLIMIT_STACK)
    stack = STACK if highest == resource.RLIM_INFINITY else min(STACK, highest)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
