"""The signals that end a run: the first one in good order, the second at once.

Signals belong to the process, so there is one :data:`ending` for all of it. Python runs handlers in the main thread
only; where that thread is inside a library that does not return, a second signal is still obeyed, by another thread.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_WAKE = signal.SIGALRM  # brings an exception into the main thread (:meth:`EndingSignals.raise_in_main`)

SAME_SECONDS = 0.5
"""``timeout``, ``make`` and terminals send a signal to a process and to its group: what comes again so soon is the
same request."""


class Interrupted(SystemExit):
    """A signal ended the run; the exit status is 128 plus the signal's number, as in a shell."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"ended by {self.signal.name}"


class EndingSignals:
    """The process's reaction to SIGINT, SIGTERM, SIGHUP and SIGUSR1 within :meth:`handled`.

    Where the work may be abandoned the first signal raises :class:`Interrupted`; within :meth:`holding` it is only
    noted (:attr:`received`). The second one ends the process at once, without any cleanup.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_installed = False  # handlers are in place: not where the work is in another thread than the main one
        self._held = 0
        self._pending: BaseException | None = None
        self._first: float | None = None
        self._uncounted = 0
        """Signals sent by :meth:`take_over` that are still to be seen; none of them counts as a first one."""
        self._ignored: set[signal.Signals] = set()
        """Ignored since the process was started: by ``nohup``, or by a shell that started it in the background."""
        self._raised: BaseException | None = None
        self.received: signal.Signals | None = None  # the first signal
        self.on_first: Callable[[signal.Signals], None] | None = None
        """Called with the first signal, in the main thread, before anything is raised."""
        self.on_second: Callable[[str], None] | None = None  # called with the reason for which the process ends at once

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Obey the signals for the length of the block; nothing in other threads than the main one, or in a block that
        is inside another one."""
        if not self._depth:
            self.received = self._first = self._pending = self._raised = self.on_first = self.on_second = None
            self._held, self._uncounted = 0, 0
        if self._depth or threading.current_thread() is not threading.main_thread():
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        self._depth, self._is_installed = 1, True
        before = {number: signal.getsignal(number) for number in (*ENDING, _WAKE)}
        self._ignored = {number for number in ENDING if before[number] is signal.SIG_IGN}
        reader, writer = socket.socketpair()
        # Required by set_wakeup_fd(): a handler must never block on a full buffer.
        writer.setblocking(False)
        fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="ending signals", daemon=True).start()
        self.install()
        try:
            yield
        finally:
            self._depth, self._is_installed = 0, False
            signal.set_wakeup_fd(fd_before)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            # Its end is the end of _listen(), which reads from the other side.
            writer.close()

    def install(self) -> None:
        """Install the handlers, also over those that a library has installed meanwhile."""
        if not self._is_installed or threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN if number in self._ignored else self._handle)
        signal.signal(_WAKE, self._raise_pending)

    @contextmanager
    def holding(self, then_raise: bool = True) -> Iterator[None]:
        """The block is not to be torn apart: a first signal is only noted, and raised at the block's end."""
        self._held += 1
        try:
            yield
        finally:
            self._held = max(0, self._held - 1)
        if then_raise and not self._held:
            self.check()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within :meth:`holding`: the block may be abandoned at any point."""
        held, self._held = self._held, 0
        try:
            self.check()
            yield
        finally:
            self._held = held

    def release(self) -> None:
        """Forget blocks that an exception has left without their ends."""
        self._held = 0

    def check(self) -> None:
        """
        Raises:
            Interrupted: a signal has come.
        """
        if self.received is not None:
            raise Interrupted(self.received)

    def raise_in_main(self, error: BaseException) -> None:
        """Raise a ``SystemExit`` that means ``error`` (:meth:`meant`) in the main thread, as soon as that runs Python
        code; from whatever thread."""
        self._pending = error
        if self._is_installed:
            signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)

    def take_over(self, number: int) -> None:
        """React as to a signal of this process, from another thread, unless one has come already: another node of the
        run has got it. One that comes to this process later is still the first."""
        if self.received is None:
            # The listening thread sees this signal too: without the count a real first Ctrl-C would be taken for the
            # second.
            self._uncounted += 1
            os.kill(os.getpid(), number)

    def meant(self, error: BaseException) -> BaseException:
        """The exception of a handler, where a library interrupted by it raises an error of its own: Ray's calls end
        in a ``KeyboardInterrupt`` or ``SystemExit`` whatever the handler raises."""
        foreign = isinstance(error, KeyboardInterrupt | SystemExit) and not isinstance(error, Interrupted)
        return self._raised if foreign and self._raised is not None else error

    def forget_pending(self) -> None:
        """Raise nothing any more that :meth:`raise_in_main` was given."""
        self._pending = None

    def _raise_pending(self, number: int, frame: FrameType | None) -> None:
        error, self._pending = self._pending, None
        if error is not None:
            self._raised = error
            # Of all exceptions this is the one that Ray's calls let through; meant() has the other.
            raise SystemExit(1) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            return  # the second one is the listening thread's
        self.received = signal.Signals(number)
        if self.on_first is not None:
            self.on_first(self.received)
        if not self._held:
            self._raised = Interrupted(number)
            raise self._raised

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(16):
                for number in numbers:
                    if number in ENDING:
                        self._seen(number)

    def _seen(self, number: int) -> None:
        now = time.monotonic()
        if self._uncounted:
            self._uncounted -= 1
        elif self._first is None:
            self._first = now
        elif now - self._first > SAME_SECONDS:
            if self.on_second is not None:
                self.on_second(f"{signal.Signals(number).name} again: ended at once")
            # Not sys.exit(): the main thread may be inside a library that never returns, and cleanup is the guard's.
            os._exit(128 + number)


ending = EndingSignals()
