"""Writes a translation: ``key=value`` words, YAML, and the table of notes; and checks what it says."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.errors import ConfigError
from roll.config.reading.masking import MASK, is_secret
from roll.translation.engine import Translation, show
from roll.translation.reading import UNSET

PLAIN = re.compile(r"[A-Za-z_./][\w./+@:%-]*")
"""Text that hydra reads as itself without quotes."""
DATA_HINT = "; data are prepared by roll prepare-data"
WORDS_WITH_A_MEANING = frozenset({"true", "false", "null", "nan", "inf"})


def overrides(translation: Translation) -> list[str]:
    """``key=value`` words as ``roll run`` takes them, not yet quoted for a shell."""
    return [f"{key}={hydra_value(value)}" for key, value in translation.keys.items()]


def hydra_value(value: Any) -> str:
    """A value in hydra's grammar, so that it is read as the same value."""
    if isinstance(value, str):
        if PLAIN.fullmatch(value) and value.lower() not in WORDS_WITH_A_MEANING:
            return value
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list | tuple):
        return f"[{','.join(hydra_value(entry) for entry in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{hydra_value(entry)}' for key, entry in value.items())}}}"
    return show(value)


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
    """The keys as YAML: a file of its own for a whole run, else what changes in a recipe."""
    return yaml.safe_dump(tree(translation), sort_keys=False, allow_unicode=True, width=120)


def load(translation: Translation, recipe: Path) -> LoadedConfig[Any]:
    """The configuration that the translation describes, checked like any other; files need not be there.

    Raises:
        ConfigError: every mistake that ``roll check`` finds.
    """
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
    """Variables that are not set here by their names: they are read where the run is started."""

    def named(value: Any, is_file: bool) -> Any:
        if isinstance(value, list):
            return [named(entry, is_file) for entry in value]
        if not isinstance(value, str):
            return value
        text = UNSET.sub(lambda match: match[0] if match[1] in os.environ else match[1], value)
        return f"{text}/" if is_file and text != value and UNSET.fullmatch(value) else text

    keys = {key: named(value, key.endswith(".file_name")) for key, value in translation.keys.items()}
    return replace(translation, keys=keys)


def shell_text(translation: Translation) -> str:
    """One ``key=value`` a line, quoted for the shell."""
    return "".join(f"{shlex.quote(word)}\n" for word in overrides(translation))


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
        f"stays in the environment: {name}={shown(name, value)}" for name, value in translation.environment.items()
    ]
    lines += list(translation.remarks)
    lines += [f"must be in the environment: {name}" for name in translation.unset]
    lines += [f"passed over: {words}" + (DATA_HINT if "dataset" in words else "") for words in translation.passed_over]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def shown(name: str, value: str) -> str:
    return MASK if is_secret(name) else value
