"""What a confined process runs: a script, a server of calls, the tests beside it, or a command."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from roll.rewards.sandbox import candidate, harness
from roll.rewards.sandbox.channel import Channel

COMPILE_STATUS = 121
"""Exit status of a script that is no Python. Anything else may exit with it too: it feeds a metric, no verdict."""
SOURCE, CHANNEL, VERDICTS = 3, 4, 5
"""Descriptors beyond the standard ones."""
MAX_SOURCE = 4 * 2**20
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The order of sets of texts would differ from run to run, and a reward with it.
    "PYTHONHASHSEED": "0",
}
"""All that a sandboxed process knows of its surroundings."""


def forget_surroundings() -> None:
    """Environment, arguments and search path as a program on its own would find them."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv = ["solution.py"]
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != own]
    sys.dont_write_bytecode = True
    atexit._clear()


def forget_own_modules() -> None:
    """This package is not on a program's path, so it should not be among its modules either."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "roll"]:
        del sys.modules[name]


def settle_in(folder: str) -> None:
    """Temporary files and settings belong into the private folder, wherever it is."""
    tempfile.tempdir = folder
    os.environ.update(TMPDIR=folder, HOME=folder)


def read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read(MAX_SOURCE)


def open_streams() -> None:
    """Streams on the descriptors of this process; those of the parent would carry its state."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  they live as long as we do
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def run_script(request: dict[str, Any]) -> None:
    """The source as ``__main__``, like ``python solution.py``."""
    source = read_all(SOURCE)
    open_streams()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    status = 0
    try:
        code = compile(source, "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(COMPILE_STATUS)
    try:
        exec(code, main.__dict__)  # noqa: S102  this process exists to run it
    except SystemExit as leaving:
        status = exit_status(leaving)
    except BaseException:  # whatever a program ends with, Python prints it and goes on to its exit
        traceback.print_exc()
        status = 1
    finish(status)


def exit_status(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def finish(status: int) -> None:
    """Leave as Python does: threads first, then exit functions, then the buffers."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def serve_calls(request: dict[str, Any]) -> None:
    """The source as the module ``solution``, whose functions another process calls."""
    source = read_all(SOURCE)
    open_streams()
    candidate.serve(Channel(CHANNEL, request["max_message"]), source)
    os._exit(0)


def run_tests(request: dict[str, Any]) -> None:
    """Tests on the trusted side of the channel; verdicts leave through a pipe that the response's process lacks."""
    job = read_all(SOURCE)
    open_streams()
    harness.run(job, Channel(CHANNEL, request["max_message"]), VERDICTS)
    os._exit(0)


def run_command(request: dict[str, Any]) -> None:
    """The source as a file of the working folder, and a command that knows what to do with it."""
    with open(request["file_name"], "wb") as file:
        file.write(read_all(SOURCE))
    # Python ignores these, and a program executed from here would too.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    command = request["command"]
    os.execvpe(command[0], command, dict(os.environ))


PROGRAMS: dict[str, Callable[[dict[str, Any]], None]] = {
    "script": run_script,
    "serve": serve_calls,
    "tests": run_tests,
    "command": run_command,
}
