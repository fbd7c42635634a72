"""Programs of agents and verifiers: child processes, which are killed with everything that they have started; and the
black boxes whose program plays environments of the package ``verifiers`` in an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_KEPT_OUTPUT = 64 * 1024  # bytes of each of a program's streams that are kept: the last ones
_TERM_SECONDS = 2.0  # between the request to end and the end
# The variables that a program inherits by default: the others may hold keys of other services.
_INHERITED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "USER", "VIRTUAL_ENV")
_SHOWN = 2000  # characters of output in an error


@dataclass(frozen=True)
class Exit:
    status: int  # exit status, or minus the signal that ended it
    output: str  # the end of its standard output
    errors: str  # the end of its standard error

    def __str__(self) -> str:
        text = (self.errors.strip() or self.output.strip())[-_SHOWN:]
        how = f"exit status {self.status}" if self.status >= 0 else f"signal {-self.status}"
        return f"{how}: {text}" if text else how


class ProgramError(RuntimeError):
    """A program that does not start."""


def program_environment(own: Mapping[str, str], inherit: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a program: a few variables of this process, those named in ``inherit``, and ``own``.

    ``python`` is the interpreter of this process, whether its virtual environment is activated or not.
    """
    kept = {name: os.environ[name] for name in (*_INHERITED, *inherit) if name in os.environ}
    kept["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))
    return kept | dict(own)


def filled_command(command: Sequence[str], fields: Mapping[str, Any]) -> list[str]:
    """``command`` with every ``{name}`` of a field replaced by its value; other braces stay."""

    def value(match: re.Match[str]) -> str:
        found = fields.get(match[1], match[0])
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    return [re.sub(r"\{(\w+)\}", value, word) for word in command]


class Program:
    """A running program; :func:`running` starts and ends it."""

    def __init__(self, process: asyncio.subprocess.Process, stdin: bytes) -> None:
        self._process = process
        streams = (process.stdout, process.stderr)
        self._readers = [asyncio.create_task(_tail(stream)) for stream in streams if stream is not None]
        self._writer = asyncio.create_task(self._write(stdin))

    async def wait(self) -> Exit:
        """Wait for its end, and kill what it has started."""
        status = await self._process.wait()
        self._signal(signal.SIGKILL)
        # Bounded: a process that left the group (setsid) may hold the pipes open for ever.
        await asyncio.wait(self._readers, timeout=_TERM_SECONDS)
        output, errors = (task.result() if task.done() else b"" for task in self._readers)
        return Exit(status, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace"))

    async def end(self) -> None:
        """End it and all that it has started."""
        try:
            if self._process.returncode is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), _TERM_SECONDS)
        finally:
            self._signal(signal.SIGKILL)
            for task in (*self._readers, self._writer):
                task.cancel()
        await self._process.wait()

    def _signal(self, number: int) -> None:
        # The group exists as long as one of its processes does.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _write(self, data: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it does not read
            stdin.write(data)
            await stdin.drain()
        stdin.close()


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str], environment: Mapping[str, str], given: object = None, folder: str | None = None
) -> AsyncIterator[Program]:
    """Run a program in its own process group, and end the group with the block; ``ProgramError`` where it does not
    start. ``given`` is written to its standard input as JSON (None: nothing)."""
    pipe = asyncio.subprocess.PIPE
    stdin = b"" if given is None else json.dumps(given, ensure_ascii=False, default=str).encode()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=dict(environment),
            cwd=folder,
            # A group of its own, so that `killpg` reaches all that it starts, and a Ctrl-C at the terminal does not.
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise ProgramError(f"{command[0]} does not start: {error}") from error
    program = Program(process, stdin)
    try:
        yield program
    finally:
        await program.end()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while piece := await stream.read(_KEPT_OUTPUT):
        kept = (kept + piece)[-_KEPT_OUTPUT:]
    return kept


PREFIX = "verifiers:"
_PROGRAM = Path(__file__).with_name("taskset_program.py")
_EXAMPLE = "make install-verifiers gives env_config.python: .venv-verifiers/bin/python"
_DESCRIBE_SECONDS = 600


class TasksetError(ValueError):
    """A taskset that cannot be played; ``problems`` has keys of the entry and rules."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(map(": ".join, problems)))
        self.problems = problems


def is_taskset(env_type: str | None) -> bool:
    """True for ``verifiers:ID``."""
    return env_type is not None and env_type.startswith(PREFIX)


def taskset_options(env_type: str, env_config: Mapping[str, Any], turns: int) -> dict[str, Any]:
    """``agent_config`` of the black box that plays ``verifiers:ID``. ``env_config``: ``python`` (the interpreter),
    ``select`` (which tasks), and the package's section ``env``; ``turns``: most model calls of an episode."""
    section = dict(env_config)
    python = os.path.expanduser(str(section.pop("python", sys.executable)))
    if os.sep in python:  # a link to an interpreter is a virtual environment: it is not followed
        python = os.path.abspath(python)
    select = section.pop("select", {})
    options = {"id": env_type.removeprefix(PREFIX), "turns": turns, "select": select, "env": section}
    # -P: the program's folder would hide the package.
    return {"command": [python, "-P", str(_PROGRAM), json.dumps(options, default=str)], "processes": 1}


def number_of_tasks(options: Mapping[str, Any]) -> int:
    """The number of tasks of a taskset, by its program, which loads them. ``options``: of the black box. Raises
    ``TasksetError``: no such interpreter, package, taskset or option, or no tasks."""
    variables = program_environment(options.get("env", {}), options.get("inherit_env", ()))
    return _described(tuple(options["command"]), options.get("folder"), tuple(sorted(variables.items())))


@cache
def _described(command: tuple[str, ...], folder: str | None, variables: tuple[tuple[str, str], ...]) -> int:
    python = command[0]
    if shutil.which(python) is None:
        raise TasksetError([("env_config.python", f"there is no program {python}; {_EXAMPLE}")])
    if python == sys.executable and importlib.util.find_spec("verifiers") is None:
        rule = f"is needed: an interpreter with the package verifiers, which {python} has not; {_EXAMPLE}"
        raise TasksetError([("env_config.python", rule)])
    try:
        done = subprocess.run(
            [*command, "--describe"],
            capture_output=True,
            text=True,
            env=dict(variables),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            timeout=_DESCRIBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        rule = f"takes more than {_DESCRIBE_SECONDS} s to load its tasks; select.limit takes fewer"
        raise TasksetError([("env_type", rule)]) from None
    try:
        said = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        raise TasksetError([("env_config.python", f"{python} fails: {done.stderr.strip()[-500:]}")]) from None
    if "problems" in said:
        keys = ((f"env_config.{key}" if key else "env_type", rule) for key, rule in said["problems"])
        raise TasksetError(list(keys))
    return int(said["tasks"])
