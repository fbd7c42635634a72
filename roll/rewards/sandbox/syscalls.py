"""Numbers of system calls on x86-64 and aarch64, grouped by why a sandboxed program is refused them.

The whole table up to ``FIRST_UNKNOWN`` was gone through; a call that a kernel has learned since does not exist for a
program, so a new way to do what is refused here (as ``fchmodat2`` and ``setxattrat`` were) is refused already.
"""

from __future__ import annotations

from roll.rewards.sandbox import kernel

Numbers = dict[str, tuple[int | None, int | None]]
"""Name to the number on x86-64 and on aarch64; None: that architecture has no such call."""

FIRST_UNKNOWN = 448
GAP = ((335, 424), (295, 424))
"""First number and end of the range without calls, on both architectures."""

NETWORK: Numbers = {
    "socket": (41, 198),
    # A socket pair is a process's own, but its datagrams may be addressed to any socket of the host.
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
OTHER_PROCESSES: Numbers = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
}
KERNEL: Numbers = {
    "bpf": (321, 280),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "modify_ldt": (154, None),
    "ioperm": (173, None),
    "iopl": (172, None),
    "uselib": (134, None),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syncfs": (306, 267),
}
NAMESPACES: Numbers = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
}
SHARED_MEMORY: Numbers = {
    # Memory that the limit on address space does not count.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_setup": (206, 0),
    # Segments, queues and semaphores have numbers and names that other processes' are found by.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
}
OF_OPEN_FILES: Numbers = {
    # Inherited descriptors, such as /dev/null, belong to files of the host.
    "fchown": (93, 55),
    "fsetxattr": (190, 7),
    "fremovexattr": (199, 16),
}
REFUSED: Numbers = {
    **NETWORK,
    **OTHER_PROCESSES,
    **KERNEL,
    **NAMESPACES,
    **SHARED_MEMORY,
    **OF_OPEN_FILES,
}
"""Refused on every host."""

NEW_PROCESS: Numbers = {"fork": (57, None), "vfork": (58, None)}
ABSENT: Numbers = {
    # Their arguments lie in memory, where a filter cannot look: libraries fall back on the older calls.
    "clone3": (435, 435),
    "openat2": (437, 437),
}
OWNERS: Numbers = {
    "chown": (92, None),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
}
"""Refused where other files than the program's own can be named."""
MODES: Numbers = {
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
"""There they do nothing and say that it worked: ``shutil.copy`` and ``Path.touch`` use them."""
WITHOUT_EFFECT: Numbers = {"fchmod": (91, 52), "sync": (162, 81)}
"""The same, everywhere."""
ON_A_PROCESS: Numbers = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
"""Their first argument is a process."""
TRUNCATE: Numbers = {"truncate": (76, 45)}
CLONE: Numbers = {"clone": (56, 220)}
PRCTL: Numbers = {"prctl": (157, 167)}
FCNTL: Numbers = {"fcntl": (72, 25)}
IOCTL: Numbers = {"ioctl": (16, 29)}
OPEN: Numbers = {"open": (2, None)}
OPENAT: Numbers = {"openat": (257, 56)}
SENDTO: Numbers = {"sendto": (44, 206)}
UTIMENSAT: Numbers = {"utimensat": (280, 88)}
FCHOWNAT: Numbers = {"fchownat": (260, 54)}

COLUMN = 0 if kernel.ARCHITECTURE == "x86_64" else 1


def numbers_of(group: Numbers) -> list[int]:
    """Those of this machine's architecture."""
    return [pair[COLUMN] for pair in group.values() if pair[COLUMN] is not None]  # type: ignore[misc]
