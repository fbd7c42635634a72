"""``roll translate``: keys, commands and scripts of verl, SkyRL, TRL and OpenRLHF as this project's configuration."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from roll.config.loader import load_config
from roll.config.reading.errors import ConfigError, Problem
from roll.pipelines.rlvr.config import RLVRConfig
from roll.translation.engine import DIALECTS, Translation, dialect_of, translate
from roll.translation.reading import Source, read_recording, read_text, read_words, read_yaml
from roll.translation.recording import record
from roll.translation.shell import is_program
from roll.translation.writing import load, render_notes, shell_text, yaml_text

RECIPE = "gsm8k/rlvr_config"
"""The quickstart: what changes are made to unless another recipe is named."""
VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
WIDTH = 160
EXIT_MISTAKES = 2


def main(argv: Sequence[str]) -> int:
    """Print our keys on stdout and notes on stderr; 2 where a key has no translation or the result cannot run."""
    arguments = build_parser().parse_args(argv)
    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        console = Console(stderr=True, emoji=False, width=WIDTH)
    try:
        translation = translated(arguments)
        sys.stdout.write(yaml_text(translation) if arguments.yaml else shell_text(translation))
        sys.stdout.flush()
        if not arguments.quiet:
            render_notes(translation, console)
        for warning in load(translation, Path(arguments.recipe)).warnings:
            if not arguments.quiet:
                console.print(f"roll check notes: {warning}", markup=False, highlight=False, soft_wrap=True)
    except ConfigError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return EXIT_MISTAKES
    return 0


def translated(arguments: argparse.Namespace) -> Translation:
    """The translation that the command line asks for.

    Raises:
        ConfigError: text that cannot be read, or keys and values without a translation.
    """
    source = with_config(read(arguments.source, arguments.call))
    dialect = DIALECTS[arguments.dialect] if arguments.dialect else dialect_of(source)
    recipe = load_config(RLVRConfig, arguments.recipe, check_files=False)
    return translate(source, dialect, recipe, arguments.train_rows)


def read(words: Sequence[str], call: int | None = None) -> Source:
    """A file, standard input (``-`` or nothing), one quoted command, or the words of a command.

    A script that is there is run in the sandbox: ``[NAME=value ...] [bash] script.sh [argument ...]``.

    Raises:
        ConfigError: no such file, or text that cannot be read.
    """
    if not words or list(words) == ["-"]:
        return read_pasted(sys.stdin.read(), call)
    variables = dict(word.partition("=")[::2] for word in itertools.takewhile(VARIABLE.fullmatch, words))
    rest = list(words[len(variables) :])
    if rest and rest[0] in ("bash", "sh"):
        rest = list(itertools.dropwhile(lambda word: word.startswith("-"), rest[1:]))
    file = Path(rest[0]) if rest else None
    if file is not None and file.is_file():
        if file.suffix in (".yaml", ".yml"):
            return read_yaml(file.read_text(encoding="utf-8"), file.name)
        if file.suffix != ".py":
            return read_recording(record(file, rest[1:], variables), file.name, call)
    if len(words) > 1:
        return read_words(words)
    if " " in words[0].strip():
        return read_pasted(words[0], call)
    if "=" in words[0]:
        return read_words(words)
    raise ConfigError([Problem("(file)", words[0], "no such file; a command is given as its words, or on stdin")])


def with_config(source: Source) -> Source:
    """TRL's ``--config FILE``: its keys, below those of the command line.

    Raises:
        ConfigError: no such file, or not a YAML section.
    """
    name = source.keys.get("config")
    if not isinstance(name, str) or not name.endswith((".yaml", ".yml")):
        return source
    file = Path(name)
    if not file.is_file():
        raise ConfigError([Problem("--config", name, "no such file")])
    given = read_yaml(file.read_text(encoding="utf-8"), file.name)
    return replace(source, keys={**given.keys, **source.keys})


def read_pasted(text: str, call: int | None = None) -> Source:
    """A command as it stands in a document; text that is more than a command with its variables is run as a script."""
    if not is_program(text):
        return read_text(text)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.sh"
        file.write_text(text, encoding="utf-8")
        return read_recording(record(file), "(standard input)", call)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll translate",
        description="Turn a command, launch script or YAML file of verl, SkyRL, TRL or OpenRLHF into keys of this "
        "project. A script is run in a sandbox with stand-ins for all programs; where there is none, it is not run.",
        epilog="Example: roll translate python3 -m verl.trainer.main_ppo data.train_batch_size=64 ...",
    )
    parser.add_argument("--from", dest="dialect", choices=tuple(DIALECTS), help="whose keys; default: told by the keys")
    parser.add_argument("--yaml", action="store_true", help="print YAML instead of key=value lines")
    parser.add_argument(
        "--recipe", default=RECIPE, help=f"recipe that single keys change, for its sizes and devices ({RECIPE})"
    )
    parser.add_argument("--train-rows", type=int, metavar="N", help="rows of the training data: epochs become steps")
    parser.add_argument("--call", type=int, metavar="N", help="which run of a script that starts several, from 1")
    parser.add_argument("--quiet", action="store_true", help="no notes on stderr")
    parser.add_argument(
        "source",
        nargs=argparse.REMAINDER,
        metavar="FILE | COMMAND",
        help="a YAML file, a script (NAME=value ... run.sh argument ...), a command, or stdin",
    )
    return parser
