"""The page of the command line, from the help of every command: ``python docs/site/commands.py > docs/commands.md``."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator

WIDTH = "100"
HEAD = """# Command line

Every command and its help, as `roll COMMAND --help` shows it. Arguments and options that mean the same as those of an
earlier command are only in the first lines. `python docs/site/commands.py > docs/commands.md` writes this page.
"""
OPTION = re.compile(r"^  (?:-|config |key=value ).*\n(?:   .*\n)*", re.M)
"""An option of a help with its explanation, which may go on in further lines."""


def page() -> str:
    """The page as Markdown."""
    sections, known = [], dict[tuple[str, ...], set[str]]()
    for words, text in commands(()):
        shown = without(text, known.setdefault(words[:-1], set()))
        sections.append(f"## roll {' '.join(words)}".rstrip() + f"\n\n```text\n{shown}\n```")
    return HEAD + "\n" + "\n\n".join(sections) + "\n"


def without(text: str, known: set[str]) -> str:
    """A help without the options that are ``known`` from a sibling, and without the one that asks for help."""
    for option in OPTION.findall(text + "\n"):
        entry = " ".join(option.split())
        if entry in known or entry.startswith("-h, --help"):
            text = (text + "\n").replace(option, "").rstrip()
        known.add(entry)
    usage, gap, rest = re.sub(r"\n\n(?:options|positional arguments):(?=\n\n|$)", "", text).partition("\n\n")
    listed = set(re.findall(r"^  (--[\w-]+)", rest, re.M))
    # What is explained below need not be named above.
    usage = usage.replace("[-h]", "[options]" if listed else "")
    usage = re.sub(r"\[(--[\w-]+)\b(?:[^\[\]]|\[[^\]]*\])*\]", lambda m: "" if m[1] in listed else m[0], usage)
    return (
        textwrap.fill(" ".join(usage.split()), int(WIDTH), subsequent_indent=" " * 7, break_on_hyphens=False)
        + gap
        + rest
    )


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
