"""Runs a source against its cases and counts the ones it passes."""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from roll.rewards.sandbox.candidate import COMPILE_STATUS
from roll.rewards.sandbox.cases import Cases
from roll.rewards.sandbox.client import Sandbox
from roll.rewards.sandbox.protections import Limits
from roll.rewards.sandbox.snippets import CaseError, preparation
from roll.rewards.sandbox.values import equal_output

COMMAND_PROCESSES = 32  # processes at a time of a command: a shell and what it starts


@dataclass(kw_only=True)
class JudgingOptions:
    limits: Limits = field(init=False)  # `wall`: seconds for all cases of a source
    partial: bool = True  # count the share of passed cases; false: all or nothing
    case_timeout: float = 6.0  # seconds for one case; after one that takes longer the rest count as failed
    tolerance: float = 1e-6
    """Relative or absolute difference within which decimal fractions are equal; whole numbers must be exact."""
    command: list[str] = field(default_factory=list)
    """Runs the program, such as ``[node, main.js]``, with input and output as cases; empty: this Python."""
    file_name: str = "solution.py"  # name under which the command finds the program
    object_operators: bool = False
    """Let tests apply operators between an object of the response's own class and a plain value: then the response's
    code sees the value and decides on the result."""


@dataclass(slots=True)
class Outcome:
    total: int
    passed: int = 0
    compile_error: bool = False
    timed_out: bool = False
    note: str = ""  # why the first failed case failed

    @property
    def pass_rate(self) -> float:
        return self.passed / self.total

    def fail(self, note: str) -> None:
        self.note = self.note or note


def judge(sandbox: Sandbox, source: str, cases: Cases, options: JudgingOptions) -> Outcome:
    """Run a source against its cases. Whatever the source does is an outcome, not an error. Raises ``SandboxError``:
    the host could not run it; ``CaseError``: the tests want what the sandbox cannot do."""
    outcome = Outcome(total=cases.count)
    deadline = time.monotonic() + options.limits.wall
    # A lone surrogate has no UTF-8; a source that holds one would not be read anyway.
    data = source.encode("utf-8", "replace")
    if cases.kind == "io":
        _judge_streams(sandbox, data, cases, options, outcome, deadline)
    else:
        _judge_tests(sandbox, data, cases, options, outcome)
    return outcome


@contextmanager
def memory_file(data: bytes = b"") -> Iterator[int]:
    """A file without a name: nothing to find, nothing to clean up, and no reader that a writer could block."""
    descriptor = os.memfd_create("sandbox")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(descriptor: int, limit: int) -> bytes | None:
    """Output of a process; None if it reached the limit."""
    size = os.fstat(descriptor).st_size
    return None if size >= limit else os.pread(descriptor, size, 0)


def _judge_streams(
    sandbox: Sandbox, source: bytes, cases: Cases, options: JudgingOptions, outcome: Outcome, deadline: float
) -> None:
    """Run one process per case. After a timeout the remaining cases count as failed: most likely they would."""
    for given, wanted in cases.streams:
        wall = min(options.case_timeout, deadline - time.monotonic())
        if wall <= 0:
            outcome.timed_out = True
            return outcome.fail("no time left")
        limits, program, more = replace(options.limits, wall=wall), "script", {}
        if options.command:
            program, more = "command", {"command": options.command, "file_name": options.file_name, "proc": True}
            if limits.processes == 1:
                limits = replace(limits, processes=COMMAND_PROCESSES)
        with memory_file(given.encode()) as stdin, memory_file() as stdout, memory_file(source) as program_file:
            descriptors = [stdin, stdout, os_null(), program_file]
            ended = sandbox.spawn(program, descriptors, limits, more).wait()
            printed = read_file(stdout, limits.file_size)
        if ended.timed_out:
            outcome.timed_out = True
            return outcome.fail("the time limit")
        if ended.code == COMPILE_STATUS and not options.command:
            outcome.compile_error = True
            return outcome.fail("no Python")
        if ended.code != 0:
            outcome.fail(f"exit status {ended.code}")
        elif printed is None:
            outcome.fail("too much output")
        elif equal_output(printed.decode("utf-8", "replace"), wanted, options.tolerance):
            outcome.passed += 1
            continue
        else:
            outcome.fail("another output was expected")
        if not options.partial:  # else the share of passed cases counts
            return None
    return None


@functools.cache
def os_null() -> int:
    """One descriptor of ``/dev/null`` for all."""
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _judge_tests(sandbox: Sandbox, source: bytes, cases: Cases, options: JudgingOptions, outcome: Outcome) -> None:
    """Run the tests in one process and the response in another, which never handles a verdict."""
    limits, null = options.limits, os_null()
    more = {"max_message": limits.file_size}
    job: dict[str, Any] = {
        "case_timeout": options.case_timeout,
        "object_operators": options.object_operators,
        "preparation": preparation((cases.setup, *cases.texts)),
    }
    if cases.kind == "calls":
        job |= {"calls": cases.calls, "fn_name": cases.fn_name, "tolerance": options.tolerance}
    elif cases.kind == "pytest":
        job["pytest"] = cases.texts[0]
    else:
        job |= {"tests": cases.texts, "setup": cases.setup}
        job |= {"methods": cases.methods, "entry_point": cases.entry_point}
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        program_file = stack.enter_context(memory_file(source))
        job_file = stack.enter_context(memory_file(json.dumps(job).encode()))
        verdicts = stack.enter_context(memory_file())
        response = sandbox.spawn("serve", [null, null, null, program_file, theirs.fileno()], limits, more)
        stack.callback(response.wait)
        stack.callback(response.kill)  # callbacks run in reverse order: first this one
        harness_limits = replace(limits, processes=1)
        descriptors = [null, null, null, job_file, ours.fileno(), verdicts]
        harness = sandbox.spawn("tests", descriptors, harness_limits, more)
        # Only the two processes hold the channel now: each learns of the other's end.
        theirs.close()
        ours.close()
        ended = harness.wait()
        lines = os.pread(verdicts, os.fstat(verdicts).st_size, 0)
    passed: dict[int, bool] = {}
    impossible = ""
    # A line without an end was cut off by a kill.
    for line in (line for line in lines.splitlines(keepends=True) if line.endswith(b"\n")):
        message = json.loads(line)
        if "case" in message:
            passed[message["case"]] = message["passed"]
            if not message["passed"]:
                outcome.fail(str(message["note"]))
        elif "total" in message:
            outcome.total = max(1, message["total"])
        elif "impossible" in message:
            impossible = str(message["impossible"])
        elif "broken" in message:
            outcome.compile_error = message["broken"] == "compile_error"
            outcome.fail(str(message["note"]))
        else:
            outcome.timed_out = outcome.timed_out or message["timed_out"]
            outcome.fail(str(message["gone"]))
    outcome.passed = sum(passed.values())
    if impossible and outcome.passed < outcome.total:
        raise CaseError(impossible)
    outcome.timed_out = outcome.timed_out or ended.timed_out
    if outcome.passed < outcome.total:
        outcome.fail("the time limit" if ended.timed_out else "the tests did not end")
