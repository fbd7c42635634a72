"""The process in which mathematical equivalence is decided: requests and verdicts as JSON lines on standard streams.

Run as ``python -m roll.rewards.verifier_child`` by :class:`roll.rewards.verifier.MathVerifier`.  Symbolic algebra on
what a model wrote may take for ever or eat all memory; here it can be interrupted, limited, and at worst killed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import sys
import types
from typing import IO, Any

from roll.rewards.math_size import MAX_BITS, TooLarge, check_spelling, height
from roll.rewards.math_text import is_solved_inequality

MEMORY_LIMIT = 4 * 2**30
"""Bytes of address space."""
ANSWER_SECONDS = 1.0
"""CPU seconds for reading an answer and comparing it, whatever else the machine is doing: right answers take a few
hundredths."""
CPU_GRACE = 5
"""CPU seconds beyond a request's limit after which the kernel ends this process, should nobody be left to do so."""
ANSWER_GRACE = 1
"""The same while an answer is evaluated."""


class RequestTimeout(BaseException):
    """Wall time is over. Not an ``Exception``, so that the algebra packages' own handlers let it through."""


class AnswerTimeout(BaseException):
    """The CPU time of an answer is over."""


def on_alarm(number: int, frame: types.FrameType | None) -> None:
    raise RequestTimeout


def on_cpu_alarm(number: int, frame: types.FrameType | None) -> None:
    raise AnswerTimeout


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a package prints must not be taken for a verdict.
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGPROF, on_cpu_alarm)
    # Ctrl-C is the parent's affair: it closes our input when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It warns at every call that its own time limit is off, as it is meant to be.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Much is loaded at the first comparison: made here, so that no request pays for it out of its own time.
    equivalent("x^2", "x*x", 60.0)
    reply(replies, {"ready": True})
    for line in sys.stdin:
        reply(replies, answer(json.loads(line)))


def reply(stream: IO[str], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    limit_cpu(request["timeout"] + CPU_GRACE)
    try:
        signal.setitimer(signal.ITIMER_REAL, request["timeout"])
        try:
            return {"equal": equivalent(request["gold"], request["answer"], min(request["timeout"], ANSWER_SECONDS))}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except RequestTimeout:
        return {"timeout": True}
    except MemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # any failure of the algebra packages belongs to this sample
        return {"error": f"{type(error).__name__}: {error}"}


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so many further CPU seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def equivalent(gold: str, given: str, cpu_seconds: float) -> bool:
    """Whether math-verify takes the two expressions for the same.

    An answer that would make huge numbers, or on which algebra fails or takes longer than ``cpu_seconds``, is not: to
    leave it unjudged would let a policy escape its score.

    Raises:
        ValueError: the ground truth is no expression that it understands.
    """
    from math_verify import parse

    # Their own limits rely on signals too and swallow the interruption; ours is the one that counts.
    truth = parse(boxed(gold), parsing_timeout=None)
    if not truth:
        raise ValueError(f"ground_truth {gold!r} is not a mathematical expression")
    limit_cpu(cpu_seconds + ANSWER_GRACE)
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            return says_the_same(truth, given)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (AnswerTimeout, MemoryError, RecursionError, TooLarge):
        return False


def says_the_same(truth: list[Any], given: str) -> bool:
    """
    Raises:
        TooLarge: evaluating the answer would make numbers far beyond those of the truth.
    """
    from math_verify import parse, verify

    check_spelling(given)
    answer = parse(boxed(given), parsing_timeout=None)
    limit = max(MAX_BITS, 4 * max(height(form, math.inf) for form in truth))
    for form in answer:
        height(form, limit)
    as_set = is_solved_inequality(given)
    return bool(verify(truth, answer, timeout_seconds=None, allow_set_relation_comp=as_set))


def boxed(expression: str) -> str:
    return f"\\boxed{{{expression}}}"


if __name__ == "__main__":
    main()
