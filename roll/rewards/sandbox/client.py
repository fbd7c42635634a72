"""The reward worker's side of the sandbox: starts the zygote, requests processes from it, and waits for their ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roll.rewards.sandbox import candidate, confinement, kernel
from roll.rewards.sandbox.protections import PROTECTIONS, Ended, Limits, Report, check_required

START_TIMEOUT = 60.0
END_GRACE = 10.0  # seconds beyond a process's wall time limit within which its end must have been reported
CLOSE_TIMEOUT = 5.0  # seconds that the zygote may take to end its processes


class SandboxError(RuntimeError):
    """The host could not run a process; says nothing about the program."""


@dataclass(frozen=True, slots=True)
class Settings:
    preload: tuple[str, ...] = ()  # modules loaded once, so that programs import them for free
    readable: tuple[str, ...] = ()  # further paths that programs may read
    require: tuple[str, ...] = ()  # protections without which nothing runs
    without: tuple[str, ...] = ()  # means that are left unused, for tests of less permissive hosts
    landlock_abi: int | None = None
    """The highest version of Landlock that is used, for the same purpose; None: the kernel's."""
    launcher: tuple[str, ...] = ()  # a command that starts the zygote, for the same purpose


@dataclass(eq=False)
class Process:
    sandbox: Sandbox
    number: int
    wall: float
    end: Future[Ended] = field(default_factory=Future)

    def wait(self) -> Ended:
        """Wait for the process to end. Raises ``SandboxError``: the host could not run it."""
        try:
            ended = self.end.result(self.wall + END_GRACE)
        except TimeoutError:
            raise SandboxError("the end of a process was not reported: the sandbox does not respond") from None
        if ended.error is not None:
            raise SandboxError(ended.error)
        return ended

    def kill(self) -> None:
        self.sandbox.ask({"kill": self.number})


class Sandbox:
    """One zygote and the processes forked from it. Starts at first use, and again should it have died; thread-safe."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, Process] = {}
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder: str | None = None
        self.report: Report | None = None

    def start(self) -> Report:
        """Start the zygote where none runs, and return the protections of this host. Raises ``SandboxError``: it does
        not start, or a required protection is missing."""
        with self._lock:
            if self._zygote is None or self._zygote.poll() is not None or self._control is None:
                self._stop()
                try:
                    self._launch()
                except BaseException:
                    self._stop()
                    raise
        assert self.report is not None
        return self.report

    def spawn(
        self, program: str, descriptors: Sequence[int], limits: Limits, more: dict[str, Any] | None = None
    ) -> Process:
        """Start ``program`` (see :mod:`~roll.rewards.sandbox.candidate`) on copies of ``descriptors``. Raises
        ``SandboxError``: the sandbox does not run."""
        self.start()
        number = next(self._numbers)
        process = Process(self, number, limits.wall)
        with self._lock:
            self._running[number] = process
        request = {"number": number, "program": program, "limits": asdict(limits), **(more or {})}
        self.ask(request, descriptors)
        return process

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            control = self._control
            if control is None:
                raise SandboxError("the sandbox does not run")
            try:
                socket.send_fds(control, [json.dumps(request).encode()], list(descriptors))
            except OSError as error:
                raise SandboxError(f"the sandbox does not take requests: {error}") from error

    def _launch(self) -> None:
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"model-written code runs on Linux only, not on {sys.platform}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = asdict(self._settings) | {"readable": [os.path.abspath(path) for path in self._settings.readable]}
        # An environment without that of this process, which may hold keys and addresses.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        environment |= {**candidate.ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[3])}
        python = [*self._settings.launcher, sys.executable, "-s", "-m", "roll.rewards.sandbox.zygote"]
        self._control = ours
        with theirs:
            self._zygote = subprocess.Popen(
                [*python, str(theirs.fileno()), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        ours.settimeout(START_TIMEOUT)
        try:
            hello = ours.recv(1 << 16)
        except TimeoutError as error:
            raise SandboxError(f"the sandbox has not started within {START_TIMEOUT:g} s") from error
        if not hello:
            raise SandboxError(f"the sandbox ended at its start with status {self._zygote.wait()}")
        ours.settimeout(None)
        answer = json.loads(hello)
        self._folder = answer["folder"]
        weakref.finalize(self, end_zygote, self._zygote, ours, self._folder)
        given = {name: name == "limits" or bool(answer["found"].get(name)) for name in PROTECTIONS}
        self.report = Report(given, tuple(answer["found"]["means"]))
        check_required(self.report, self._settings.require)
        if not self.report.given["private"]:
            # This process holds the tests and the verdicts of all programs.
            kernel.hide_from_other_processes()
        # Each zygote has its own processes: messages of one that died do not concern those of its successor.
        self._running = {}
        listener = threading.Thread(target=self._listen, args=(ours, self._running), daemon=True, name="sandbox")
        listener.start()

    def _listen(self, control: socket.socket, running: dict[int, Process]) -> None:
        """Pass on the ends of processes, until the zygote is gone."""
        while True:
            try:
                message = control.recv(1 << 16)
            except OSError:
                message = b""
            if not message:
                break
            event = json.loads(message)
            with self._lock:
                process = running.pop(event.pop("number"), None)
            if process is not None:
                process.end.set_result(Ended(**{"code": -1, **event}))
        with self._lock:
            left = list(running.values())
            running.clear()
            if self._control is control:
                self._control = None
        for process in left:
            process.end.set_result(Ended(-1, error="the sandbox ended"))

    def _stop(self) -> None:
        end_zygote(self._zygote, self._control, self._folder)
        self._zygote = self._control = self._folder = None

    def close(self) -> None:
        with self._lock:
            if self._control is not None and self._zygote is not None:
                # Wakes the listening thread, and the zygote cleans up and exits.
                self._control.shutdown(socket.SHUT_RDWR)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._zygote.wait(CLOSE_TIMEOUT)
            self._stop()


def end_zygote(zygote: subprocess.Popen[bytes] | None, control: socket.socket | None, folder: str | None) -> None:
    """Kill a zygote, and its processes with it, and remove its folder if it could not do so itself."""
    if zygote is not None:
        zygote.kill()
        zygote.wait()
    if control is not None:
        control.close()
    if folder is not None and os.path.exists(folder):
        with contextlib.suppress(OSError):
            confinement.remove_tree(folder)
