"""A system call filter: refusals for what neither a program nor its tests need, and an escape might.

The program is classic BPF (``man 2 seccomp``) for x86-64 and aarch64; calls of another architecture's convention end
the process, those of x32 are refused.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
from collections.abc import Sequence

from roll.rewards.sandbox import kernel, syscalls

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET = 0x15, 0x35, 0x45
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_REFUSE, _ABSENT, _NOTHING = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _ERRNO
_AT_NUMBER, _AT_ARCHITECTURE = 0, 4
_OWN_ID = 0x7FFFFFF1
"""Stands for the process's own id until the filter is installed."""

_CLONE_PARENT = 0x00008000
_PR_SCHED_CORE = 62
_F_SETFL, _O_ASYNC = 4, 0x2000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY = 8, 10, 15, 1024, 1026
_O_ACCMODE, _O_TRUNC, _AT_EMPTY_PATH = 3, 0x200, 0x1000
IOCTLS = {
    "TCGETS": 0x5401,
    "TIOCGPGRP": 0x540F,
    "TIOCGWINSZ": 0x5413,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450,
    "FIOCLEX": 0x5451,
    "TCGETS2": 0x802C542A,
}
"""The only ones that programs may use; among the others are owners of signals, file attributes and terminals."""

Instruction = tuple[int, int, int, int]


def supported() -> bool:
    return kernel.ARCHITECTURE in _AUDIT


def install(new_processes: bool, only_process: int | None, own_files: bool = False, truncate: bool = False) -> None:
    """Filter the calls of this process and its children, for good. Needs ``no_new_privs``.

    Args:
        new_processes: whether it may start others (threads are always allowed).
        only_process: the one process id that signals may go to; None: any.
        own_files: whether all files that it could change are its own, so that it may change modes, owners and times.
        truncate: whether something else decides on which files may be cut off by their name.

    Raises:
        OSError: the kernel takes no filter.
    """
    own_id = struct.pack("<I", 0 if only_process is None else only_process)
    code = _encoded(new_processes, only_process is not None, own_files, truncate).replace(
        struct.pack("<I", _OWN_ID), own_id
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    kernel.prctl(kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, header)


def prepare() -> None:
    """Build every filter once, so that processes forked from this one find it ready."""
    if supported():
        for bits in range(16):
            _encoded(bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8))


@functools.cache
def _encoded(new_processes: bool, only_itself: bool, own_files: bool, truncate: bool) -> bytes:
    program = build_program(new_processes, only_itself, own_files, truncate)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def build_program(new_processes: bool, only_itself: bool, own_files: bool, truncate: bool) -> list[Instruction]:
    """The filter; each rule is a run of instructions that falls through to the next where it does not apply."""
    first_of_gap, end_of_gap = syscalls.GAP[syscalls.COLUMN]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT[kernel.ARCHITECTURE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _REFUSE),
        (_JUMP_AT_LEAST, 2, 0, syscalls.FIRST_UNKNOWN),
        (_JUMP_AT_LEAST, 2, 0, end_of_gap),
        (_JUMP_AT_LEAST, 0, 1, first_of_gap),
        (_RETURN, 0, 0, _ABSENT),
    ]
    rules: list[tuple[syscalls.Numbers, Sequence[Instruction]]] = [
        (syscalls.ABSENT, always(_ABSENT)),
        (syscalls.REFUSED, always(_REFUSE)),
        (syscalls.WITHOUT_EFFECT, always(_NOTHING)),
        ({} if new_processes else syscalls.NEW_PROCESS, always(_REFUSE)),
        (syscalls.CLONE, _clone_rule(new_processes)),
        # The signal at the parent's death stays set.
        (syscalls.PRCTL, _if_equal(0, [kernel.PR_SET_PDEATHSIG, _PR_SCHED_CORE], _REFUSE, _ALLOW)),
        (syscalls.FCNTL, _fcntl_rule()),
        (syscalls.IOCTL, _if_equal(1, list(IOCTLS.values()), _ALLOW, _ERRNO | errno.ENOTTY)),
        (syscalls.OPEN, _open_rule(1)),
        (syscalls.OPENAT, _open_rule(2)),
        (syscalls.SENDTO, _no_address_rule()),
        (syscalls.ON_A_PROCESS if only_itself else {}, _if_equal(0, [0, _OWN_ID], _ALLOW, _REFUSE)),
        ({} if truncate else syscalls.TRUNCATE, always(_REFUSE)),
    ]
    if own_files:
        rules += [(syscalls.UTIMENSAT, _no_path_rule()), (syscalls.FCHOWNAT, _if_set(4, _AT_EMPTY_PATH, _REFUSE))]
    else:
        rules += [(syscalls.OWNERS, always(_REFUSE)), (syscalls.MODES, always(_NOTHING))]
    for group, rule in rules:
        for number in syscalls.numbers_of(group):
            program += [(_JUMP_EQUAL, 0, len(rule), number), *rule]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def always(answer: int) -> list[Instruction]:
    return [(_RETURN, 0, 0, answer)]


def _argument(index: int, upper: bool = False) -> Instruction:
    """Load half an argument."""
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * upper)


def _if_equal(index: int, values: Sequence[int], answer: int, otherwise: int) -> list[Instruction]:
    """Decides on an argument's lower half."""
    tests: list[Instruction] = []
    for value in values:
        tests += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, answer)]
    return [_argument(index), *tests, (_RETURN, 0, 0, otherwise)]


def _if_set(index: int, bits: int, answer: int) -> list[Instruction]:
    return [_argument(index), (_JUMP_SET, 0, 1, bits), (_RETURN, 0, 0, answer), (_RETURN, 0, 0, _ALLOW)]


def _clone_rule(new_processes: bool) -> list[Instruction]:
    threads_only: list[Instruction] = [(_JUMP_SET, 1, 0, kernel.CLONE_THREAD), (_RETURN, 0, 0, _REFUSE)]
    return [
        _argument(0),
        # Threads share their parent anyway; a process beside this one would be the forking process's child.
        (_JUMP_SET, 0, 1, kernel.CLONE_NEW_ANY),
        (_RETURN, 0, 0, _REFUSE),
        (_JUMP_SET, 2, 0, kernel.CLONE_THREAD),
        (_JUMP_SET, 0, 1, _CLONE_PARENT),
        (_RETURN, 0, 0, _REFUSE),
        *([] if new_processes else threads_only),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _fcntl_rule() -> list[Instruction]:
    """No signal of a file goes to another process, and no lease holds up those who open it."""
    refused = (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY)
    tests: list[Instruction] = []
    for command in refused:
        tests += [(_JUMP_EQUAL, 0, 1, command), (_RETURN, 0, 0, _REFUSE)]
    rule = _if_set(2, _O_ASYNC, _REFUSE)
    return [_argument(1), *tests, (_JUMP_EQUAL, 0, len(rule), _F_SETFL), *rule, (_RETURN, 0, 0, _ALLOW)]


def _open_rule(index: int) -> list[Instruction]:
    """Access mode 3, and cutting off a file opened for reading, escape Landlock's first versions."""
    return [
        _argument(index),
        (_AND, 0, 0, _O_ACCMODE),
        (_JUMP_EQUAL, 0, 1, _O_ACCMODE),
        (_RETURN, 0, 0, _REFUSE),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ALLOW),
        *_if_set(index, _O_TRUNC, _REFUSE),
    ]


def _no_address_rule() -> list[Instruction]:
    """``send`` is ``sendto`` without an address."""
    return [
        _argument(4),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _REFUSE),
        _argument(4, upper=True),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _no_path_rule() -> list[Instruction]:
    """``futimens`` is ``utimensat`` without a path: it does nothing."""
    return [
        _argument(1),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ALLOW),
        _argument(1, upper=True),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NOTHING),
    ]
