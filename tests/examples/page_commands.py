"""Command blocks of the pages, what their marks say, and a way to run them whose processes are forks of a warm one.

A block of ``bash``, ``sh`` or ``console`` has an HTML comment in the line before it:

* ``<!-- run -->``: a test runs it as it stands, in a copy of the repository with the tiny example's untrained model;
* ``<!-- run: shortened KEY=VALUE ... -->``: the same, with these overrides behind every command that starts a run;
* ``<!-- run: exit status N -->``, ``N or M``: the last command ends so (both parts may stand in one comment, after a
  comma; where there are two, commands before it may fail as well);
* ``<!-- not run: REASON -->``: one of ``REASONS``, or the test file that runs what it shows.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.examples.pages import ROOT

REASONS = (
    "a GPU",
    "a cluster",
    "Docker",
    "the network",
    "installs packages",
    "another project's launcher",
    "placeholders",
    "runs until interrupted",
    "trains for minutes",
    "tries the host for minutes",
)
BLOCK = re.compile(r"^(?P<before>[^\n]*)\n(?P<indent> *)```(?:bash|sh|shell|console)\n(?P<text>.*?)^ *```", re.S | re.M)
MARK = re.compile(r"^ *<!-- (run|not run)(?:: (.*?))? -->$")
STATUS = re.compile(r"exit status (\d+)(?: or (\d+))?")


@dataclass(frozen=True)
class Block:
    """A block of commands.

    Attributes:
        runs: None: it has no mark, or one that means nothing.
        reason: why it is not run.
        overrides: behind commands that start runs.
        statuses: the exit statuses that the last command may have.
    """

    page: Path
    line: int
    text: str
    runs: bool | None = None
    reason: str = ""
    overrides: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (0,)

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def command_blocks(page: Path) -> list[Block]:
    """Those of a page, in order."""
    text = "\n" + page.read_text(encoding="utf-8")
    return [_block(page, text.count("\n", 0, m.start("text")), m) for m in BLOCK.finditer(text)]


def _block(page: Path, line: int, match: re.Match[str]) -> Block:
    text = "\n".join(row.removeprefix(match["indent"]) for row in match["text"].splitlines())
    mark = MARK.match(match["before"])
    if mark is None:
        return Block(page, line, text)
    words = mark[2] or ""
    if mark[1] == "not run":
        known = words in REASONS or (words.startswith("tests/") and (ROOT / words).is_file())
        return Block(page, line, text, False if known else None, words)
    overrides: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (0,)
    for part in words.split(", ") if words else []:
        if part.startswith("shortened "):
            overrides = tuple(part.split()[1:])
        elif found := STATUS.fullmatch(part):
            statuses = tuple(int(number) for number in found.groups() if number)
        else:
            return Block(page, line, text)
    return Block(page, line, text, True, "", overrides, statuses)


SHIM = """#!{python} -SE
import json, os, socket, struct, sys
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
request = json.dumps([{name!r}, sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(link, [struct.pack("!I", len(request))], [0, 1, 2])
link.sendall(request)
answer = link.recv(1)
sys.exit(answer[0] if answer else 99)
"""
IMPORTED = (
    "torch",
    "torch.distributed.fsdp",
    "transformers",
    "ray",
    "roll.cli",
    "roll.report.page",
    "roll.preflight",
)
EXTRA = "PAGE_OVERRIDES"
STARTS = re.compile(r"examples/start_\w+\.py$")


@contextmanager
def warm_programs(folder: Path) -> Iterator[Path]:
    """A folder for PATH with ``roll`` and ``python``, which run as forks of a process that has imported what they need.

    Of a shell, only these two are replaced.  A command that has succeeded in the same folder is not run again.
    """
    path, programs = folder / "socket", folder / "bin"
    programs.mkdir()
    for name in ("roll", "python"):
        program = programs / name
        program.write_text(SHIM.format(python=sys.executable, path=str(path), name=name), encoding="utf-8")
        program.chmod(0o755)
    server = subprocess.Popen([sys.executable, "-m", __spec__.name, str(path)], stdin=subprocess.PIPE, cwd=ROOT)
    try:
        while not path.exists():
            assert server.poll() is None
        yield programs
    finally:
        server.kill()
        server.wait()


def serve(path: Path) -> None:
    """Fork a process for every connection, and answer with its exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(16)
        for name in IMPORTED:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        done: set[str] = set()
        while True:
            link, _ = server.accept()
            header, streams, _, _ = socket.recv_fds(link, 4, 3)
            with link.makefile("rb") as file:
                request = file.read(struct.unpack("!I", header)[0])
            name, arguments, environment, folder = json.loads(request)
            extra = environment.pop(EXTRA, "").split()
            if (name == "roll" and arguments[:1] == ["run"]) or (arguments and STARTS.search(arguments[0])):
                arguments += extra
            key = json.dumps([name, arguments, folder])
            child = os.fork() if key not in done else None
            if child == 0:
                server.close()
                _become(name, arguments, environment, folder, streams)
            for stream in streams:  # whoever reads them waits until nobody has them
                os.close(stream)
            if child is None:
                link.sendall(b"\0")
                link.close()
                continue
            threading.Thread(target=_wait, args=(child, link, key, done), daemon=True).start()


def _wait(child: int, link: socket.socket, key: str, done: set[str]) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        done.add(key)
    link.sendall(bytes([status % 256]))
    link.close()


def _become(name: str, arguments: list[str], environment: dict[str, str], folder: str, streams: list[int]) -> None:
    """The program ``roll`` or ``python``, to its end."""
    status = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(name, arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(name: str, arguments: list[str]) -> None:
    if name == "roll":
        from roll.cli import main

        sys.argv = ["roll", *arguments]
        sys.exit(main(arguments))
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  what python -c does
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
