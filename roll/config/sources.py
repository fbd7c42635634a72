"""Where a key was written: which file and line, or the command line. Only read when there is a mistake to show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from roll.config.yaml_files import compose_nodes

COMMAND_LINE = "command line"


class SourceFile:
    """A configuration file with the files of its ``defaults:`` and the overrides given on the command line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._overrides: list[str] = []

    def add_override(self, key: str, value: Any) -> None:
        self._overrides.append(key)
        if isinstance(value, dict):
            for name, inner in value.items():
                self.add_override(f"{key}.{name}", inner)

    def place_of(self, key: str) -> str:
        """``file:line`` of the key, or of the nearest section above it that is written."""
        parts = key.replace("[", ".[").split(".")
        for length in range(len(parts), 0, -1):
            path = ".".join(parts[:length])
            if path in self._overrides:
                return COMMAND_LINE
            for file, lines in self._files:
                if path in lines:
                    return f"{shown(file)}:{lines[path]}"
        return shown(self.file)

    def is_own(self, key: str) -> bool:
        """True when the key stands in the main file or on the command line, not in a file of its ``defaults``."""
        path = key.replace("[", ".[")
        return path in self._overrides or any(path in lines for file, lines in self._files if file == self.file)

    def included(self, key: str) -> bool:
        """True when a file of the ``defaults`` has this top-level key and the main file has not."""
        return not any(key in lines for file, lines in self._files if file == self.file) and any(
            key in lines for _, lines in self._files
        )

    def files(self) -> list[Path]:
        """The file and those that its ``defaults`` name, as far as they can be read."""
        return list(dict.fromkeys([self.file, *(file for file, _ in self._files)]))

    @cached_property
    def _files(self) -> list[tuple[Path, dict[str, int]]]:
        return list(_read_files(self.file, "", set()))


def shown(file: Path) -> str:
    """Relative to the working directory when it is inside it."""
    absolute, here = file.resolve(), Path.cwd().resolve()
    return os.path.relpath(absolute, here) if absolute.is_relative_to(here) else str(absolute)


def _read_files(file: Path, prefix: str, seen: set[Path]) -> Iterator[tuple[Path, dict[str, int]]]:
    """The file and those that its ``defaults`` name, each with the line of every key path."""
    if file in seen or not file.is_file():
        return
    seen.add(file)
    try:
        root = compose_nodes(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError):
        # The file is there all the same: what is wrong with it is told elsewhere.
        yield file, {}
        return
    lines: dict[str, int] = {}
    if isinstance(root, yaml.MappingNode):
        _collect_lines(root, prefix, lines)
        yield file, lines
        for name, inner in _defaults(root):
            yield from _read_files((file.parent / f"{name}.yaml").resolve(), inner, seen)


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        lines.setdefault(path, key.start_mark.line + 1)
        _collect_lines(value, f"{path}.", lines)


def _defaults(root: yaml.MappingNode) -> Iterator[tuple[str, str]]:
    """File name (without ``.yaml``) and key prefix of each entry of the ``defaults`` list."""
    for key, value in root.value:
        if key.value != "defaults" or not isinstance(value, yaml.SequenceNode):
            continue
        for entry in value.value:
            if isinstance(entry, yaml.ScalarNode) and entry.value != "_self_":
                name, _, package = entry.value.partition("@")
                yield name, "" if package in ("", "_here_", "_global_") else f"{package}."
