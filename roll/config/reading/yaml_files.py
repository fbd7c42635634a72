"""YAML files: checks before composition, and the file and line of every key."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from roll.config.reading.errors import Problems

LARGEST_FILE = 1 << 20  # bytes; a configuration takes a few kilobytes
DEEPEST = 64  # levels of nested sections
MOST_NODES = 10_000  # keys and values of a file with its aliases written out
# libyaml's, where PyYAML was built with it: ten times as fast.
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Part of YAML's message, and what to do.
REMEDIES = (
    ("cannot start any token", "put the value in quotes"),
    ("mapping values are not allowed", "put a value with a colon in quotes, or complete the line above"),
    ("could not find expected ':'", "a key is written with a colon and a space after it"),
    ("expected <block end>", "keys of one section begin in the same column"),
    ("expected ',' or", "close the bracket, and put commas between its entries"),
    ("unexpected end of stream", "close the quotation mark"),
    ("undefined alias", "an alias *name needs an anchor &name before it; put a text with a star in quotes"),
    ("duplicate key", "keep one of the two"),
    ("unknown escape character", "use single quotes, in which a backslash is a backslash"),
    ("unacceptable character", "take the control character out"),
    ("special characters are not allowed", "take the control character out"),
    ("control characters are not allowed", "take the control character out"),
    ("could not determine a constructor", "YAML tags such as !name are not understood; put the value in quotes"),
)


def readable(file: Path, problems: Problems) -> bool:
    """True for a file that can be composed; what is wrong with another goes to ``problems``."""
    try:
        text = _text(file)
    except OSError as error:
        problems.add("(file)", str(file), f"cannot be read: {error.strerror}")
        return False
    except ValueError as error:
        problems.add("(file)", str(file), str(error))
        return False
    try:
        root = compose_nodes(text)
        yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        problems.add("(YAML)", *yaml_problem(error, file))
        return False
    except ValueError as error:
        problems.add("(YAML)", file.name, str(error).partition(";")[0])
        return False
    if root is not None and not isinstance(root, yaml.MappingNode):
        problems.add("(file)", str(file), "holds no keys: a configuration is made of lines such as max_steps: 10")
        return False
    return True


def _text(file: Path) -> str:
    """Content of a file. Raises ``OSError``: the file cannot be read; ``ValueError``: it is too large, or not UTF-8;
    the rule."""
    data = file.read_bytes()
    if len(data) > LARGEST_FILE:
        raise ValueError(f"has {len(data):,} bytes: more than {LARGEST_FILE:,} are no configuration")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("is UTF-16: save it as UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        rule = f"is not UTF-8 (byte 0x{data[error.start]:02x} in line {line}): save it as UTF-8"
        raise ValueError(rule) from error


def compose_nodes(text: str) -> yaml.Node | None:
    """The nodes of a file that is neither too deep nor, with its aliases written out, too large. Raises
    ``yaml.YAMLError``: it is no YAML; ``ValueError``: it is too deep, too large or endless."""
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"line {event.start_mark.line + 1}: sections lie in one another {DEEPEST} times and more")
    root: yaml.Node | None = yaml.compose(text, Loader=Loader)
    if "&" in text and root is not None:
        _check_aliases(root, {}, set())
    return root


def _check_aliases(node: yaml.Node, sizes: dict[int, int], above: set[int]) -> int:
    """Keys and values below ``node`` with aliases written out. Raises ``ValueError``: an alias to something that it is
    part of, or too much of it."""
    if id(node) in above:
        raise ValueError(f"line {node.start_mark.line + 1}: an alias inside its own anchor makes a section endless")
    if id(node) in sizes:
        return sizes[id(node)]
    above.add(id(node))
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    size = 1
    for part in parts:
        for inner in part if isinstance(part, tuple) else (part,):
            size += _check_aliases(inner, sizes, above)
    above.discard(id(node))
    if size > MOST_NODES:
        raise ValueError(f"with its aliases written out it has more than {MOST_NODES:,} entries")
    sizes[id(node)] = size
    return size


def yaml_problem(error: yaml.YAMLError, file: Path) -> tuple[str, str]:
    """Place and rule of a mistake in YAML."""
    mark = getattr(error, "problem_mark", None)
    place = f"{file.name}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else file.name
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    remedy = next((text for part, text in REMEDIES if part in reason), None)
    lines = file.read_text(encoding="utf-8").splitlines() if mark is not None else []
    if mark is not None and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        remedy = "indent with spaces: YAML does not allow tabs"
    return place, f"is not valid YAML: {reason}" + (f"; {remedy}" if remedy else "")


COMMAND_LINE = "command line"


@dataclass(eq=False)
class SourceFile:
    """A configuration file with the files of its ``defaults:`` and the overrides given on the command line."""

    file: Path
    _overrides: list[str] = field(default_factory=list)

    def add_override(self, key: str, value: object) -> None:
        self._overrides.append(key)
        if isinstance(value, dict):
            for name, inner in value.items():
                self.add_override(f"{key}.{name}", inner)

    @cached_property
    def default_set(self) -> tuple[yaml.Mark, str] | None:
        """Where the key ``defaults`` is, and the scalar at it; None: there is none, or hydra's list."""
        try:
            root = compose_nodes(self.file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, OSError):
            return None
        for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
            if key.value == "defaults" and isinstance(value, yaml.ScalarNode):
                return key.start_mark, value.value
        return None

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
            if self.rank(path):
                return COMMAND_LINE
        return shown(self.file)

    def is_own(self, key: str) -> bool:
        """True when the key, or one below it, is in the main file or on the command line, not only in a file of its
        ``defaults``."""
        path = key.replace("[", ".[")
        return self.rank(path) > 0 or self.file in self.files_with(path)

    def rank(self, key: str) -> int:
        """Place of the key, or of one below it, among the overrides, from 1; 0: it is in a file."""
        places = (place for place, one in enumerate(self._overrides, start=1) if f"{one}.".startswith(f"{key}."))
        return max(places, default=0)

    def included(self, key: str) -> bool:
        """True when a file of the ``defaults`` has this top-level key and the main file has not."""
        files = self.files_with(key)
        return bool(files) and self.file not in files

    def files_with(self, key: str) -> list[Path]:
        """The files that have this key."""
        return [file for file, lines in self._files if key in lines]

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
    if file in seen or not os.path.isfile(file):
        return
    seen.add(file)
    try:
        root = compose_nodes(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError):
        # The file exists; its problem is reported elsewhere.
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
