"""Linux system calls of the sandbox that Python does not wrap, Landlock among them.

Every function raises ``OSError`` on failure."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_THREAD = 0x00010000
CLONE_NEW_ANY = 0x7E020080  # all flags that make a namespace

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 38, 36
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2

ARCHITECTURE = platform.machine()
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object, what: str) -> int:
    return checked(_libc.syscall(ctypes.c_long(number), *arguments), what)


def unshare(flags: int) -> None:
    checked(_libc.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    checked(_libc.setns(descriptor, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags))
    checked(_libc.mount(*arguments, options.encode() or None), f"mount {target}")


def enter_root(root: str, old: str) -> None:
    """Make ``root`` the root of this mount namespace, read-only and without set-uid programs (Linux 5.12); ``old``: an
    empty folder in it, on which the former root lies meanwhile."""
    syscall(_PIVOT_ROOT[ARCHITECTURE], root.encode(), f"{root}{old}".encode(), what="pivot_root")
    os.chdir("/")
    checked(_libc.umount2(old.encode(), MNT_DETACH), f"umount {old}")
    os.rmdir(old)
    # Last: the folder could not be removed any more.
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    arguments = (_AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.c_size_t(ctypes.sizeof(attributes)))
    syscall(_MOUNT_SETATTR, *arguments, what="mount_setattr")


def prctl(option: int, value: int = 0, pointer: object = 0) -> None:
    arguments = (ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0))
    checked(_libc.prctl(option, *arguments), f"prctl {option}")


def hide_from_other_processes() -> None:
    """Let no process of the same user reach this one's memory or open files through ``/proc`` or a debugger.

    Processes forked from it inherit that; a program that one of them executes does not.
    """
    prctl(PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """Give up every capability, also those that a program executed later would get."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            # EINVAL: the kernel has no more; EPERM: without CAP_SETPCAP no program gets any back (no_new_privs).
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    syscall(_CAPSET[ARCHITECTURE], header, nothing, what="capset")


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH, _VERSION = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TCP = 0b11
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
_SIGNAL_ABI = 6
TRUNCATE_ABI = 3  # the first version that decides on who may cut off a file


def landlock_abi() -> int:
    """The version of Landlock's interface that the kernel has; 0: none."""
    try:
        return syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION, what="landlock")
    except OSError:
        return 0


def restrict_files(readable: Sequence[str], writable: Sequence[str], version: int) -> None:
    """Restrict this process to these paths and what lies below them, and where the kernel can also refuse it TCP and
    signals to other processes. ``version``: of Landlock's interface, 1 to :func:`landlock_abi`. Raises ``OSError``: the
    kernel has no Landlock."""
    # Each version knows more kinds of access; a kind that is not named here would stay allowed.
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    attributes = struct.pack(
        "<QQQ", files, _TCP if version >= 4 else 0, _ABSTRACT_SOCKETS | _SIGNALS if version >= _SIGNAL_ABI else 0
    )
    size = 8 if version < 4 else 16 if version < _SIGNAL_ABI else 24
    ruleset = syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0, what="landlock_create_ruleset")
    try:
        for path in readable:
            _allow(ruleset, path, _READ & files)
        for path in writable:
            _allow(ruleset, path, files)
        syscall(_RESTRICT_SELF, ruleset, 0, what="landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no permission
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = struct.pack("<Qi", rights, descriptor)
        syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0, what=f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)
