"""``roll translate``: keys, commands and scripts of verl and SkyRL as this project's configuration."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.compose import hydra_value
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.masking import masked
from roll.pipelines.rlvr.config import RLVRConfig
from roll.translation.engine import DIALECTS, Translation, dialect_of, show, translate
from roll.translation.launching import PROGRAM
from roll.translation.reading import UNSET, Source, read_recording, read_text, read_words, read_yaml
from roll.translation.recording import record

DATA_HINT = "; data are prepared by examples/data/convert.py"


def overrides(translation: Translation) -> list[str]:
    """``key=value`` words as ``roll run`` takes them, not yet quoted for a shell."""
    return [f"{key}={hydra_value(value)}" for key, value in translation.keys.items()]


def tree(translation: Translation) -> dict[str, Any]:
    """The keys as sections."""
    data: dict[str, Any] = {}
    for key, value in translation.keys.items():
        *sections, last = key.split(".")
        node = data
        for name in sections:
            node = node.setdefault(name, {})
        node[last] = value
    return data


def yaml_text(translation: Translation) -> str:
    """The keys as YAML: a complete file for a whole run, else the changes to a recipe."""
    return yaml.safe_dump(tree(translation), sort_keys=False, allow_unicode=True, width=120)


def load(translation: Translation, recipe: Path) -> LoadedConfig[Any]:
    """The configuration that the translation describes, checked like any other; files need not be there. Raises
    ``ConfigError``: every mistake that ``roll check`` finds."""
    if not translation.whole:
        return load_config(None, recipe, overrides=overrides(_without_unset(translation)), check_files=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "translation.yaml"
        file.write_text(yaml_text(_without_unset(translation)), encoding="utf-8")
        try:
            return load_config(None, file, check_files=False)
        except ConfigError as error:
            raise ConfigError([replace(problem, source="translated") for problem in error.problems]) from None


def _without_unset(translation: Translation) -> Translation:
    """The translation with the names of variables that are not set here in their place: the run's start reads them."""

    def named(value: object, is_file: bool) -> Any:
        if isinstance(value, list):
            return [named(entry, is_file) for entry in value]
        if not isinstance(value, str):
            return value
        text = UNSET.sub(lambda match: match[0] if match[1] in os.environ else match[1], value)
        return f"{text}/" if is_file and text != value and UNSET.fullmatch(value) else text

    keys = {key: named(value, key.endswith(".file_name")) for key, value in translation.keys.items()}
    return replace(translation, keys=keys)


def render_notes(translation: Translation, console: Console) -> None:
    """Print what each of their keys became; defaults that were written out come last."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for heading, ratio in (("theirs", 3), ("ours", 4), ("note", 4)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for note in sorted(translation.notes, key=lambda note: note.is_default):
        theirs = f"{note.theirs}={show(note.value)}" + (" (default)" if note.is_default else "")
        style = "dim" if note.is_default else ""
        table.add_row(
            *(Text(text, style) for text in (theirs, "\n".join(note.ours) or "-", note.text.replace("`", "")))
        )
    console.print(table)
    lines = [
        f"stays in the environment: {name}={value}" for name, value in masked(translation.environment, "env").items()
    ]
    lines += list(translation.remarks)
    lines += [f"must be in the environment: {name}" for name in translation.unset]
    lines += [f"passed over: {words}" + (DATA_HINT if "dataset" in words else "") for words in translation.passed_over]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


RECIPE = "gsm8k/rlvr_config"  # the quickstart: what changes are made to unless another recipe is named
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
        source = read(arguments.source, arguments.call)
        dialect = DIALECTS[arguments.dialect] if arguments.dialect else dialect_of(source)
        recipe = load_config(RLVRConfig, arguments.recipe, check_files=False)
        translation = translate(source, dialect, recipe, arguments.train_rows)
        # One `key=value` a line, quoted for the shell.
        lines = "".join(f"{shlex.quote(word)}\n" for word in overrides(translation))
        sys.stdout.write(yaml_text(translation) if arguments.yaml else lines)
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


def read(words: Sequence[str], call: int | None = None) -> Source:
    """A file, standard input (``-`` or nothing), one quoted command, or the words of a command.

    A script that is there is run in the sandbox: ``[NAME=value ...] [bash] script.sh [argument ...]``. Raises
    ``ConfigError``: no such file, or text that cannot be read.
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


def read_pasted(text: str, call: int | None = None) -> Source:
    """A command copied from a document; text that is more than a command with its variables is run as a script."""
    if PROGRAM.search(text) is None:
        return read_text(text)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.sh"
        file.write_text(text, encoding="utf-8")
        return read_recording(record(file), "(standard input)", call)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll translate",
        description="Turn a command, launch script or YAML file of verl or SkyRL into keys of this "
        "project. A script is run in a sandbox with stand-ins for all programs; where there is none, it is not run.",
        epilog="Example: roll translate python3 -m verl.trainer.main_ppo data.train_batch_size=64 ...",
    )
    parser.add_argument(
        "--from", dest="dialect", choices=tuple(DIALECTS), help="whose keys; default: derived from the keys"
    )
    parser.add_argument("--yaml", action="store_true", help="print YAML instead of key=value lines")
    parser.add_argument(
        "--recipe", default=RECIPE, help=f"recipe that single keys change, for its sizes and devices ({RECIPE})"
    )
    parser.add_argument("--train-rows", type=int, metavar="N", help="rows of the training data: epochs become steps")
    parser.add_argument("--call", type=int, metavar="N", help="which run of a script that starts several (1)")
    parser.add_argument("--quiet", action="store_true", help="no notes on stderr")
    parser.add_argument(
        "source",
        nargs=argparse.REMAINDER,
        metavar="FILE | COMMAND",
        help="a YAML file, a script (NAME=value ... run.sh argument ...), a command, or stdin",
    )
    return parser
