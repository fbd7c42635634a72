"""Confinement: the file system and the private folder of a process, what this host permits, and what a forked process
does to itself before any code of a response runs. None of it can be undone."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from roll.rewards.sandbox import kernel
from roll.rewards.sandbox.protections import Limits, Means

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SCRATCH = "/tmp"
_SHARED_MEMORY = "/dev/shm"
_MAX_SCRATCH_FILES = 4096
_MAX_DEPTH = 32  # deepest nesting that is measured; a deeper folder counts as too large
_NEW_ROOT = "/tmp"
_HELD = "/.held"  # keeps readable paths that the private folders would hide, for a process that mounts those
_OLD_ROOT = "/old-root"
_PASSWD = "root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n"


def readable_paths(extra: Sequence[str] = ()) -> list[str]:
    """Paths that a program may read: existing paths, none below another."""
    python = [sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)]
    wanted = [os.path.abspath(path) for path in (*SYSTEM, *SETTINGS, *python, *extra)]
    kept: list[str] = []
    for path in sorted(dict.fromkeys(wanted), key=len):
        if os.path.lexists(path) and not any(path == other or path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def enter_view(readable: Sequence[str]) -> None:
    """Make the calling process's own mount namespace contain ``readable``, a few devices and an empty ``/tmp``. Raises
    ``OSError``: this host does not let the process mount."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # The mount of the new root may hide a source: hold them all before.
    sources = {path: os.open(path, os.O_PATH) for path in (*readable, *DEVICES) if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in readable if os.path.islink(path)}
    kernel.mount("none", _NEW_ROOT, "tmpfs", kernel.MS_NOSUID, "mode=0755,size=1m")
    for path, target in links.items():
        os.makedirs(f"{_NEW_ROOT}{os.path.dirname(path)}", mode=0o755, exist_ok=True)
        os.symlink(target, f"{_NEW_ROOT}{path}")
    for path, descriptor in sources.items():
        _bind(f"/proc/self/fd/{descriptor}", f"{_NEW_ROOT}{path}")
    for path, held in hidden_paths(readable):
        _bind(f"/proc/self/fd/{sources[path]}", f"{_NEW_ROOT}{held}")
    for descriptor in sources.values():
        os.close(descriptor)
    for folder in (SCRATCH, _SHARED_MEMORY, "/proc", "/etc", _OLD_ROOT):
        os.makedirs(f"{_NEW_ROOT}{folder}", mode=0o755, exist_ok=True)
    with open(f"{_NEW_ROOT}/etc/passwd", "w", encoding="utf-8") as file:
        file.write(_PASSWD)
    kernel.enter_root(_NEW_ROOT, _OLD_ROOT)


def hidden_paths(readable: Sequence[str]) -> list[tuple[str, str]]:
    """Readable paths inside the private folders, such as a Python under ``/tmp``, and where they are held."""
    inside = [path for path in readable if path.startswith((f"{SCRATCH}/", f"{_SHARED_MEMORY}/"))]
    return [(path, f"{_HELD}/{number}") for number, path in enumerate(inside)]


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)


def mount_scratch(size: int, readable: Sequence[str]) -> None:
    """Mount a private ``/tmp`` and ``/dev/shm`` of ``size`` bytes each over the host's; readable paths stay visible."""
    kernel.unshare(kernel.CLONE_NEWNS)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    for folder in (SCRATCH, _SHARED_MEMORY):
        kernel.mount("none", folder, "tmpfs", flags, f"mode=1777,size={size},nr_inodes={_MAX_SCRATCH_FILES}")
    for path, held in hidden_paths(readable):
        _bind(held, path)


_OWNERS_RIGHTS = 0o700
_AT_ONCE = 1000  # entries of a folder that are read at a time


class OutOfBudget(Exception):
    """The folder holds more entries than the budget."""


def make_folder(parent: str | None, uid: int | None) -> str | None:
    """A private folder of ``uid``; None where each process mounts its own."""
    if parent is None:
        return None
    path = tempfile.mkdtemp(dir=parent)
    if uid is not None:
        os.chown(path, uid, uid)
    return path


def remove_tree(path: str, budget: int | None = None) -> None:
    """Remove a folder of any depth and with any permissions; every process that could still change it must have ended.

    Without recursion and without long paths: each nested folder is moved up to the top before it is emptied. Raises
    ``OutOfBudget``: more than ``budget`` entries (None: no limit), some are left; ``OSError``: it cannot be removed.
    """
    steps = itertools.count()
    mark = secrets.token_hex(8)

    def step() -> int:
        number = next(steps)
        if budget is not None and number >= budget:
            raise OutOfBudget
        return number

    with contextlib.suppress(FileNotFoundError):
        with opened(path) as top:
            while names := listed(top):
                for name, is_folder in names:
                    step()
                    if not is_folder:
                        os.unlink(name, dir_fd=top)
                        continue
                    with opened(name, top) as folder:
                        while inner := listed(folder):
                            for each, nested in inner:
                                number = step()
                                if nested:
                                    # A folder must be writable to get another parent.
                                    with opened(each, folder):
                                        moved = f"{mark}-{number}"
                                        os.rename(each, moved, src_dir_fd=folder, dst_dir_fd=top)
                                else:
                                    os.unlink(each, dir_fd=folder)
                    os.rmdir(name, dir_fd=top)
        os.rmdir(path)


def holds_too_much(path: str, size: int) -> bool:
    """True if a folder (it may change meanwhile) has more than ``size`` bytes or more entries than a mounted one."""
    try:
        with opened(path) as top:
            sizes = list(itertools.islice(sizes_below(top), _MAX_SCRATCH_FILES + 1))
    except (OSError, OutOfBudget):
        return True
    return len(sizes) > _MAX_SCRATCH_FILES or sum(sizes) > size


def sizes_below(folder: int, depth: int = 0) -> Iterator[int]:
    """Bytes of each entry. Raises ``OutOfBudget``: it is too deep."""
    if depth > _MAX_DEPTH:
        raise OutOfBudget
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield os.stat(entry.name, dir_fd=folder, follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    with opened(entry.name, folder) as inner:
                        yield from sizes_below(inner, depth + 1)


def listed(folder: int) -> list[tuple[str, bool]]:
    """Some entries of a folder, each with whether it is a folder."""
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in itertools.islice(entries, _AT_ONCE)]


@contextlib.contextmanager
def opened(path: str, parent: int | None = None) -> Iterator[int]:
    """Open a folder, after restoring all rights to its owner. Symbolic links are not followed. Raises ``OSError``: it
    is no folder, or someone else's."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(path, os.O_RDONLY | flags, dir_fd=parent)
    except PermissionError:
        handle = os.open(path, os.O_PATH | flags, dir_fd=parent)
        try:
            # The folder itself, whatever its name leads to by now.
            os.chmod(f"/proc/self/fd/{handle}", _OWNERS_RIGHTS)
        finally:
            os.close(handle)
        folder = os.open(path, os.O_RDONLY | flags, dir_fd=parent)
    try:
        if os.fstat(folder).st_mode & _OWNERS_RIGHTS != _OWNERS_RIGHTS:
            os.fchmod(folder, _OWNERS_RIGHTS)
        yield folder
    finally:
        os.close(folder)


UIDS = 16  # user ids of one sandbox; a process has one of its own
_FIRST_UID, _BLOCKS, _BLOCK = 60578, 35, UIDS + 1
"""A range that distributions leave unassigned; the last id of a block kills the processes of the others."""
LATEST_ABI = 99

_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def find_means(without: Set[str], landlock_abi: int | None = None) -> tuple[Means, object]:
    """The means that this host permits, and an object that must live as long as this process. Enters all namespaces or
    none: as root, else in a user namespace, where any user is root.

    Args:
        without: names of :data:`~roll.rewards.sandbox.protections.MEANS` that are left unused.
        landlock_abi: the highest version of Landlock to use; None: the kernel's.
    """
    abi = 0 if "landlock" in without else min(kernel.landlock_abi(), landlock_abi or LATEST_ABI)
    means = Means(landlock=abi, seccomp="seccomp" not in without and kernel.takes_filters())
    claim = None
    # User ids that no other sandbox of this host uses: the kernel gives an abstract socket name to one socket only.
    for block in range(_BLOCKS if "uid" not in without and os.geteuid() == 0 else 0):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0roll-sandbox-{block}")
        except OSError:
            claim.close()
        else:
            means = replace(means, first_uid=_FIRST_UID + block * _BLOCK)
            break
    if "namespaces" in without:
        return means, claim
    uid, gid = os.geteuid(), os.getegid()
    entered = replace(means, process_namespace=True, network_namespace=True)
    if uid == 0:
        with contextlib.suppress(OSError):
            kernel.unshare(_NAMESPACES)
            return entered, claim
    try:
        kernel.unshare(kernel.CLONE_NEWUSER | _NAMESPACES)
    except OSError:
        return means, claim
    for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(content)
    return replace(entered, user_namespace=True, first_uid=None), claim


MAX_THREADS = 32
MAX_OPEN_FILES = 64
STACK = 128 * 2**20  # bytes; programs of contests recurse deeply
SHARERS = 8
"""Processes that may share a user id, and its process count, on hosts where the sandbox has no ids of its own."""


def confine(means: Means, limits: Limits, uid: int | None, scratch: str, readable: Sequence[str], proc: bool) -> None:
    """Drop every privilege that ``means`` lets this process drop.

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
        mount_scratch(limits.scratch, readable)
        if proc:
            # Where it is not permitted: most programs do without.
            with contextlib.suppress(OSError):
                kernel.mount("none", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.chdir(scratch)
    highest = {
        resource.RLIMIT_CPU: math.ceil(limits.wall) + 1,
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_FSIZE: limits.file_size,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_STACK: STACK,
    }
    if uid is not None or means.user_namespace:
        # Only then does the kernel's count of this user's processes exclude those of the host.
        highest[resource.RLIMIT_NPROC] = (limits.processes + MAX_THREADS) * (SHARERS if uid is None else 1)
    for kind, value in highest.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if uid is not None:
        # In this order: without the superuser's id the groups could not be given up any more.
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
        kernel.restrict_files(readable, [scratch, *DEVICES], means.landlock)
    if means.seccomp:
        reachable = means.process_namespace or uid is not None
        kernel.install_filter(
            new_processes=limits.processes > 1 and reachable,
            only_process=None if reachable else os.getpid(),
            # The superuser owns the host's devices, of which the standard streams are open files.
            own_files=means.mounts and os.geteuid() != 0,
            truncate=means.mounts or means.landlock >= kernel.TRUNCATE_ABI,
        )
