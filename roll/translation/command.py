"""``roll translate``: SkyRL's and verl's keys and commands as this project's configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from roll.config.errors import ConfigError, Problem
from roll.config.loader import load_config
from roll.config.rlvr import RLVRConfig
from roll.translation.engine import DIALECTS, Translation, dialect_of, translate
from roll.translation.reading import Source, read_text, read_words, read_yaml
from roll.translation.writing import load, render_notes, shell_text, yaml_text

RECIPE = "gsm8k/rlvr_config"
"""The quickstart: what changes are made to unless another recipe is named."""
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
    source = read(arguments.source)
    dialect = DIALECTS[arguments.dialect] if arguments.dialect else dialect_of(source)
    recipe = load_config(RLVRConfig, arguments.recipe, check_files=False)
    return translate(source, dialect, recipe, arguments.train_rows)


def read(words: Sequence[str]) -> Source:
    """A file, standard input (``-`` or nothing), one quoted command, or the words of a command.

    Raises:
        ConfigError: no such file, or text that cannot be read.
    """
    if not words or list(words) == ["-"]:
        return read_text(sys.stdin.read())
    if len(words) > 1 or "=" in words[0]:
        return read_words(words) if len(words) > 1 or " " not in words[0].strip() else read_text(words[0])
    file = Path(words[0])
    if not file.is_file():
        raise ConfigError([Problem("(file)", words[0], "no such file; a command is given as its words, or on stdin")])
    text = file.read_text(encoding="utf-8")
    return read_yaml(text, file.name) if file.suffix in (".yaml", ".yml") else read_text(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll translate",
        description="Turn a command, script or YAML file of SkyRL or verl into keys of this project.",
        epilog="Example: roll translate python3 -m verl.trainer.main_ppo data.train_batch_size=64 ...",
    )
    parser.add_argument("--from", dest="dialect", choices=tuple(DIALECTS), help="whose keys; default: told by the keys")
    parser.add_argument("--yaml", action="store_true", help="print YAML instead of key=value lines")
    parser.add_argument(
        "--recipe", default=RECIPE, help=f"recipe that single keys change, for its sizes and devices ({RECIPE})"
    )
    parser.add_argument("--train-rows", type=int, metavar="N", help="rows of the training data: epochs become steps")
    parser.add_argument("--quiet", action="store_true", help="no notes on stderr")
    parser.add_argument(
        "source", nargs=argparse.REMAINDER, metavar="FILE | COMMAND", help="a YAML file, a script, a command, or stdin"
    )
    return parser
