"""Landlock: a process gives up all files but those named. Needs no privilege (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from roll.rewards.sandbox import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH, _VERSION = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TCP = 0b11
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
_SIGNAL_ABI = 6
TRUNCATE_ABI = 3
"""The first version that decides on who may cut off a file."""


def abi() -> int:
    """The version that the kernel speaks; 0: none."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION, what="landlock")
    except OSError:
        return 0


def restrict(readable: Sequence[str], writable: Sequence[str], version: int | None = None) -> None:
    """From now on only these paths and what lies below them; TCP and signals to others too where the kernel can.

    Args:
        version: of Landlock's interface, at most :func:`abi`, which is what None stands for.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = abi() if version is None else version
    # Each version knows more kinds of access; a kind that is not named here would stay allowed.
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    attributes = struct.pack(
        "<QQQ",
        files,
        _TCP if version >= 4 else 0,
        _ABSTRACT_SOCKETS | _SIGNALS if version >= _SIGNAL_ABI else 0,
    )
    size = 8 if version < 4 else 16 if version < _SIGNAL_ABI else 24
    ruleset = kernel.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0, what="landlock_create_ruleset")
    try:
        for path in readable:
            _allow(ruleset, path, _READ & files)
        for path in writable:
            _allow(ruleset, path, files)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0, what="landlock_restrict_self")
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
        kernel.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0, what=f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)
