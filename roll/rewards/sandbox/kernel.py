"""Linux system calls of the sandbox that Python does not wrap, Landlock among them, and a filter of those of programs.

Functions that make one raise ``OSError`` on failure. The filter refuses what neither a program nor its tests need, and
an escape might. All calls up to ``FIRST_UNKNOWN`` were reviewed; later ones do not exist for a program, so that new
variants of a refused call (such as ``fchmodat2`` and ``setxattrat``) are refused too. It is a program in classic BPF
(``man 2 seccomp``) for x86-64 and aarch64; calls of another architecture's convention end the process, those of x32
are refused.
"""

from __future__ import annotations

import ctypes
import errno
import functools
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


Numbers = dict[str, tuple[int | None, int | None]]
"""Name to the number on x86-64 and on aarch64; None: that architecture has no such call."""

FIRST_UNKNOWN = 448
GAP = ((335, 424), (295, 424))  # first number and end of the range without calls, on both architectures


def calls(table: str) -> Numbers:
    """Read ``name:x86-64:aarch64`` of each call; a dash: that architecture has no such call."""
    rows = (entry.split(":") for entry in table.split())
    return {name: tuple(None if n == "-" else int(n) for n in numbers) for name, *numbers in rows}  # type: ignore[misc]


# A socket pair is a process's own, but its datagrams may be addressed to any socket of the host.
NETWORK = calls("""
    socket:41:198 connect:42:203 bind:49:200 listen:50:201 accept:43:202 accept4:288:242 sendmsg:46:211
    sendmmsg:307:269 io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427
""")
OTHER_PROCESSES = calls("""
    ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 pidfd_open:434:434
    pidfd_getfd:438:438 pidfd_send_signal:424:424 kcmp:312:272 perf_event_open:298:241 userfaultfd:323:282
    setpriority:141:140 ioprio_set:251:30 migrate_pages:256:238 move_pages:279:239 inotify_init:253:-
    inotify_init1:294:26 fanotify_init:300:262 fanotify_mark:301:263
""")
KERNEL = calls("""
    bpf:321:280 add_key:248:217 request_key:249:218 keyctl:250:219 kexec_load:246:104 kexec_file_load:320:294
    init_module:175:105 finit_module:313:273 delete_module:176:106 reboot:169:142 swapon:167:224 swapoff:168:225
    modify_ldt:154:- ioperm:173:- iopl:172:- uselib:134:- acct:163:89 syslog:103:116 vhangup:153:58 quotactl:179:60
    quotactl_fd:443:443 settimeofday:164:170 clock_settime:227:112 clock_adjtime:305:266 adjtimex:159:171
    sethostname:170:161 setdomainname:171:162 syncfs:306:267
""")
NAMESPACES = calls("""
    unshare:272:97 setns:308:268 mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51 open_tree:428:428
    move_mount:429:429 fsopen:430:430 fsconfig:431:431 fsmount:432:432 fspick:433:433 mount_setattr:442:442
    open_by_handle_at:304:265
""")
# Memory outside the limit on address space; segments, queues and semaphores, whose names and numbers are the host's.
SHARED_MEMORY = calls("""
    memfd_create:319:279 memfd_secret:447:447 io_setup:206:0 shmget:29:194 shmat:30:196 shmctl:31:195 msgget:68:186
    msgsnd:69:189 msgrcv:70:188 msgctl:71:187 semget:64:190 semop:65:193 semctl:66:191 semtimedop:220:192
    mq_open:240:180 mq_unlink:241:181
""")
# Inherited descriptors, such as /dev/null, belong to files of the host.
OF_OPEN_FILES = calls("fchown:93:55 fsetxattr:190:7 fremovexattr:199:16")
REFUSED: Numbers = {**NETWORK, **OTHER_PROCESSES, **KERNEL, **NAMESPACES, **SHARED_MEMORY, **OF_OPEN_FILES}
"""Refused on every host."""
DISK = calls("fallocate:285:47")
"""Takes more of a disk than the limit on file sizes; the C library falls back on writing."""
NEW_PROCESS = calls("fork:57:- vfork:58:-")
ABSENT = calls("clone3:435:435 openat2:437:437")
"""Their arguments lie in memory, where a filter cannot look: libraries fall back on the older calls."""
OWNERS = calls("""
    chown:92:- lchown:94:- fchownat:260:54 setxattr:188:5 lsetxattr:189:6 removexattr:197:14 lremovexattr:198:15
""")
"""Refused where other files than the program's own can be named."""
MODES = calls("chmod:90:- fchmodat:268:53 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88")
"""Without effect in the same case, but reported as successful: ``shutil.copy`` and ``Path.touch`` use them."""
WITHOUT_EFFECT = calls("fchmod:91:52 sync:162:81")  # without effect on every host, and reported as successful
ON_A_PROCESS = calls("""
    kill:62:129 tkill:200:130 tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 prlimit64:302:261
    sched_setaffinity:203:122 sched_setscheduler:144:119 sched_setparam:142:118 sched_setattr:314:274
""")
"""Their first argument is a process."""
TRUNCATE, CLONE, PRCTL = calls("truncate:76:45"), calls("clone:56:220"), calls("prctl:157:167")
FCNTL, IOCTL = calls("fcntl:72:25"), calls("ioctl:16:29")
OPEN, OPENAT, SENDTO = calls("open:2:-"), calls("openat:257:56"), calls("sendto:44:206")
UTIMENSAT, FCHOWNAT = calls("utimensat:280:88"), calls("fchownat:260:54")

COLUMN = 0 if ARCHITECTURE == "x86_64" else 1
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET = 0x15, 0x35, 0x45
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_REFUSE, _ABSENT, _NOTHING = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _ERRNO
_UNSUPPORTED = _ERRNO | errno.EOPNOTSUPP
_AT_NUMBER, _AT_ARCHITECTURE = 0, 4
_OWN_ID = 0x7FFFFFF1  # placeholder for the process's own id until the filter is installed

_CLONE_PARENT = 0x00008000
_PR_SCHED_CORE = 62
_F_SETFL, _O_ASYNC = 4, 0x2000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY = 8, 10, 15, 1024, 1026
_O_ACCMODE, _O_TRUNC, _O_TMPFILE, _AT_EMPTY_PATH = 3, 0x200, 0x400000, 0x1000
# TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2.
IOCTLS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""The only requests of ``ioctl`` that programs may make; others set owners of signals or attributes of files."""

Instruction = tuple[int, int, int, int]


def takes_filters() -> bool:
    """True on an architecture that the filter knows."""
    return ARCHITECTURE in _AUDIT


def install_filter(new_processes: bool, only_process: int | None, own_files: bool, truncate: bool) -> None:
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
    code = build_filter(new_processes, only_process is not None, own_files, truncate)
    code = code.replace(struct.pack("<I", _OWN_ID), own_id)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header)


def prepare_filters() -> None:
    """Build every filter once, so that processes forked from this one find it ready."""
    if takes_filters():
        for bits in range(16):
            build_filter(bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8))


@functools.cache
def build_filter(new_processes: bool, only_itself: bool, own_files: bool, truncate: bool) -> bytes:
    """The filter as the kernel takes it; a rule falls through to the next where it does not apply."""
    first_of_gap, end_of_gap = GAP[COLUMN]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT[ARCHITECTURE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _REFUSE),
        (_JUMP_AT_LEAST, 2, 0, FIRST_UNKNOWN),
        (_JUMP_AT_LEAST, 2, 0, end_of_gap),
        (_JUMP_AT_LEAST, 0, 1, first_of_gap),
        (_RETURN, 0, 0, _ABSENT),
    ]
    # No signal of a file goes to another process, and no lease holds up those who open it.
    owners, asynchronous = (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY), _if_set(2, _O_ASYNC, _REFUSE)
    set_flags = (_JUMP_EQUAL, 0, len(asynchronous), _F_SETFL)
    fcntl_rule = [*_if_equal(1, owners, _REFUSE), set_flags, *asynchronous, *_always(_ALLOW)]
    rules: list[tuple[Numbers, Sequence[Instruction]]] = [
        (ABSENT, _always(_ABSENT)),
        (REFUSED, _always(_REFUSE)),
        (WITHOUT_EFFECT, _always(_NOTHING)),
        (DISK, _always(_UNSUPPORTED)),
        ({} if new_processes else NEW_PROCESS, _always(_REFUSE)),
        (CLONE, _clone_rule(new_processes)),
        # The signal at the parent's death stays set.
        (PRCTL, [*_if_equal(0, [PR_SET_PDEATHSIG, _PR_SCHED_CORE], _REFUSE), *_always(_ALLOW)]),
        (FCNTL, fcntl_rule),
        (IOCTL, [*_if_equal(1, IOCTLS, _ALLOW), *_always(_ERRNO | errno.ENOTTY)]),
        (OPEN, _open_rule(1)),
        (OPENAT, _open_rule(2)),
        # ``send`` is ``sendto`` without an address.
        (SENDTO, _if_null(4, _ALLOW, _REFUSE)),
        (ON_A_PROCESS if only_itself else {}, [*_if_equal(0, [0, _OWN_ID], _ALLOW), *_always(_REFUSE)]),
        ({} if truncate else TRUNCATE, _always(_REFUSE)),
    ]
    if own_files:
        # ``futimens`` is ``utimensat`` without a path: it does nothing.
        rules += [(UTIMENSAT, _if_null(1, _NOTHING, _ALLOW)), (FCHOWNAT, _if_set(4, _AT_EMPTY_PATH, _REFUSE))]
    else:
        rules += [(OWNERS, _always(_REFUSE)), (MODES, _always(_NOTHING))]
    for group, rule in rules:
        for number in (pair[COLUMN] for pair in group.values()):
            if number is None:
                continue
            program += [(_JUMP_EQUAL, 0, len(rule), number), *rule]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _always(answer: int) -> list[Instruction]:
    return [(_RETURN, 0, 0, answer)]


def _argument(index: int, upper: bool = False) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * upper)


def _if_equal(index: int, values: Sequence[int], answer: int) -> list[Instruction]:
    """Decide on an argument's lower half, which stays loaded where none of ``values`` is equal."""
    tests: list[Instruction] = []
    for value in values:
        tests += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, answer)]
    return [_argument(index), *tests]


def _if_null(index: int, answer: int, otherwise: int) -> list[Instruction]:
    """Decide on both halves of a pointer."""
    return [
        _argument(index),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, otherwise),
        _argument(index, upper=True),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, otherwise),
        (_RETURN, 0, 0, answer),
    ]


def _if_set(index: int, bits: int, answer: int) -> list[Instruction]:
    return [_argument(index), (_JUMP_SET, 0, 1, bits), (_RETURN, 0, 0, answer), (_RETURN, 0, 0, _ALLOW)]


def _clone_rule(new_processes: bool) -> list[Instruction]:
    threads_only: list[Instruction] = [(_JUMP_SET, 1, 0, CLONE_THREAD), (_RETURN, 0, 0, _REFUSE)]
    return [
        _argument(0),
        # Threads share their parent anyway; a sibling process would be the forking process's child.
        (_JUMP_SET, 0, 1, CLONE_NEW_ANY),
        (_RETURN, 0, 0, _REFUSE),
        (_JUMP_SET, 2, 0, CLONE_THREAD),
        (_JUMP_SET, 0, 1, _CLONE_PARENT),
        (_RETURN, 0, 0, _REFUSE),
        *([] if new_processes else threads_only),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _open_rule(index: int) -> list[Instruction]:
    """Access mode 3, and cutting off a file opened for reading, escape Landlock's first versions; a file without a name
    is in no folder where it could be counted."""
    return [
        _argument(index),
        (_JUMP_SET, 0, 1, _O_TMPFILE),
        (_RETURN, 0, 0, _UNSUPPORTED),
        (_AND, 0, 0, _O_ACCMODE),
        (_JUMP_EQUAL, 0, 1, _O_ACCMODE),
        (_RETURN, 0, 0, _REFUSE),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ALLOW),
        *_if_set(index, _O_TRUNC, _REFUSE),
    ]
