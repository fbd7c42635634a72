"""A persistent helper process that decides mathematical equivalence, with a hard limit on its time."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds that the process may take to start; loading the algebra packages takes about one."""
KILL_GRACE = 1.0
"""Seconds beyond the limit before a process that does not interrupt itself is killed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Exactly one of ``equal`` and ``error`` is set."""

    equal: bool | None = None
    error: str | None = None


class MathVerifier:
    """One helper process, started at first use and again when it had to be killed.

    Calls may come from any thread; they are answered one after the other.  The limit works off the main thread, where
    signals do not.
    """

    def __init__(self, timeout: float) -> None:
        """
        Args:
            timeout: seconds of wall time for one comparison.
        """
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def equivalent(self, gold: str, answer: str) -> Verdict:
        """Whether ``answer`` says the same as ``gold``. An error is a timeout of wall time, a crash, or an unreadable
        ``gold``; an answer on which the process spends all of its CPU time does not say the same."""
        verdict, cpu_is_spent = self._ask(gold, answer)
        if cpu_is_spent and self._ask(gold, gold)[0].equal:
            return Verdict(equal=False)
        return verdict

    def _ask(self, gold: str, answer: str) -> tuple[Verdict, bool]:
        """The verdict, and whether the kernel ended the process for the CPU time that it used."""
        request = json.dumps({"gold": gold, "answer": answer, "timeout": self._timeout}) + "\n"
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                process.stdin.write(request.encode())
                process.stdin.flush()
                line = self._read_line(process, self._timeout + KILL_GRACE)
            except (BrokenPipeError, EOFError):
                status = self._stop()
                return Verdict(error="the verifier process died"), status == -signal.SIGXCPU
            except TimeoutError:
                self._stop()
                return Verdict(error=f"timeout: no verdict within {self._timeout:g} s"), False
        reply = json.loads(line)
        if "equal" in reply:
            return Verdict(equal=reply["equal"]), False
        if reply.get("timeout"):
            return Verdict(error=f"timeout: no verdict within {self._timeout:g} s"), False
        return Verdict(error=reply["error"]), False

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "roll.rewards.verifier_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        weakref.finalize(self, end_process, self._process)
        self._read_line(self._process, START_TIMEOUT)
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], timeout: float) -> bytes:
        """The next line.

        Raises:
            TimeoutError: none within ``timeout`` seconds.
            EOFError: the process has ended.
        """
        assert process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                raise EOFError
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _stop(self) -> int | None:
        """End the process; its exit status, negative for a signal."""
        process, self._process, self._received = self._process, None, b""
        if process is None:
            return None
        end_process(process)
        return process.returncode

    def close(self) -> None:
        """End the helper process."""
        with self._lock:
            self._stop()


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                logger.debug("the verifier process had gone before its last request was written")
