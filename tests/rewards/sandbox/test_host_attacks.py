"""Attacks on the host, on other processes and on verdicts, on every kind of host of ``conftest.HOSTS``.

An attack that a host cannot keep off belongs to a protection that this host's report names as missing; everything else
holds everywhere, and is looked for from outside.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from roll.rewards.sandbox import kernel
from roll.rewards.sandbox.client import Sandbox
from tests.rewards.sandbox.conftest import EVERYTHING, HOSTS, NOBODY, Verdict

GOOD = "print(int(input()) * 2)"
DOUBLE = {"inputs": ["21"], "outputs": ["42"]}
DONE = {"inputs": [""], "outputs": ["done"]}
ATTACK = """
import contextlib, ctypes, errno, fcntl, os, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]) == -1:
        raise OSError(ctypes.get_errno(), "refused")
def attempt(*actions):
    for action in actions:
        with contextlib.suppress(OSError, OverflowError, ValueError):
            action()
"""
ON_X86 = pytest.mark.skipif(kernel.ARCHITECTURE != "x86_64", reason="written for x86-64")


def attack(source: str) -> str:
    """A program that tries and says ``done``: what it achieved is looked for from outside."""
    return f"{ATTACK}\n{textwrap.dedent(source)}\nprint('done')\n"


@pytest.fixture(scope="module")
def user(any_host: str) -> int | None:
    """The user of the host's zygote, where it is not this process's."""
    return dict(HOSTS[any_host].launched).get("user")  # type: ignore[return-value]


@pytest.fixture
def canary(user: int | None) -> Iterator[Path]:
    """A file and a folder that the sandbox's user owns and that everyone could write, if nothing stood between."""
    # Other sessions of pytest close its own temporary folders to other users.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "canary"
        file.write_text("alive")
        folder.chmod(0o777)
        file.chmod(0o666)
        for path in (folder, file):
            if user is not None:
                os.chown(path, user, user)
        command = ["sh", "-c", f"test -w {file} && test -w {folder}"]
        subprocess.run(command, check=True, user=user)
        yield file


def state(path: Path) -> tuple[object, ...]:
    found = path.lstat()
    names = os.listxattr(path, follow_symlinks=False)
    return found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, found.st_size, found.st_nlink, tuple(names)


@pytest.fixture
def victim(any_sandbox: Sandbox, user: int | None) -> Iterator[int]:
    """A process of the user that programs run as, so that only the sandbox stands between."""
    process = subprocess.Popen(["sleep", "600"], **({} if user is None else {"user": user, "group": user}))  # type: ignore[call-overload]
    yield process.pid
    assert process.poll() is None, "the victim was killed"
    process.kill()
    process.wait()


def processes_of(sandbox: Sandbox) -> list[int]:
    """The zygote and what it has started, by the numbers that this process sees."""
    sandbox.start()
    assert sandbox._zygote is not None
    first = sandbox._zygote.pid
    return [first, *map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())]


def test_what_each_host_gives(any_host: str, any_sandbox: Sandbox) -> None:
    report = any_sandbox.start()
    assert set(report.missing) == HOSTS[any_host].lacks & EVERYTHING
    assert "syscalls" in report.given


def test_a_judge_that_keeps_its_files_to_itself_loses_no_protection(
    any_host: str,
) -> None:
    before = os.umask(0o077)
    try:
        own = HOSTS[any_host].start() if any_host != "root" else Sandbox()
        assert set(own.start().missing) == HOSTS[any_host].lacks & EVERYTHING
        own.close()
    finally:
        os.umask(before)


class TestFiles:
    def test_writing_outside(self, any_host: str, any_sandbox: Sandbox, verdict: Verdict, canary: Path) -> None:
        if "files" in HOSTS[any_host].lacks:
            return
        report = any_sandbox.start()
        for path in (canary, canary.parent / "new", Path("/var/tmp/new"), Path("/dev/shm/roll-new"), Path("/usr/new")):
            source = f"""
            try:
                open({str(path)!r}, "w").write("dead")
                print("written")
            except OSError:
                print("held")
            """
            outcome = verdict(textwrap.dedent(source), {"inputs": [""], "outputs": ["held"]}, any_sandbox)
            private = path.parent == Path("/dev/shm") and report.given["scratch"]
            assert outcome.passed == (0 if private else 1), path
            assert path == canary or not path.exists()
        before = state(canary)
        ways = f"""
        path, folder = {str(canary)!r}, {str(canary.parent)!r}
        for place in (path, sys.executable, os.__file__):
            attempt(
                lambda: os.truncate(place, 0),
                lambda: os.close(os.open(place, os.O_RDONLY | os.O_TRUNC)),
                lambda: os.close(os.open(place, 3 | os.O_TRUNC)),
                lambda: os.close(os.open(place, os.O_WRONLY | os.O_TRUNC)),
                lambda: os.close(os.open(place, os.O_WRONLY | os.O_APPEND)),
                lambda: call(437, -100, place.encode(), (ctypes.c_uint64 * 3)(512, 0, 0), 24),
            )
        attempt(
            lambda: os.rename(path, folder + "/moved"),
            lambda: os.unlink(path),
            lambda: os.link(path, folder + "/hard"),
            lambda: os.link(path, "hard"),
            lambda: os.mkfifo(folder + "/fifo"),
            lambda: os.mkdir(folder + "/sub"),
            lambda: os.symlink(path, folder + "/soft"),
            lambda: os.symlink(path, "link") or open("link", "a").write("dead"),
            lambda: os.symlink(folder, "folder") or os.unlink("folder/canary"),
        )
        """
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        assert state(canary) == before
        assert [path.name for path in canary.parent.iterdir()] == ["canary"]
        assert canary.read_text() == "alive"

    def test_modes_owners_times_and_attributes(self, any_sandbox: Sandbox, verdict: Verdict, canary: Path) -> None:
        watched = (canary, canary.parent, Path(os.devnull))
        before = [state(path) for path in watched]
        null = os.stat(os.devnull)
        ways = f"""
        path, folder = {str(canary)!r}, {str(canary.parent)!r}
        for place in (folder, path, "/dev/null"):
            raw = place.encode()
            attempt(
                lambda: os.chmod(place, 0o4755),
                lambda: os.chmod(place, 0),
                lambda: os.chown(place, os.getuid(), {NOBODY}),
                lambda: os.lchown(place, {NOBODY}, -1),
                lambda: os.utime(place, (0, 0)),
                lambda: os.setxattr(place, "user.roll", b"x"),
                lambda: os.setxattr(place, "user.roll", b"x", follow_symlinks=False),
                lambda: call(452, -100, raw, 0, 0),
                lambda: call(463, -100, raw, 0, b"user.roll", (ctypes.c_uint64 * 2)(0, 0), 16),
                lambda: call(466, -100, raw, 0, b"user.roll"),
                lambda: call(469, -100, raw, (ctypes.c_uint64 * 4)(), 32, 0),
            )
            if os.uname().machine == "x86_64":
                times = (ctypes.c_uint64 * 4)()
                attempt(
                    lambda: call(90, raw, 0), lambda: call(92, raw, {NOBODY}, -1), lambda: call(94, raw, {NOBODY}, -1),
                    lambda: call(132, raw, times), lambda: call(235, raw, times), lambda: call(261, -100, raw, times),
                    lambda: call(268, -100, raw, 0), lambda: call(260, -100, raw, {NOBODY}, -1, 0),
                )
            for flags in (os.O_RDONLY, os.O_PATH, os.O_RDONLY | os.O_DIRECTORY):
                with contextlib.suppress(OSError):
                    file = os.open(place, flags)
                    attempt(
                        lambda: os.fchmod(file, 0o4755),
                        lambda: os.fchown(file, -1, {NOBODY}),
                        lambda: os.utime(file, (0, 0)),
                        lambda: os.setxattr(file, "user.roll", b"x"),
                        lambda: os.chown("", -1, {NOBODY}, dir_fd=file),
                        lambda: call(452, file, b"", 0, 0x1000),
                        lambda: fcntl.ioctl(file, 0x40086602, struct.pack("l", 0x40)),
                        lambda: fcntl.ioctl(file, 0x401C5820, bytes(28)),
                        lambda: fcntl.ioctl(file, 0x40086604, bytes(128)),
                        lambda: fcntl.fcntl(file, 1024, 1),
                    )
        for file in range(3):
            attempt(lambda: os.fchmod(file, 0), lambda: os.fchown(file, -1, {NOBODY}), lambda: os.utime(file, (0, 0)))
        """
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        after = [state(path) for path in watched]
        if after != before and os.geteuid() == 0:  # this machine goes on working where the attack succeeds
            os.chmod(os.devnull, null.st_mode & 0o7777)
            os.chown(os.devnull, null.st_uid, null.st_gid)
        assert after == before

    def test_copies_of_its_own_files_work(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        source = """
        import pathlib, shutil, tempfile
        with tempfile.TemporaryDirectory() as folder:
            first = pathlib.Path(folder, "a")
            first.write_text("done")
            first.touch()
            shutil.copy2(first, folder + "/b")
            shutil.copytree(folder, "tree")
            print(pathlib.Path("tree/b").read_text())
        """
        assert verdict(textwrap.dedent(source), DONE, any_sandbox).passed == 1

    def test_a_command_finds_its_folder(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        command = {"command": ("sh", "main.sh"), "file_name": "main.sh", "processes": 4}
        source = 'echo done > "$TMPDIR/a" && test "$HOME" = "$PWD" && cat a'
        reachable = any_sandbox.start().given["user"] or "process_namespace" in any_sandbox.start().means
        assert verdict(source, DONE, any_sandbox, **command).passed == reachable, "else it may start no second process"

    def test_pytest_finds_its_file(self, any_host: str, any_sandbox: Sandbox, verdict: Verdict) -> None:
        if dict(HOSTS[any_host].launched).get("python"):
            return  # an interpreter whose packages no other user can read
        tests = {"pytest": "def test_a():\n    assert double(2) == 4\n"}
        outcome = verdict("def double(n): return n * 2", tests, any_sandbox, wall=30.0, case_timeout=20.0)
        assert (outcome.passed, outcome.total) == (1, 1), outcome


class TestSecrets:
    def test_the_environment_of_others(
        self, any_host: str, any_sandbox: Sandbox, verdict: Verdict, canary: Path
    ) -> None:
        if "private" in HOSTS[any_host].lacks:
            return
        secret = os.environ["ROLL_TEST_SECRET"]
        search = f"""
        found = [value for value in os.environ.values() if {secret!r} in value]
        places = [f"/proc/{{pid}}/{{name}}" for pid in (os.getppid(), {os.getpid()}, 1)
                  for name in ("environ", "cmdline", "mem", "root/etc/passwd", "cwd", "fd/0")]
        for place in [*places, {str(canary)!r}]:
            with contextlib.suppress(OSError, OverflowError):
                text = open(place, "rb").read(100000)
                if b"{secret}" in text or text == b"alive":
                    found.append(place)
        if found:
            print(found)
        """
        assert verdict(attack(search), DONE, any_sandbox).passed == 1

    def test_descriptors_that_it_inherits(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        source = """
        import os
        found = []
        for number in range(1024):
            try:
                os.fstat(number)
                found.append(number)
            except OSError:
                pass
        print(found)
        """
        expected = {"inputs": [""], "outputs": ["[0, 1, 2]"]}
        assert verdict(textwrap.dedent(source), expected, any_sandbox).passed == 1


class TestNetwork:
    def test_connections(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0)
            ways = f"""
            attempt(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2))
            with contextlib.suppress(OSError):
                socket.socket(socket.AF_UNIX)
                print("a socket")
            """
            assert verdict(attack(ways), DONE, any_sandbox).passed == 1
            with pytest.raises(BlockingIOError):
                server.accept()

    def test_addressed_datagrams(self, any_sandbox: Sandbox, verdict: Verdict, canary: Path) -> None:
        names = [f"\0roll-test-{time.monotonic_ns()}", str(canary.parent / "socket")]
        servers = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in names]
        for server, name in zip(servers, names, strict=True):
            server.bind(name)
            server.settimeout(0)
        os.chmod(names[1], 0o777)
        ways = f"""
        for name in {names!r}:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))]
            attempt(
                lambda: ours.sendto(b"x", name), lambda: ours.sendmsg([b"x"], [], 0, name),
                lambda: ours.connect(name) or ours.send(b"x"), lambda: ours.sendmsg([b"x"], rights),
                lambda: ours.bind(name + "2"),
            )
        """
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        for server in servers:
            with pytest.raises(BlockingIOError):
                server.recv(1)
            server.close()


class TestOtherProcesses:
    def test_signals(self, any_sandbox: Sandbox, verdict: Verdict, victim: int) -> None:
        mine = processes_of(any_sandbox)
        # In a process namespace of its own the parent's number is 0, which means one's own group.
        ways = f"""
        for pid in {{os.getppid(), {victim}, *{mine}}} - {{0, 1}}:
            attempt(
                lambda: os.kill(pid, 9),
                lambda: os.killpg(pid, 9),
                lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9),
                lambda: signal.pidfd_send_signal(os.open(f"/proc/{{pid}}", os.O_RDONLY), 9),
            )
            if os.uname().machine == "x86_64":
                info = ctypes.create_string_buffer(struct.pack("iii", 9, 0, -1), 128)
                attempt(
                    lambda: call(200, pid, 9), lambda: call(234, pid, pid, 9),
                    lambda: call(129, pid, 9, info), lambda: call(297, pid, pid, 9, info),
                )
            for owner in (lambda f: fcntl.fcntl(f, 8, pid), lambda f: fcntl.fcntl(f, 15, struct.pack("ii", 1, pid)),
                          lambda f: fcntl.ioctl(f, 0x8901, struct.pack("i", pid)),
                          lambda f: fcntl.ioctl(f, 0x8902, struct.pack("i", pid))):
                ours, theirs = socket.socketpair()
                attempt(lambda: owner(ours), lambda: fcntl.fcntl(ours, 10, 9))
                attempt(lambda: fcntl.fcntl(ours, 4, 0x2000), lambda: fcntl.ioctl(ours, 0x5452, struct.pack("i", 1)))
                attempt(lambda: theirs.send(b"x"))
        """
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        verdict("import os, signal\nos.kill(-1, signal.SIGKILL)", DONE, any_sandbox)
        assert processes_of(any_sandbox) == mine

    def test_signals_by_what_a_function_is_called_through(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        """The channel to the tests' process, made by the reward worker, knows both."""
        source = f"""{ATTACK}
def f(n):
    pids = [os.getppid(), *range(os.getpid() - 3, os.getpid() + 4)]
    for pid in pids:
        attempt(lambda: fcntl.fcntl(4, 8, pid), lambda: fcntl.fcntl(4, 10, 9), lambda: fcntl.fcntl(4, 4, 0x2000))
    with contextlib.suppress(OSError):
        raw = socket.socket(fileno=os.dup(4)).getsockopt(socket.SOL_SOCKET, 77, 4)
        signal.pidfd_send_signal(struct.unpack("i", raw)[0], 9)
    return n
"""
        assert verdict(source, ["assert f(1) == 1", "assert f(2) == 2"], any_sandbox).passed == 2

    def test_priorities_and_limits(self, any_sandbox: Sandbox, verdict: Verdict, victim: int) -> None:
        pids = [victim, os.getpid(), *processes_of(any_sandbox)]

        def facts() -> list[object]:
            ioprio = {"x86_64": 252, "aarch64": 31}[kernel.ARCHITECTURE]
            return [
                (
                    os.getpriority(os.PRIO_PROCESS, pid),
                    os.sched_getaffinity(pid),
                    os.sched_getscheduler(pid),
                    ctypes.CDLL(None).syscall(ioprio, 1, pid),
                    Path(f"/proc/{pid}/limits").read_text(),
                )
                for pid in pids
            ]

        before = facts()
        ways = f"""
        import resource
        attempt(lambda: os.setpriority(os.PRIO_USER, 0, 19), lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
        for pid in {{os.getppid(), *{pids}}} - {{0, 1}}:
            attempt(
                lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
                lambda: os.setpriority(os.PRIO_PGRP, pid, 19),
                lambda: os.sched_setaffinity(pid, {{0}}),
                lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
                lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)),
                lambda: os.sched_setparam(pid, os.sched_param(0)),
                lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)),
            )
            if os.uname().machine == "x86_64":
                attributes = ctypes.create_string_buffer(struct.pack("IIQiI", 48, 5, 0, 19, 0), 48)
                attempt(
                    lambda: call(314, pid, attributes, 0), lambda: call(251, 1, pid, 3 << 13),
                    lambda: call(251, 3, os.getuid(), 3 << 13), lambda: call(256, pid, 0, 0, 0),
                )
        """
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        assert facts() == before

    def test_memory_and_descriptors(self, any_sandbox: Sandbox, verdict: Verdict, victim: int) -> None:
        ways = f"""
        for pid in {{os.getppid(), {victim}, *{processes_of(any_sandbox)}}} - {{0, 1}}:
            if libc.ptrace(16, pid, 0, 0) == 0:
                print("attached")
            if libc.process_vm_readv(pid, 0, 0, 0, 0, 0) == 0:
                print("reads memory")
            if libc.process_vm_writev(pid, 0, 0, 0, 0, 0) == 0:
                print("writes memory")
        if libc.ptrace(0, 0, 0, 0) == 0 or libc.unshare(0) == 0:
            print("no filter")
        """
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1

    def test_shared_memory_and_queues(self, any_sandbox: Sandbox, verdict: Verdict, user: int | None) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        segment = libc.shmget(0, 4096, 0o1666)
        assert segment >= 0
        address = libc.shmat(segment, None, 0)
        queue = f"/roll-test-{os.getpid()}".encode()
        opened = libc.mq_open(queue, os.O_CREAT | os.O_RDWR, 0o666, None)
        assert opened >= 0
        os.close(opened)
        ways = f"""
        libc.shmat.restype = ctypes.c_void_p
        address = libc.shmat({segment}, None, 0)
        if address not in (None, ctypes.c_void_p(-1).value):
            ctypes.memset(address, 1, 4096)
        libc.shmctl({segment}, 0, None)
        libc.mq_unlink({queue!r})
        with contextlib.suppress(OSError):
            os.memfd_create("x")
            print("memory")
        """
        try:
            assert verdict(attack(ways), DONE, any_sandbox).passed == 1
            assert ctypes.string_at(address, 4096) == bytes(4096)
            assert libc.shmctl(segment, 2, ctypes.create_string_buffer(256)) == 0
        finally:
            libc.shmctl(segment, 0, None)
            assert libc.mq_unlink(queue) == 0

    @ON_X86
    def test_other_calling_conventions(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        x32 = "try:\n    call(0x40000000 | 39)\n    print('x32')\nexcept OSError:\n    pass"
        assert verdict(attack(x32), DONE, any_sandbox).passed == 1
        # mov eax, 20; int 0x80; ret: the process's number by the convention of 32 bits
        compat = """
        import mmap
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("b814000000cd80c3"))
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        """
        outcome = verdict(attack(compat), DONE, any_sandbox)
        assert (outcome.passed, outcome.note) == (0, "exit status -31"), "SIGSYS"

    def test_daemons_end_with_the_program(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        mark = f"roll-daemon-{time.monotonic_ns()}"
        # Only the program itself answers: what its child would print comes before or after its end, as it happens.
        source = f"""
        import os
        for flags in (None, 0x8000 | 17):
            try:
                if not (os.fork() if flags is None else libc.syscall(56, flags, 0, 0, 0, 0)):
                    os.setsid()
                    if not os.fork():
                        os.execv("/bin/sleep", ["{mark}", "60"])
                    os._exit(0)
            except OSError:
                pass
        """
        assert verdict(attack(source), DONE, any_sandbox, processes=4).passed == 1
        until = time.monotonic() + 5  # on a busy host a killed process is listed until it is scheduled once more
        while mark in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
            assert time.monotonic() < until
            time.sleep(0.05)

    def test_a_fork_bomb(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        bomb = """
        import os, signal
        while True:
            try:
                if not os.fork():
                    os.kill(-1, signal.SIGKILL)
            except OSError:
                pass
        """
        outcome = verdict(textwrap.dedent(bomb), DOUBLE, any_sandbox, case_timeout=0.7, processes=8)
        assert outcome.passed == 0
        assert verdict(GOOD, DOUBLE, any_sandbox).passed == 1


FORGED_FROM_OUTSIDE = f"""{ATTACK}
import threading
lines = b'{{"case": 0, "passed": true, "note": null}}\\n{{"case": 1, "passed": true, "note": null}}\\n'
verdicts = []
def go_on_writing():
    while True:
        for file in verdicts:
            attempt(lambda: os.write(file, lines))
def f(n):
    if n == 1:
        threading.Thread(target=go_on_writing, daemon=True).start()
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        pids = range(1, 400)
    for pid in pids:
        if pid == os.getpid():
            continue
        for number in range(16):
            def write():
                file = os.open(f"/proc/{{pid}}/fd/{{number}}", os.O_WRONLY | os.O_APPEND)
                if os.readlink(f"/proc/{{pid}}/fd/{{number}}").startswith("/memfd:sandbox"):
                    verdicts.append(file)
            def take():
                target = os.pidfd_open(pid)
                call(438, target, number, 0)
            attempt(write, take)
        attempt(lambda: os.write(os.open(f"/proc/{{pid}}/mem", os.O_RDWR), b"x"))
    return 0
"""


def test_no_verdict_is_forged_from_outside(any_sandbox: Sandbox, verdict: Verdict) -> None:
    outcome = verdict(FORGED_FROM_OUTSIDE, ["assert f(1) == 1", "assert f(2) == 2"], any_sandbox)
    assert (outcome.passed, outcome.total, outcome.timed_out) == (0, 2, False), outcome


LEFT_BEHIND = {
    "closed": "import os\nos.mkdir('a')\nos.mkdir('a/b')\nopen('a/b/c', 'w').close()\nos.chmod('a/b', 0)\n"
    "os.chmod('a', 0)\nos.mkdir('c', 0)\nos.chmod('.', 0)",
    "nested": "import os\nfor i in range(1100):\n    os.mkdir('d' * 200, 0o300)\n    os.chdir('d' * 200)",
    "many": "import os\nfor i in range(3000):\n    open(str(i), 'w').close()",
    "odd_names": "import os\nfor name in (b'\\xff', b'\\n', b'-rf', b'a' * 255):\n    os.mkdir(name)\n"
    "    os.symlink('/', name + b'/l' if len(name) < 255 else b'l')\nos.mkfifo('fifo')",
}


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_a_folder_that_resists_its_removal(any_sandbox: Sandbox, verdict: Verdict, name: str) -> None:
    before = processes_of(any_sandbox)
    source = f"{LEFT_BEHIND[name]}\nprint('wrong')"
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(verdict, GOOD, DOUBLE, any_sandbox) for _ in range(3)]
        offender = pool.submit(verdict, source, DOUBLE, any_sandbox)
        assert offender.result().passed == 0
        assert [neighbour.result().passed for neighbour in neighbours] == [1, 1, 1]
    assert verdict(GOOD, DOUBLE, any_sandbox).passed == 1
    assert processes_of(any_sandbox)[0] == before[0]
    if any_sandbox._folder is not None:
        deadline = time.monotonic() + 30
        while os.listdir(any_sandbox._folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert os.listdir(any_sandbox._folder) == []


FILLS = {
    "140_files": "for i in range(140):\n    open(str(i), 'wb').write(bytes(2**24 - 1))",
    "files_out_of_sight": "for i in range(140):\n    os.mkdir('d' * 200, 0o300)\n    os.chdir('d' * 200)\n"
    "    open('f', 'wb').write(bytes(2**24 - 1))",
    "many_entries": "for i in range(20_000):\n    open(str(i), 'w').close()",
    "fallocate": "files = [os.open(str(i), os.O_CREAT | os.O_RDWR) for i in range(40)]\n"
    "for file in files:\n    for mode in (0, 1):\n"
    "        if not libc.fallocate(file, mode, ctypes.c_long(0), ctypes.c_long(2**30)): print('took')\n"
    "libc.posix_fallocate(files[0], ctypes.c_long(0), ctypes.c_long(2**20)) or print('done')\nexit()",
    "without_a_name": "for i in range(40):\n    with contextlib.suppress(OSError):\n"
    "        os.write(os.open('.', 0o20200000 | os.O_RDWR), bytes(2**24 - 1))\n        print('took')",
}


@pytest.mark.parametrize("name", FILLS)
def test_the_disk_of_a_host_is_not_filled(any_sandbox: Sandbox, verdict: Verdict, name: str) -> None:
    def used() -> int:
        assert any_sandbox._folder is not None
        found = subprocess.run(["du", "-s", any_sandbox._folder], capture_output=True, text=True, check=False).stdout
        return int(found.split()[0]) * 1024 if found else 0  # it is removed where the sandbox ends

    any_sandbox.start()
    peak = 0
    with ThreadPoolExecutor(1) as pool:
        source = f"{ATTACK}\n{FILLS[name]}\nimport time\ntime.sleep(0.5)\nprint('done')\n"
        outcome = pool.submit(verdict, source, DONE, any_sandbox)
        while any_sandbox._folder is not None and not outcome.done():
            peak = max(peak, used())
            time.sleep(0.02)
    assert outcome.result().passed == (name in ("fallocate", "without_a_name")), outcome.result()
    assert peak < 2**29


def test_a_folder_put_in_another_ones_place(any_sandbox: Sandbox, verdict: Verdict, canary: Path) -> None:
    source = f"""
    here = os.getcwd()
    attempt(lambda: os.rename(here, here + "x"), lambda: os.symlink({str(canary.parent)!r}, here))
    """
    assert verdict(attack(source), DONE, any_sandbox).passed == 1
    assert verdict(GOOD, DOUBLE, any_sandbox).passed == 1
    assert canary.read_text() == "alive"


def test_a_closed_sandbox_leaves_nothing_behind() -> None:
    sandbox = HOSTS["container_root_private_python"].start()
    sandbox.start()
    folder = sandbox._folder
    assert folder is not None
    assert os.path.isdir(folder)
    assert sandbox._zygote is not None
    sandbox._zygote.kill()
    sandbox.close()
    assert not os.path.exists(folder)


def test_numbers_of_calls_are_the_kernels() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("the sandbox needs Linux")
    header = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}[kernel.ARCHITECTURE]
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip("no kernel headers here")
    from roll.rewards.sandbox import seccomp

    numbers = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) >= 3 and words[1].startswith("__NR") and words[2].isdigit():
            numbers[words[1].removeprefix("__NR_").removeprefix("__NR3264_")] = int(words[2])
    assert numbers["openat"] == seccomp.OPENAT["openat"][seccomp.COLUMN]
    dicts = [value for name, value in vars(seccomp).items() if name.isupper() and isinstance(value, dict)]
    groups = [value for value in dicts if all(isinstance(pair, tuple) for pair in value.values())]
    assert len(groups) > 15
    for group in groups:
        for name, pair in group.items():
            number = pair[seccomp.COLUMN]
            if number is not None and name in numbers:
                assert numbers[name] == number, name
