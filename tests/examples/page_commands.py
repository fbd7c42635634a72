"""Command blocks of the pages, what their marks say, and the programs that run them.

A block of ``bash``, ``sh`` or ``console`` has an HTML comment in the line before it:

* ``<!-- run -->``: a test runs it as it stands, in a copy of the repository with the tiny example's untrained model;
* ``<!-- run: shortened KEY=VALUE ... -->``: the same, with these overrides behind every command that starts a run;
* ``<!-- run: exit status N -->``, ``N or M``: the last command ends so (both parts may stand in one comment, after a
  comma; where there are two, commands before it may fail as well);
* ``<!-- not run: REASON -->``: one of ``REASONS``, or the test file that runs what it shows.
"""

from __future__ import annotations

import re
import sys
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


EXTRA = "PAGE_OVERRIDES"
PROGRAM = """#!/bin/sh
call=$(printf '%s\\n' "$PWD" {name} "$@" ${extra} | cksum)
grep -qsxF "$call" {folder}/succeeded && exit 0
case "{name} $1" in
    "roll run" | "python examples/start_"* | "python "*/examples/start_*) {program} "$@" ${extra} ;;
    *) {program} "$@" ;;
esac || exit $?
echo "$call" >> {folder}/succeeded
"""


def write_programs(folder: Path) -> Path:
    """A folder for PATH with ``roll`` and ``python``, which append what ``EXTRA`` says to commands that start a run.

    A command that has succeeded in the same folder is not run again.
    """
    programs = folder / "bin"
    programs.mkdir()
    for name, program in (("roll", f"{sys.executable} -m roll.cli"), ("python", sys.executable)):
        text = PROGRAM.format(name=name, program=program, folder=folder, extra=EXTRA)
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    return programs
