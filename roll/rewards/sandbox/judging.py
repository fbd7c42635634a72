"""Runs a source against the test cases of a data row, and counts the ones it passes.

Cases are read in the formats of common data sets:

=====================  ==================================================================================
shape                  columns (or keys of a JSON ``ground_truth`` or ``test_cases``)
=====================  ==================================================================================
asserts                a list of texts; ``test_list`` with ``test_setup_code`` or ``test_imports``;
                       ``[{"assert_code": ...}]``; what they define and do not call is called: functions ``test...``,
                       classes of unittest, ``check(candidate)`` with ``entry_point``
check function         ``test`` and ``entry_point``: the test defines ``check(candidate)``
input and output       ``{"inputs": [...], "outputs": [...]}``; ``[{"input" or "stdin": ..., "output" or
                       "expected_stdout": ...}]``
calls                  the same with ``fn_name``; inputs are lists of arguments, or texts with one JSON value per line
pytest                 ``{"pytest": text}``; ``case_type: pytest`` with ``[{"assert_code": text}]``
=====================  ==================================================================================
"""

from __future__ import annotations

import ast
import functools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from roll.rewards.base import read_json
from roll.rewards.sandbox.candidate import COMPILE_STATUS
from roll.rewards.sandbox.client import Sandbox
from roll.rewards.sandbox.protections import Limits
from roll.rewards.sandbox.snippets import CaseError, Method, check_pytest_file, preparation, prepared
from roll.rewards.sandbox.values import equal_output

Kind = Literal["io", "calls", "tests", "pytest"]
_INPUT_KEYS, _OUTPUT_KEYS = ("stdin", "input"), ("expected_stdout", "output", "stdout")
_SETUP_KEYS = ("test_setup_code", "test_imports", "setup")


@dataclass(frozen=True, slots=True)
class Cases:
    kind: Kind
    texts: list[str] = field(default_factory=list)  # `tests`: one source per case. `pytest`: the text of the file.
    setup: str = ""
    entry_point: str = ""  # argument of a test's `check(candidate)`
    streams: list[tuple[str, str]] = field(default_factory=list)  # `io`: input and expected output of each case
    fn_name: str = ""
    calls: list[dict[str, list[Any]]] = field(default_factory=list)
    """``arguments``, and ``accepted``: each of these results is right; a data set's notation may be ambiguous."""
    methods: list[Method | None] = field(default_factory=list)
    """``tests``: for each source the method of unittest's that runs after it."""

    @property
    def count(self) -> int:
        """Number of cases; 1 for a pytest file, whose tests are known only when it runs."""
        return len(self.streams or self.calls or self.texts)


def read_cases(ground_truth: object, row: Mapping[str, Any]) -> Cases:
    """The cases of a row: its column ``test_cases``, else ``ground_truth``, else its columns themselves.

    What tests only define is called. Raises ``CaseError``: there are none, they have no known shape, test nothing, or
    cannot work.
    """
    given = row.get("test_cases") or ground_truth
    source = read_json(given) if given else row
    if given and not isinstance(source, (Mapping, list)):
        source = [source]
    try:
        cases = _read(source, {**row, **source} if isinstance(source, Mapping) else dict(row))
    except CaseError:
        raise
    except (KeyError, TypeError, ValueError, SyntaxError, AttributeError) as error:
        raise CaseError(f"test cases of an unknown shape: {type(error).__name__}: {error}") from error
    if not cases.count:
        raise CaseError("the row has no test cases")
    if cases.kind == "pytest":
        check_pytest_file(cases.texts[0])
    if cases.kind != "tests":
        return cases
    tests = prepared(tuple(cases.texts), cases.setup, cases.entry_point)
    if isinstance(tests, str):
        return Cases("pytest", [tests], entry_point=cases.entry_point)
    return replace(cases, texts=[text for text, _ in tests], methods=[method for _, method in tests])


def _read(source: object, columns: Mapping[str, Any]) -> Cases:
    if not isinstance(source, list):
        if "pytest" in columns:
            return Cases("pytest", [str(columns["pytest"])])
        if "inputs" in columns:
            pairs = zip(read_json(columns["inputs"]), read_json(columns["outputs"]), strict=True)
            return _from_pairs(list(pairs), columns, True)
        if "test_list" in columns:
            return tests_of(list(map(str, read_json(columns["test_list"]))), columns)
        if "test" in columns:
            return tests_of([str(columns["test"])], columns)
        known = "test_cases, ground_truth, test_list, test and entry_point, inputs and outputs, pytest"
        raise CaseError(f"the row has none of: {known}")
    if all(isinstance(item, str) for item in source):
        sources = list(source)
    elif all(isinstance(item, Mapping) and "assert_code" in item for item in source):
        sources = [str(item["assert_code"]) for item in source]
    else:
        name = fn_name_of(columns) or next((fn_name_of(item) for item in source if fn_name_of(item)), "")
        pairs_of = [(first(item, _INPUT_KEYS), first(item, _OUTPUT_KEYS)) for item in source]
        return _from_pairs(pairs_of, {**columns, "fn_name": name}, False)
    if columns.get("case_type") == "pytest":
        return Cases("pytest", ["\n\n".join(sources)])
    named = next((item["entry_point"] for item in source if isinstance(item, Mapping) and item.get("entry_point")), "")
    return tests_of(sources, {"entry_point": named, **columns})


def tests_of(sources: list[str], columns: Mapping[str, Any]) -> Cases:
    entry_point = str(columns.get("entry_point") or fn_name_of(columns))
    parts = [columns.get(key) for key in _SETUP_KEYS]
    setup = "\n".join("\n".join(part) if isinstance(part, list) else str(part) for part in parts if part)
    return Cases("tests", sources, setup, entry_point)


def _from_pairs(pairs: Sequence[tuple[Any, Any]], columns: Mapping[str, Any], wrapped: bool) -> Cases:
    """Cases of pairs: input and output, or with ``fn_name`` the arguments of a call (a list, or a text with one JSON
    value per line) and its result (or a text that holds it as JSON). ``wrapped``: a list of one element may also mean
    that element, as in TACO and APPS."""
    name, calls = fn_name_of(columns), []
    if not name:
        # A list of lines is joined.
        texts = [["\n".join(map(str, one)) if isinstance(one, list) else str(one) for one in pair] for pair in pairs]
        return Cases("io", streams=[(given, wanted) for given, wanted in texts])
    for given, wanted in pairs:
        arguments = [literal(line) for line in given.strip().splitlines()] if isinstance(given, str) else list(given)
        expected = literal(wanted) if isinstance(given, str) and isinstance(wanted, str) else wanted
        inside = expected if wrapped and isinstance(expected, list) and len(expected) == 1 else []
        calls.append({"arguments": arguments, "accepted": [expected, *inside]})
    return Cases("calls", fn_name=name, calls=calls)


def literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


def fn_name_of(columns: Mapping[str, Any]) -> str:
    metadata = read_json(columns.get("metadata"))
    inner = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return str(columns.get("fn_name") or columns.get("func_name") or inner or "")


def first(item: Mapping[str, Any], keys: Sequence[str]) -> Any:
    for key in keys:
        if key in item:
            return item[key]
    raise KeyError(f"a case needs {' or '.join(keys)}")


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
