"""A user's own reward: a function ``(prompt, response, ground_truth, **row) -> float | dict``, or of a batch, plain or
a coroutine, under a time limit."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
import time
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from roll.config.reading.errors import did_you_mean
from roll.rewards.base import RewardFunction, RewardOptionError, RewardResult, RewardSample, failure, finite_number

logger = logging.getLogger(__name__)

BATCH_ARGUMENT = "samples"  # a function with an argument of this name is given a whole batch
CLOSING_SECONDS = 5.0  # wait for the event loop's thread, which a coroutine that blocks it would keep for ever

T = TypeVar("T")


class CustomReward(RewardFunction):
    """Calls the function once a sample, with the arguments that it names, or once a batch.

    Its arguments may be ``prompt``, ``response``, ``ground_truth``, ``finish_reason``, any column of the row, and the
    options of ``reward_kwargs`` (which take precedence over a column of the same name); with ``**row`` it gets
    everything.  It returns the score, or a dict with ``score`` and further numbers, which become metrics.  A function
    that names ``samples`` gets the batch as :class:`RewardSample`s, with its options, and returns a result for each.
    ``async`` functions run concurrently in an event loop.  An exception is logged with its traceback the first time and
    becomes the error of the sample (of all samples of a batch), and so does a call that takes too long. Raises
    ``RewardOptionError``: an option that the function does not take.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], options: Mapping[str, Any], limits: Limits | None = None
    ) -> None:
        parameters = inspect.signature(function).parameters
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._names = {n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        self._is_batched = BATCH_ARGUMENT in self._names
        unknown = [option for option in options if option not in self._names and not self._takes_all]
        if unknown:
            hint = did_you_mean(unknown[0], self._names)
            raise RewardOptionError(
                f"reward {name}: the function takes no argument {unknown[0]!r}; {hint}it takes {sorted(self._names)}"
            )
        self._name = name
        self._function = function
        self._options = dict(options)
        self._limits = limits or Limits()
        # It stays the same from batch to batch: clients that a user's code opens on it keep their connections.
        self._loop = LoopThread("reward-coroutines") if inspect.iscoroutinefunction(function) else None
        if self._loop is not None:
            weakref.finalize(self, self._loop.close)
        self._has_failed = False

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        if not self._is_batched:
            calls = []
            for sample in samples:
                offered = {"finish_reason": sample.finish_reason, **sample.row, **self._options}
                offered.update(prompt=sample.prompt, response=sample.response, ground_truth=sample.ground_truth)
                named = offered if self._takes_all else {n: offered[n] for n in self._names if n in offered}
                calls.append(partial(self._function, **named))
            return [self._result(outcome) for outcome in self._outcomes(calls, self._limits.timeout)]
        limit = self._limits.timeout and self._limits.timeout * len(samples)
        (outcome,) = self._outcomes([partial(self._function, samples=list(samples), **self._options)], limit)
        if isinstance(outcome, BaseException):
            return [self._result(outcome)] * len(samples)
        scores = list(outcome) if isinstance(outcome, Sequence) or hasattr(outcome, "tolist") else None
        if scores is None or len(scores) != len(samples):
            found = f"{len(scores)} results" if scores is not None else type(outcome).__name__
            error = f"{self._name}: returned {found} for a batch of {len(samples)}; it must return a list of as many"
            return [failure(error)] * len(samples)
        return [self._result(score) for score in scores]

    def _outcomes(self, calls: Sequence[Callable[[], Any]], limit: float | None) -> list[Any]:
        if self._loop is not None:

            async def all_of_them() -> list[Any]:
                free = asyncio.Semaphore(self._limits.concurrency)

                async def one(make: Callable[[], Awaitable[Any]]) -> Any:
                    async with free, asyncio.timeout(limit):
                        return await make()

                return await asyncio.gather(*map(one, calls), return_exceptions=True)

            return self._loop.run(all_of_them())
        outcomes: list[Any] = []
        for call in calls:
            try:
                with deadline(limit):
                    outcome = call()
            except (Exception, Overdue) as error:  # what a user's code raises belongs to this sample, not to the run
                outcome = error
            outcomes.append(outcome)
        return outcomes

    def _result(self, outcome: Any) -> RewardResult:
        if isinstance(outcome, Overdue | TimeoutError):
            return failure(f"{self._name}: timeout: {str(outcome) or 'the call took too long'}")
        if isinstance(outcome, BaseException):
            if not self._has_failed:
                message = "reward %s failed; later failures are counted without a traceback"
                logger.error(message, self._name, exc_info=outcome)
                self._has_failed = True
            return failure(f"{self._name}: {type(outcome).__name__}: {outcome}")
        metrics = dict(outcome) if isinstance(outcome, Mapping) else {"score": outcome}
        if "score" not in metrics:
            return failure(f"{self._name}: the returned dict has no 'score', only {sorted(metrics)}")
        try:
            numbers = {key: float(value) for key, value in metrics.items()}
        except (TypeError, ValueError) as error:
            return failure(f"{self._name}: must return numbers, returned {outcome!r}: {error}")
        score = numbers.pop("score")
        if finite_number(score) is None:
            return failure(f"{self._name}: returned the score {score}; it must be finite in float32")
        return RewardResult(score, numbers)

    def close(self) -> None:
        """End the event loop of an ``async`` function."""
        if self._loop is not None:
            self._loop.close()


@dataclass(frozen=True, slots=True)
class Limits:
    timeout: float | None = None  # seconds for one sample; None: no limit
    concurrency: int = 32  # samples in flight at a time, where scoring them means waiting


class Overdue(BaseException):
    """The time is up. Not an ``Exception``, so that the code's own handlers let it through."""


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise :class:`Overdue` in the block after ``seconds`` of wall time.

    In the main thread, where a reward worker calls its reward, the block is interrupted (a signal: also out of a sleep
    or a socket).  In other threads, where Python delivers no signals, and in C code that never returns to the
    interpreter, the limit only shows once the block has ended.  ``SIGALRM`` is used; a block that sets an alarm of its
    own ends this one.
    """
    if seconds is None:
        yield
        return
    began = time.monotonic()
    interrupts = threading.current_thread() is threading.main_thread()

    def end(number: int, frame: types.FrameType | None) -> None:
        raise Overdue

    if interrupts:
        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if interrupts:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    if time.monotonic() - began > seconds:
        raise Overdue


@dataclass(eq=False)
class LoopThread:
    """An event loop in a thread of its own, started by the first coroutine; any number of threads may run coroutines on
    it concurrently."""

    name: str
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine, from any thread but the loop's own."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon: a reward that nobody closed does not keep its process alive.
                self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
                self._thread.start()
            # Under the lock: if close() stopped the loop in between, the caller would wait for ever.
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    def close(self) -> None:
        """End the thread; a later :meth:`run` would start another."""
        with self._lock:
            if self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSING_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()
            self._loop = self._thread = None
