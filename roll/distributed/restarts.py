"""Automatic restarts (``max_restarts``): a small parent process starts ``roll run`` again after a failure.

A training worker that dies takes its process group along, a raylet its node, and the kernel may kill the driver itself.
The process that drives the run can recover from none of these, so its parent does: it waits for the run's end, finds
the newest checkpoint, and starts the same command from there. The run reports through a socket its progress, which
checkpoints are whole, and why it ends; one that ends without a reason was killed.

Needs the standard library only: the parent stays small for as long as the run lasts.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from roll.distributed.guard import end_run
from roll.distributed.signals import ENDING

if TYPE_CHECKING:
    from roll.config.run import RunConfig

logger = logging.getLogger(__name__)

SOCKET_ENV = "ROLL_SUPERVISOR"
LEFT_OUT_ENV = "ROLL_LEFT_OUT_STEPS"
REJOIN_ENV = "ROLL_REJOIN_SECONDS"
RECORD_NAME = "restarts.jsonl"  # file in the folder of logs with a line for every end, restart and recovery

MOST_WAIT = 600.0  # seconds of the longest pause before a restart
MOST_REWINDS = 3
"""Most rewinds to the same checkpoint: if numbers are still non-finite then, skipping more batches does not help."""

FAILED, INTERRUPTED, DONE, WRONG, REWIND = "failed", "interrupted", "done", "wrong", "rewind"
"""Reasons of an end: a fault that a restart may overcome, a signal, the last step, a mistake that a restart would
repeat, a batch that gave a non-finite number."""
_CLEANUP_SECONDS = 5.0
_START_SECONDS = 120.0  # time for the head to clean up after a run and to start again


class Supervised:
    """The run's side of the socket to its supervisor; without a supervisor :meth:`tell` does nothing."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.left_out: frozenset[int] = frozenset()  # steps whose batches no model learns from
        self.rejoin_seconds = 0.0
        """Seconds that a further node waits for the head to come back; 0: it serves for the first time."""

    @property
    def is_attached(self) -> bool:
        return self._socket is not None

    def attach(self) -> None:
        """Connect to the supervisor; its variables leave the environment, so that no worker inherits them."""
        number, steps = os.environ.pop(SOCKET_ENV, None), os.environ.pop(LEFT_OUT_ENV, "")
        self.rejoin_seconds = float(os.environ.pop(REJOIN_ENV, 0.0))
        if number is None or self._socket is not None:
            return
        self._socket = socket.socket(fileno=int(number))
        # A worker that inherits it would keep the stream open after the run, and the supervisor waiting.
        self._socket.set_inheritable(False)
        self.left_out = frozenset(int(step) for step in steps.split(",") if step)
        threading.Thread(target=self._end_with_parent, daemon=True, name="supervisor").start()

    def tell(self, **facts: object) -> None:
        """Leave facts with the supervisor, in place of those under the same names (see :class:`Attempt`)."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendall((json.dumps(facts) + "\n").encode())

    def _end_with_parent(self) -> None:
        assert self._socket is not None
        with suppress(OSError):
            if not self._socket.recv(1):
                os.kill(os.getpid(), signal.SIGTERM)  # whoever killed the parent meant the run


supervised = Supervised()


@dataclass
class Attempt:
    """One process of the run, as its supervisor knows it."""

    began: float = field(default_factory=time.monotonic)
    status: int = 0
    mark: str = ""  # mark of the run's processes (:mod:`roll.distributed.guard`)
    reached: int | None = None  # steps done; None: training had not begun
    first: int | None = None  # steps done when training began
    checkpoints: list[list[str]] = field(default_factory=list)  # places of each checkpoint, newest last
    end: str = ""  # one of the reasons above; empty: it was killed
    cause: str = ""

    def take(self, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            if name == "checkpoint":
                if value not in self.checkpoints:
                    self.checkpoints.append(value)
            else:
                setattr(self, name, value)
        if self.first is None:
            self.first = self.reached

    @property
    def reason(self) -> str:
        if self.cause:
            return self.cause
        if self.status < 0:
            return f"the run's process was killed by {signal.Signals(-self.status).name}"
        return f"the run's process ended without a word, exit status {self.status}"

    @property
    def exit_status(self) -> int:
        return 128 - self.status if self.status < 0 else self.status


class Supervisor:
    """Starts a run, and starts it again.

    Args:
        command: returns the command of the run, for the checkpoint to resume from, or None.
        config: the run's: ``max_restarts``, ``restart_backoff``.
        log_dir: folder of the run's logs, where ends and restarts are recorded.
        is_whole: says whether a checkpoint can be continued from.
        say: shows a line to the user.
    """

    def __init__(
        self,
        command: Callable[[str | None], Sequence[str]],
        config: RunConfig,
        log_dir: Path,
        is_whole: Callable[[str], bool],
        say: Callable[[str], None],
    ) -> None:
        self._command, self._config, self._log_dir = command, config, log_dir
        self._is_whole, self._say = is_whole, say
        self._checkpoints: list[list[str]] = []
        self._left_out: set[int] = set()
        self._restarts = 0
        self._in_a_row = 0  # restarts from the present checkpoint
        self._rewinds = 0
        self._rejoin = 0.0
        self._previous: tuple[int | None, str | None] | None = None
        """Step at which the last attempt died, and its newest checkpoint."""
        self._died: float | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None
        self._woken = threading.Event()

    def run(self) -> int:
        """Start the run until it ends well, or for good; its exit status."""
        checkpoint: str | None = None
        with self._signals():
            while True:
                attempt = self._attempt(checkpoint)
                if attempt.end == DONE:  # whatever killed the process afterwards
                    return max(0, attempt.status)
                if self._signal is not None or attempt.end in (INTERRUPTED, WRONG):
                    return attempt.exit_status
                if not attempt.end and attempt.status == 0:  # a further node, whose head is gone: for good, or not
                    if self._restarts >= self._config.max_restarts:
                        return 0
                    self._restarts += 1
                    self._rejoin = _START_SECONDS + min(MOST_WAIT, self._config.restart_backoff * 2**self._restarts)
                    continue
                self._died = time.monotonic()
                self._checkpoints += [places for places in attempt.checkpoints if places not in self._checkpoints]
                newest_first = (place for places in reversed(self._checkpoints) for place in places)
                checkpoint = next(filter(self._is_whole, newest_first), None)
                refusal = self._refusal(attempt, checkpoint)
                facts = {"reached": attempt.reached, "checkpoint": checkpoint, "reason": attempt.reason}
                self._record("ended", **facts, refused=refusal)
                if refusal:
                    self._tell(f"not started again: {refusal}")
                    return attempt.exit_status or 1
                if not self._pause(attempt, checkpoint):
                    return 128 + int(self._signal or 0)

    def _attempt(self, checkpoint: str | None) -> Attempt:
        """Run once, to its end, with nothing left of it."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, SOCKET_ENV: str(theirs.fileno())}
        if self._left_out:
            environment[LEFT_OUT_ENV] = ",".join(map(str, sorted(self._left_out)))
        if self._rejoin:
            environment[REJOIN_ENV] = str(self._rejoin)
        with ours:
            # The supervisor's copy of the run's end is closed at once: while it is open, the end of the run would never
            # be read as the end of the stream.
            with theirs:
                self._child = subprocess.Popen(self._command(checkpoint), env=environment, pass_fds=[theirs.fileno()])
            attempt = Attempt()
            for facts in _messages(ours):
                attempt.take(facts)
                if self._died is not None and attempt.reached != attempt.first:
                    # Training has recovered when the first new step is done.
                    seconds = round(time.monotonic() - self._died, 2)
                    self._record("recovered", steps=attempt.reached, seconds=seconds)
                    self._died = None
            attempt.status = self._child.wait()
        if attempt.mark:
            end_run(attempt.mark, patience=_CLEANUP_SECONDS)
        return attempt

    def _refusal(self, attempt: Attempt, checkpoint: str | None) -> str:
        """Why the run is not started again; empty: it is."""
        where = "before its first step" if attempt.reached is None else f"after {attempt.reached} steps"
        evidence = f"the evidence is in {self._log_dir} (run.log, workers/, {RECORD_NAME})"
        place, self._previous = self._previous, (attempt.reached, checkpoint)
        if place is None or place[1] != checkpoint:
            self._in_a_row = self._rewinds = 0
        if attempt.end == REWIND:
            self._rewinds += 1
            if self._rewinds > MOST_REWINDS:
                return f"rewound {MOST_REWINDS} times to the same checkpoint without a new one; {evidence}"
            return ""
        # Give or take one step: a rank may die in the step ahead of the one that is waited for.
        before, reached = (None if place is None else place[0]), attempt.reached
        is_same_step = before == reached if before is None or reached is None else abs(before - reached) <= 1
        if place is not None and place[1] == checkpoint and is_same_step:
            return f"the run died twice in the same place, {where}, without progress; {evidence}"
        if self._restarts >= self._config.max_restarts:
            return f"max_restarts: {self._config.max_restarts} is used up; {evidence}"
        return ""

    def _pause(self, attempt: Attempt, checkpoint: str | None) -> bool:
        """Wait before the next attempt; False: a signal has ended the wait, and the run."""
        source = f"from {checkpoint}" if checkpoint else "from the beginning (there is no checkpoint)"
        if attempt.end == REWIND:
            assert attempt.reached is not None
            # Sampling is resumed exactly, so the same batch would come again and give the same non-finite number.
            self._left_out.add(attempt.reached)
            self._tell(f"{attempt.reason}\nrewinding: the run goes on {source}, without the batch of that step")
            return self._signal is None
        seconds = min(MOST_WAIT, self._config.restart_backoff * 2**self._in_a_row)
        self._restarts += 1
        self._in_a_row += 1
        number = f"restart {self._restarts} of {self._config.max_restarts}"
        self._tell(f"{number} in {seconds:g} s, {source}: {attempt.reason.partition(chr(10))[0]}")
        self._woken.wait(seconds)
        self._record("restarted", restart=self._restarts, checkpoint=checkpoint, waited=seconds)
        return self._signal is None

    def _record(self, event: str, **facts: object) -> None:
        row = {"time": time.time(), "event": event, **facts}
        with suppress(OSError):  # a full disk ends no run
            self._log_dir.mkdir(parents=True, exist_ok=True)
            with (self._log_dir / RECORD_NAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _tell(self, text: str) -> None:
        self._say(text)
        with suppress(OSError), (self._log_dir / "run.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} WARNING roll.restarts: {text}\n")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass on the signals that end a run, and start nothing after one of them."""
        numbers = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        if threading.current_thread() is not threading.main_thread():
            numbers = []
        before = {number: signal.signal(number, self._pass_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._woken.set()
        if self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError):
                self._child.send_signal(number)


def _messages(link: socket.socket) -> Iterable[Mapping[str, Any]]:
    """Events of the run, until its end; a last message that is cut off is left out."""
    with suppress(ConnectionResetError), link.makefile("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)
