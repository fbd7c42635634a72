"""The process that all sandboxed processes are forked from: prepared once, it holds no tests and no samples.

Run as ``python -m roll.rewards.sandbox.zygote``.  It receives requests with file descriptors over a socket, forks,
enforces the wall time limit, and reports each end.  Sources, inputs and tests do not pass through it: they travel in
the descriptors, so no process that it forks later can find them in the memory it inherits.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from roll.rewards.sandbox import candidate, confinement, harness, kernel, protections
from roll.rewards.sandbox.protections import TRIAL_LIMITS, TRIAL_SLOT, Limits, Means

MAX_MESSAGE = 65536
MAX_DESCRIPTORS = 8
CONFINED = b"confined"
REMOVED_AT_ONCE = 200  # entries of a private folder; what holds more is removed by a process of its own
LOOK_AT_FOLDERS = 0.05  # seconds between looks at what programs have written
REMOVAL_SECONDS = 120.0  # time limit of such a process; what is left is removed with the sandbox
WARM = """
    abc array asyncio bisect calendar cmath collections copy ctypes dataclasses datetime decimal enum fractions
    functools heapq inspect io itertools json math numbers operator queue random re statistics string textwrap
    threading time traceback types typing
"""
"""Modules that programs import most; loaded here, their import is free."""
PROGRAMS: dict[str, Callable[[dict[str, Any]], None]] = {
    "script": candidate.run_script,
    "serve": candidate.serve_calls,
    "tests": harness.run_tests,
    "command": candidate.run_command,
}


@dataclass
class Child:
    number: int
    pid: int
    pidfd: int
    deadline: float
    slot: int
    folder: str | None
    confined: int  # descriptor to read `CONFINED` from; what the process runs afterwards cannot take it back
    scratch: int  # bytes that its folder may hold
    timed_out: bool = False


class Zygote:
    def __init__(
        self, control: socket.socket, means: Means, readable: list[str], own_namespace: int | None, folder: str | None
    ) -> None:
        self._control = control
        self.means = means
        self._readable = readable
        self._children: dict[int, Child] = {}
        self._free_slots = list(range(confinement.UIDS))
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._own_namespace = own_namespace
        self.folder = folder  # parent of private folders; None: each process mounts its own
        self._to_remove: deque[str] = deque()
        self._remover: tuple[int, int, float] | None = None  # descriptor, process and deadline
        self._next_look = 0.0
        kernel.prepare_filters()

    def serve(self) -> None:
        """Answer requests until the other side closes the socket."""
        is_open = True
        while is_open:
            waiting = [child.deadline for child in self._children.values() if not child.timed_out]
            if self._remover is not None:
                waiting.append(self._remover[2])
            if any(child.folder is not None for child in self._children.values()):
                waiting.append(time.monotonic() + LOOK_AT_FOLDERS)
            # The millisecond keeps a deadline from being polled for before it has come.
            patience = max(0.0, min(waiting) - time.monotonic()) * 1000 + 1 if waiting else None
            for descriptor, _ in self._poll.poll(patience):
                if descriptor == self._control.fileno():
                    is_open = self._receive()
                elif descriptor in self._children:
                    self._finish(self._children.pop(descriptor))
                elif self._remover is not None and descriptor == self._remover[0]:
                    self._end_remover()
            self._kill_offenders()
        for child in self._children.values():
            self._kill(child)
            self._finish(child, report=False)
        if self._remover is not None:
            signal.pidfd_send_signal(self._remover[0], signal.SIGKILL)

    def _kill_offenders(self) -> None:
        """Kill processes that exceed their time limit or their share of the disk."""
        now = time.monotonic()
        for child in self._children.values():
            if child.deadline <= now and not child.timed_out:
                child.timed_out = True
                self._kill(child)
        if self._remover is not None and self._remover[2] <= now:
            signal.pidfd_send_signal(self._remover[0], signal.SIGKILL)
            self._remover = (*self._remover[:2], now + REMOVAL_SECONDS)
        if now < self._next_look:
            return
        # Where no memory disk could be mounted, nothing else limits the sum of what a program writes.
        for child in self._children.values():
            if child.folder is not None and confinement.holds_too_much(child.folder, child.scratch):
                self._kill(child)
        self._next_look = time.monotonic() + LOOK_AT_FOLDERS

    def _receive(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, MAX_DESCRIPTORS)
        if not message:
            return False
        request = json.loads(message)
        if "kill" in request:
            for child in self._children.values():
                if child.number == request["kill"]:
                    self._kill(child)
            return True
        try:
            self._spawn(request, descriptors)
        except OSError as error:
            self._send({"number": request["number"], "error": f"{type(error).__name__}: {error}"})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _spawn(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if not self._free_slots:
            raise OSError(f"more than {confinement.UIDS} processes at a time")
        limits = Limits(**request["limits"])
        slot = self._free_slots.pop()
        folder = None
        try:
            folder = confinement.make_folder(self.folder, self._uid(slot))
            run = partial(PROGRAMS[request["program"]], request)
            pid, confined = self.fork(run, limits, slot, folder, descriptors, request.get("proc", False))
            deadline = time.monotonic() + limits.wall
            child = Child(request["number"], pid, os.pidfd_open(pid), deadline, slot, folder, confined, limits.scratch)
        except OSError:
            self._release(slot, folder)
            raise
        self._children[child.pidfd] = child
        self._poll.register(child.pidfd, select.POLLIN)

    def fork(
        self,
        program: Callable[[], None],
        limits: Limits,
        slot: int,
        folder: str | None,
        descriptors: list[int],
        proc: bool = False,
    ) -> tuple[int, int]:
        """A new process confines itself and then runs ``program`` on descriptors 0, 1, 2, ...: its id, and a descriptor
        from which ``CONFINED`` can be read, or why it has run nothing."""
        self._enter_next_namespace()
        # Non-blocking: a process that was killed before it wrote must not hold up all others here.
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                # They become 0, 1, 2, ... and every other one is closed. Out of the way first: a target may be a
                # source still to be placed.
                sources = (*descriptors, writing)
                moved = [fcntl.fcntl(source, fcntl.F_DUPFD, 2 * MAX_DESCRIPTORS) for source in sources]
                for target, source in enumerate(moved):
                    os.dup2(source, target)
                os.closerange(len(moved), os.sysconf("SC_OPEN_MAX"))
                report, scratch = len(descriptors), folder or confinement.SCRATCH
                try:
                    confinement.confine(self.means, limits, self._uid(slot), scratch, self._readable, proc)
                    os.write(report, CONFINED)
                except (OSError, ValueError) as error:
                    os.write(report, f"{type(error).__name__}: {error}".encode())
                    os._exit(1)
                os.close(report)
                # This package is not on a program's path, so it should not be among its modules either.
                for name in [name for name in sys.modules if name.partition(".")[0] == "roll"]:
                    del sys.modules[name]
                # Temporary files and settings go to the private folder, wherever it is.
                tempfile.tempdir = scratch
                os.environ.update(TMPDIR=scratch, HOME=scratch)
                program()
            finally:
                os._exit(1)
        os.close(writing)
        return pid, reading

    def _enter_next_namespace(self) -> None:
        """The next process is the first of a process namespace, where there are any."""
        if self._own_namespace is not None:
            # A further process namespace can only be created from the original one.
            kernel.setns(self._own_namespace, kernel.CLONE_NEWPID)
            kernel.unshare(kernel.CLONE_NEWPID)

    def _uid(self, slot: int) -> int | None:
        return None if self.means.first_uid is None else self.means.first_uid + slot

    def run_trial(self) -> dict[str, Any]:
        """Confine a process that attacks this host; True for each protection that held."""
        means = self.means
        reading, writing = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        folder = confinement.make_folder(self.folder, self._uid(TRIAL_SLOT))
        canary = protections.make_canary(self.folder)
        program = partial(protections.attack, os.getpid(), means.process_namespace, means.mounts, canary)
        pid, confined = self.fork(program, TRIAL_LIMITS, TRIAL_SLOT, folder, [null, writing, null])
        os.close(writing)
        with open(reading, encoding="utf-8") as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        self.end_remaining(pid, TRIAL_SLOT)
        if folder is not None:
            with contextlib.suppress(OSError):
                confinement.remove_tree(folder)
        os.close(null)
        os.close(confined)
        found: dict[str, Any] = json.loads(text) if text else {"runs": False}
        # Checked from outside: a call may report success without effect.
        found["files"] = bool(found.get("files")) and protections.is_unchanged(canary)
        found["ends"] = means.process_namespace or means.first_uid is not None or means.seccomp
        found["scratch"], found["user"] = means.mounts, means.first_uid is not None
        values = {**asdict(means), "landlock": means.landlock or None}
        found["means"] = [
            f"landlock (version {value})" if name == "landlock" else name
            for name, value in values.items()
            if value is not None and value is not False
        ]
        if canary is not None:
            os.unlink(canary)
        return found

    def _kill(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def _finish(self, child: Child, report: bool = True) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._poll.unregister(child.pidfd)
        os.close(child.pidfd)
        self.end_remaining(child.pid, child.slot)
        self._release(child.slot, child.folder)
        try:
            answer = os.read(child.confined, MAX_MESSAGE)
        except BlockingIOError:  # killed before it could write
            answer = b""
        os.close(child.confined)
        if report and answer == CONFINED:
            code = os.waitstatus_to_exitcode(status)
            self._send({"number": child.number, "code": code, "timed_out": child.timed_out})
        elif report:
            self._send({"number": child.number, "error": f"the process could not be confined: {answer.decode()}"})

    def end_remaining(self, pid: int, slot: int) -> None:
        """Kill what a process has left running. In a process namespace the kernel has done so."""
        if self.means.process_namespace:
            return
        uid = self._uid(slot)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if uid is not None:
            killer = os.fork()
            if killer == 0:
                try:
                    # It may signal that user's processes, and none of them may signal it.
                    its_own = uid - slot + confinement.UIDS
                    os.setresuid(its_own, uid, its_own)
                    os.kill(-1, signal.SIGKILL)
                finally:
                    os._exit(0)
            os.waitpid(killer, 0)
        # Orphans come to this process (PR_SET_CHILD_SUBREAPER).
        running = {child.pid for child in self._children.values()}
        with contextlib.suppress(ChildProcessError):
            while orphan := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if orphan.si_pid in running:
                    break
                os.waitpid(orphan.si_pid, 0)

    def _release(self, slot: int, folder: str | None) -> None:
        self._free_slots.append(slot)
        if folder is None:
            return
        try:
            confinement.remove_tree(folder, REMOVED_AT_ONCE)
        except (confinement.OutOfBudget, OSError):
            # Large remains are removed in the background, where they neither delay nor end this process.
            self._to_remove.append(folder)
            self._start_remover()

    def _start_remover(self) -> None:
        if self._remover is not None or not self._to_remove:
            return
        folders = list(self._to_remove)
        self._to_remove.clear()
        try:
            self._enter_next_namespace()
            pid = os.fork()
        except OSError as error:
            sys.stderr.write(f"code sandbox: {len(folders)} folders are left: {error}\n")
            return
        if pid == 0:
            try:
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
                for folder in folders:
                    try:
                        confinement.remove_tree(folder)
                    except OSError as error:
                        sys.stderr.write(f"code sandbox: {folder} cannot be removed: {error}\n")
            finally:
                os._exit(0)
        self._remover = (os.pidfd_open(pid), pid, time.monotonic() + REMOVAL_SECONDS)
        self._poll.register(self._remover[0], select.POLLIN)

    def _end_remover(self) -> None:
        assert self._remover is not None
        descriptor, pid, _ = self._remover
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        self._remover = None
        self._start_remover()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._control.send(json.dumps(message).encode())


def main() -> None:
    descriptor, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    # Programs of another user must find their folders, whatever the process that judges keeps to itself.
    os.umask(0o022)
    for module in (*WARM.split(), *settings["preload"]):
        importlib.import_module(module)
    readable, without = confinement.readable_paths(settings["readable"]), set(settings["without"])
    means, claim = confinement.find_means(without, settings["landlock_abi"])
    own_namespace = None
    if means.process_namespace:
        if inner := os.fork():
            # The first process of the namespace does the work; with it everything in the namespace ends.
            os.close(descriptor)
            _, status = os.waitpid(inner, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        if "mounts" not in without:
            with contextlib.suppress(OSError):  # not every host lets it mount
                confinement.enter_view(readable)
                means = replace(means, mounts=True)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.hide_from_other_processes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    candidate.forget_surroundings()
    candidate.install_names()
    gc.collect()
    # Each fork shares these pages until they are written to: frozen objects are not touched by its collections.
    gc.freeze()
    folder = None
    if not means.mounts:
        # Others cannot list the private folders in it, and their owners cannot replace them.
        folder = tempfile.mkdtemp(prefix="roll-sandbox-")
        os.chmod(folder, 0o711)
    try:
        zygote = Zygote(control, means, readable, own_namespace, folder)
        found = zygote.run_trial()
        # A user of its own may not be able to read this Python (under a home folder); a kernel may lack a part of the
        # rest.
        for less in ({"first_uid": None}, {"seccomp": False}, {"landlock": 0}):
            if not found["runs"]:
                zygote.means = replace(zygote.means, **less)
                found = zygote.run_trial()
        control.send(json.dumps({"ready": True, "found": found, "folder": folder}).encode())
        zygote.serve()
    finally:
        if folder is not None:
            with contextlib.suppress(OSError):
                confinement.remove_tree(folder)
    del claim


if __name__ == "__main__":
    main()
