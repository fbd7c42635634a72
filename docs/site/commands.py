"""The page of the command line, from the help of every command: ``python docs/site/commands.py > docs/commands.md``."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator

WIDTH = "100"
HEAD = """# Command line

Every command and its help, as `roll COMMAND --help` shows it. `python docs/site/commands.py > docs/commands.md` writes
this page.
"""


def page() -> str:
    """The page as Markdown."""
    sections = [f"## roll {' '.join(words)}".rstrip() + f"\n\n```text\n{text}\n```" for words, text in commands(())]
    return HEAD + "\n" + "\n\n".join(sections) + "\n"


def commands(words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """A command's words and its help, then those of its subcommands."""
    text = help_of(words)
    yield words, text
    choices = re.search(r"\{([\w,-]+)\}\s+\.\.\.", text)
    names = choices[1].split(",") if choices else () if words else re.findall(r"^  ([a-z][a-z-]*)  ", text, re.M)
    for name in names:
        if name != "plan":
            yield from commands((*words, name))


def help_of(words: tuple[str, ...]) -> str:
    """Output of ``roll WORDS --help`` in a terminal of 100 columns."""
    from roll import cli

    os.environ["COLUMNS"] = WIDTH
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return shown.getvalue().rstrip()


if __name__ == "__main__":
    sys.stdout.write(page())
