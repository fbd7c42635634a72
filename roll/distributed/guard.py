"""The end of a run: the guard, which outlives the driver, and the search for processes and folders that are left.

Ray ends a driver whose node daemon has died on the spot; the kernel ends one that wants too much memory; and a second
Ctrl-C ends it at once. None of them leaves the driver time to end its processes, to say what happened, or to draw its
curves. The guard, a small process, waits for the driver's end at a pipe. Closed without notice, it ends what is
left of the run, writes what the driver has left with it to standard error and into the run's log, and runs the command
that it was given for this case.

Processes of a run carry a mark in their environment. Some of Ray's helpers overwrite the memory that holds it when they
give themselves a title; they are known by that title and the files that they have open in the folder of the run's Ray.

Needs the standard library only, so that the guard starts in no time: ``python -m roll.distributed.guard``.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MARK_ENV = "ROLL_RUN_MARK"
"""Variable with the mark, unique to a run, in the environment that Ray, workers and their children inherit."""

_PROC = Path("/proc")
_RAY_TITLE = "ray::"
_HELPERS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def run_processes(mark: str, folder: Path | None = None) -> list[int]:
    """Process ids, this process excepted, that were started with ``ROLL_RUN_MARK=mark`` or are Ray's and have a file in
    ``folder`` open; those that have ended and wait for their parent are not among them. Empty where there is no
    ``/proc``."""
    wanted = f"{MARK_ENV}={mark}".encode()
    found = []
    for entry in _PROC.glob("[0-9]*"):
        pid = int(entry.name)
        try:
            of_run = wanted in (entry / "environ").read_bytes().split(b"\0")
            if not of_run and folder is not None and command_of(pid).startswith(_RAY_TITLE):
                of_run = _has_open(entry, folder)
            if of_run and pid != os.getpid() and is_alive(pid):
                found.append(pid)
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return found


def _has_open(entry: Path, folder: Path) -> bool:
    inside = f"{folder}/"
    with os.scandir(entry / "fd") as links:
        for link in links:
            try:
                if os.readlink(link.path).startswith(inside):
                    return True
            except OSError:  # closed meanwhile
                continue
    return False


def is_alive(pid: int) -> bool:
    """True while the process runs; one that has ended and was not yet fetched by its parent does not."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # gone meanwhile
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, []))
    for each in found:  # grows while it is read
        found += children.get(each, [])
    return found


def kill_tree(pid: int) -> None:
    """Kill a process and all that it started; stopped ones as well."""
    kill([pid, *descendants(pid)])


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError) as error:
            logger.debug("process %d: %s", pid, error)


def command_of(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return " ".join(word.decode(errors="replace") for word in words[:3]).strip()


def end_run(mark: str, folder: Path | None = None, patience: float = 2.0) -> None:
    """Wait up to ``patience`` seconds for the run's processes to end by themselves, then kill those that are left.

    Ray's helpers are killed at once: they would look for the lost head for minutes.
    """
    give_up = time.monotonic() + patience
    while (left := run_processes(mark, folder)) and time.monotonic() < give_up:
        kill(pid for pid in left if command_of(pid).startswith(_HELPERS))
        time.sleep(0.05)
    for pid in left:
        logger.info("process %d (%s) was slow to end: killed", pid, command_of(pid))
    kill(left)
    while left and run_processes(mark, folder) and time.monotonic() < give_up + patience:
        time.sleep(0.05)


PREFIX = "roll-ray-"
RAY_FOLDER = "s"  # inside ours, since Ray opens the folder that it is given to everyone (mode 0777)
_LOCK_FILE = "driver.lock"
_LONGEST_BASE = 20
"""Ray's socket names under its folder take up to 67 of the 107 bytes that a Unix socket's path may have."""


@contextmanager
def session_dir() -> Iterator[Path]:
    """A fresh folder for Ray or the fork server, removed at the end; those that killed runs left are removed first.

    The folder lies in one that only this user may enter. The driver holds a lock on a file there, so a folder whose
    lock is free has no owner.
    """
    base = tempfile.gettempdir()
    base = base if len(base) <= _LONGEST_BASE else "/tmp"
    remove_abandoned(Path(base))
    closed = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # mode 0700
    try:
        with (closed / _LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = closed / RAY_FOLDER
            folder.mkdir(0o700)
            yield folder
    finally:
        shutil.rmtree(closed, ignore_errors=True)


def remove_abandoned(base: Path) -> None:
    """Remove this user's session folders under ``base`` whose driver is gone."""
    for lock_file in base.glob(f"{PREFIX}*/{_LOCK_FILE}"):
        with suppress(OSError):  # in use, another user's, or removed meanwhile
            # /tmp belongs to everybody: only what this user has made is removed.
            if lock_file.stat().st_uid != os.getuid():
                continue
            with lock_file.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_file.parent, ignore_errors=True)


_FAREWELL_SECONDS = 5.0
_COMMAND_SECONDS = 60.0
_RAYLET_ENDED = ("local raylet failed", "local Raylet is dead")


class Guard:
    """The driver's end of the pipe; starts the guard's process.

    Args:
        mark: of the run's processes.
        folder: of the run's private Ray, removed after a hard end; None: the run uses an existing cluster.
    """

    def __init__(self, mark: str, folder: Path | None) -> None:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            # -P keeps the working directory off the path, where a file such as json.py would replace a standard module.
            [sys.executable, "-P", "-m", "roll.distributed.guard"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C and hang-ups are for the driver
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        self.tell({"mark": mark, "folder": str(folder) if folder is not None else None, "driver": os.getpid()})

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Send facts to the guard, which replace earlier ones of the same name.

        ``daemons``: pids of Ray's, by name. ``cause``: why the driver would end now. ``account``: the progress of
        the run, and how to continue it. ``log``: the file that both are appended to. ``command``: runs at the end.
        """
        with suppress(OSError, ValueError):  # the guard was killed: the run does without it
            self._pipe.write(json.dumps(dict(facts)) + "\n")
            self._pipe.flush()

    def dismiss(self) -> None:
        """The driver ends in good order."""
        self.tell({"done": True})
        with suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(_FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Wait for the driver's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    facts: dict[str, Any] = {}
    poll = select.poll()
    watched: dict[int, str] = {}
    poll.register(0, select.POLLIN | select.POLLHUP)
    heard, rest = b"\n", b""
    while heard:
        for name, pid in facts.pop("daemons", {}).items():
            with suppress(OSError, AttributeError):  # gone already, or a system without pidfd
                descriptor = os.pidfd_open(pid)
                watched[descriptor] = name
                poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll()]
        ended = [watched.pop(descriptor) for descriptor in ready if descriptor in watched]
        for descriptor in ready:
            if descriptor:
                # The pidfd of an ended process stays readable for ever, and poll() would return at once each time.
                poll.unregister(descriptor)
        # A daemon that ends before the driver is the cause; the driver's own end takes all of them along.
        if ended and 0 not in ready and is_alive(facts["driver"]):
            facts.setdefault("cause", f"Ray's {ended[0]} ended, and the run with it")
        if 0 in ready:
            heard = os.read(0, 1 << 16)
            *whole, rest = (rest + heard).split(b"\n")
            for line in whole:
                with suppress(json.JSONDecodeError):  # incomplete at the driver's end
                    facts.update(json.loads(line.decode(errors="replace")))
    if "mark" in facts and not facts.get("done"):
        _clean_up(facts)


def _clean_up(facts: Mapping[str, Any]) -> None:
    folder = Path(facts["folder"]) if facts.get("folder") else None
    cause = facts.get("cause")
    # The reason for which Ray's client has ended the driver, if it noticed the daemon's end first.
    for log in [] if cause or folder is None else folder.glob("session_2*/logs/python-core-driver-*.log"):
        with suppress(OSError):
            text = log.read_text(encoding="utf-8", errors="replace")
            if any(words in text for words in _RAYLET_ENDED):
                cause = "Ray's raylet ended, and the run with it"
    cause = cause or f"the run's process (pid {facts['driver']}) ended without a word"
    end_run(str(facts["mark"]), folder, patience=0.5)
    if folder is not None:
        shutil.rmtree(folder.parent, ignore_errors=True)
    text = f"{cause}\n{facts.get('account', '')}".rstrip()
    with suppress(OSError):  # the terminal is gone
        os.write(2, f"{text}\n".encode())
    # Detached from standard error, so that its reader need not wait for the rest.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    if facts.get("log"):
        with suppress(OSError), Path(facts["log"]).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR roll.guard: {text}\n")
    if facts.get("command"):
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(facts["command"], stdout=2, timeout=_COMMAND_SECONDS, check=False)


if __name__ == "__main__":
    main()
