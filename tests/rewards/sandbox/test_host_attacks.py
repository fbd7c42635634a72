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
from string import Template

import pytest

from roll.rewards.sandbox import kernel
from roll.rewards.sandbox.client import Sandbox
from tests.rewards.sandbox.conftest import EVERYTHING, HOSTS, NOBODY, Verdict, cases_of

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


PROGRAMS = cases_of("host_attacks")


def program(name: str, **values: object) -> str:
    return Template(PROGRAMS[name]["source"]).substitute(values)


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


def test_a_judge_that_keeps_its_files_to_itself_loses_no_protection(any_host: str) -> None:
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
            source = program("writing_outside_2", path=repr(str(path)))
            outcome = verdict(textwrap.dedent(source), {"inputs": [""], "outputs": ["held"]}, any_sandbox)
            private = path.parent == Path("/dev/shm") and report.given["scratch"]
            assert outcome.passed == (0 if private else 1), path
            assert path == canary or not path.exists()
        before = state(canary)
        ways = program("writing_outside", canary=repr(str(canary)), folder=repr(str(canary.parent)))
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        assert state(canary) == before
        assert [path.name for path in canary.parent.iterdir()] == ["canary"]
        assert canary.read_text() == "alive"

    def test_modes_owners_times_and_attributes(self, any_sandbox: Sandbox, verdict: Verdict, canary: Path) -> None:
        watched = (canary, canary.parent, Path(os.devnull))
        before = [state(path) for path in watched]
        null = os.stat(os.devnull)
        ways = program(
            "modes_owners_times_and_attributes",
            canary=repr(str(canary)),
            folder=repr(str(canary.parent)),
            nobody=NOBODY,
        )
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        after = [state(path) for path in watched]
        if after != before and os.geteuid() == 0:  # this machine goes on working where the attack succeeds
            os.chmod(os.devnull, null.st_mode & 0o7777)
            os.chown(os.devnull, null.st_uid, null.st_gid)
        assert after == before

    def test_copies_of_its_own_files_work(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        source = program("copies_of_its_own_files_work")
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
        search = program("the_environment_of_others", secret=secret, own_pid=os.getpid(), canary=repr(str(canary)))
        assert verdict(attack(search), DONE, any_sandbox).passed == 1

    def test_descriptors_that_it_inherits(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        source = program("descriptors_that_it_inherits")
        expected = {"inputs": [""], "outputs": ["[0, 1, 2]"]}
        assert verdict(textwrap.dedent(source), expected, any_sandbox).passed == 1


class TestNetwork:
    def test_connections(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0)
            ways = program("connections", port=server.getsockname()[1])
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
        ways = program("addressed_datagrams", names=repr(names))
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        for server in servers:
            with pytest.raises(BlockingIOError):
                server.recv(1)
            server.close()


class TestOtherProcesses:
    def test_signals(self, any_sandbox: Sandbox, verdict: Verdict, victim: int) -> None:
        mine = processes_of(any_sandbox)
        # In a process namespace of its own the parent's number is 0, which means one's own group.
        ways = program("signals", victim=victim, processes=mine)
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        verdict("import os, signal\nos.kill(-1, signal.SIGKILL)", DONE, any_sandbox)
        assert processes_of(any_sandbox) == mine

    def test_signals_by_what_a_function_is_called_through(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        """The channel to the tests' process, made by the reward worker, knows both."""
        source = ATTACK + program("signals_by_what_a_function_is_called_through")
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
        ways = program("priorities_and_limits", pids=pids)
        assert verdict(attack(ways), DONE, any_sandbox).passed == 1
        assert facts() == before

    def test_memory_and_descriptors(self, any_sandbox: Sandbox, verdict: Verdict, victim: int) -> None:
        ways = program("memory_and_descriptors", victim=victim, processes=processes_of(any_sandbox))
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
        ways = program("shared_memory_and_queues", segment=segment, queue=repr(queue))
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
        compat = program("other_calling_conventions_compat")
        outcome = verdict(attack(compat), DONE, any_sandbox)
        assert (outcome.passed, outcome.note) == (0, "exit status -31"), "SIGSYS"

    def test_daemons_end_with_the_program(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        mark = f"roll-daemon-{time.monotonic_ns()}"
        # Only the program itself answers: what its child would print comes before or after its end, as it happens.
        source = program("daemons_end_with_the_program", mark=mark)
        assert verdict(attack(source), DONE, any_sandbox, processes=4).passed == 1
        until = time.monotonic() + 5  # on a busy host a killed process is listed until it is scheduled once more
        while mark in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
            assert time.monotonic() < until
            time.sleep(0.05)

    def test_a_fork_bomb(self, any_sandbox: Sandbox, verdict: Verdict) -> None:
        bomb = program("a_fork_bomb")
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


@pytest.mark.long_rows("container_user")
def test_no_verdict_is_forged_from_outside(any_sandbox: Sandbox, verdict: Verdict) -> None:
    outcome = verdict(FORGED_FROM_OUTSIDE, ["assert f(1) == 1", "assert f(2) == 2"], any_sandbox)
    assert (outcome.passed, outcome.total, outcome.timed_out) == (0, 2, False), outcome


@pytest.mark.long_rows("container_root_without_landlock-nested", "container_user-many")
@pytest.mark.parametrize("name", [name for name, case in PROGRAMS.items() if "left behind" in case])
def test_a_folder_that_resists_its_removal(any_sandbox: Sandbox, verdict: Verdict, name: str) -> None:
    before = processes_of(any_sandbox)
    source = f"{PROGRAMS[name]['left behind']}\nprint('wrong')"
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


@pytest.mark.long_rows("container_root_without_landlock-many_entries", "container_user-many_entries")
@pytest.mark.parametrize("name", [name for name, case in PROGRAMS.items() if "filling" in case])
def test_the_disk_of_a_host_is_not_filled(any_sandbox: Sandbox, verdict: Verdict, name: str) -> None:
    def used() -> int:
        assert any_sandbox._folder is not None
        found = subprocess.run(["du", "-s", any_sandbox._folder], capture_output=True, text=True, check=False).stdout
        return int(found.split()[0]) * 1024 if found else 0  # it is removed where the sandbox ends

    any_sandbox.start()
    peak = 0
    with ThreadPoolExecutor(1) as pool:
        source = f"{ATTACK}\n{PROGRAMS[name]['filling']}\nimport time\ntime.sleep(0.5)\nprint('done')\n"
        outcome = pool.submit(verdict, source, DONE, any_sandbox)
        while any_sandbox._folder is not None and not outcome.done():
            peak = max(peak, used())
            time.sleep(0.02)
    assert outcome.result().passed == (name in ("fallocate", "without_a_name")), outcome.result()
    assert peak < 2**29


def test_a_folder_put_in_another_ones_place(any_sandbox: Sandbox, verdict: Verdict, canary: Path) -> None:
    source = program("a_folder_put_in_another_ones_place", folder=repr(str(canary.parent)))
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

    numbers = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) >= 3 and words[1].startswith("__NR") and words[2].isdigit():
            numbers[words[1].removeprefix("__NR_").removeprefix("__NR3264_")] = int(words[2])
    assert numbers["openat"] == kernel.OPENAT["openat"][kernel.COLUMN]
    dicts = [value for name, value in vars(kernel).items() if name.isupper() and isinstance(value, dict)]
    groups = [value for value in dicts if all(isinstance(pair, tuple) for pair in value.values())]
    assert len(groups) > 15
    for group in groups:
        for name, pair in group.items():
            number = pair[kernel.COLUMN]
            if number is not None and name in numbers:
                assert numbers[name] == number, name
