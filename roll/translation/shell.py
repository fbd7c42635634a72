"""Reads shell text: commands of words, with quotes, continued lines, comments and the variables that the text sets.

Only what launch scripts are made of is understood. Nothing is run, and the text's own variables are all that is
expanded: any other becomes ``${oc.env:NAME}``, which is read where the translated configuration is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

VARIABLE = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?P<operator>:?[-=](?P<default>[^}]*))?\}|(?P<plain>[A-Za-z_]\w*))"
)
ARGUMENTS = re.compile(r"\$(?:\{[@*]\}|[@*])")
"""``$@``: what the script hands on."""


PROGRAM = re.compile(
    r"\$\(|`|\(\(|\[\[|<<|=\(|\(\)|\$\{[#!]|\$\{\w+(?:\[|[#%/^,]|:?[+?]|:\s*-?\d)|\$\{\w+:?[-=][^}]*\$\{"
    r"|^\s*(?:if|for|while|until|case|function|source|\.|read|local|declare|eval|\[)\s",
    re.MULTILINE,
)
"""What makes a text a program of the shell: branches, loops, arithmetic, arrays, substitutions, other files."""


def is_program(text: str) -> bool:
    """True for text that has to be run to be understood."""
    return PROGRAM.search(text) is not None


@dataclass(frozen=True)
class Piece:
    """A part of a word under one kind of quotes (``'``, ``"``, or none)."""

    text: str
    quote: str


@dataclass
class Variables:
    """Shell variables that a text sets, and the names that it uses without setting them."""

    values: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def expand(self, text: str) -> str:
        """``$NAME``, ``${NAME}``, ``${NAME:-default}`` and ``${NAME:=default}`` replaced; ``$@`` by nothing."""

        def replace(match: re.Match[str]) -> str:
            name = match["braced"] or match["plain"]
            if name in self.values:
                return self.values[name]
            if match["operator"] is not None:
                default = self.expand(match["default"].strip("\"'"))
                if "=" in match["operator"]:
                    self.values[name] = default
                return default
            if name not in self.unknown:
                self.unknown.append(name)
            return f"${{oc.env:{name}}}"

        return VARIABLE.sub(replace, ARGUMENTS.sub("", text))


def commands(text: str, variables: Variables) -> Iterator[list[str]]:
    """The words of each command, expanded. Assignments take effect when the caller has put them into ``variables``.

    Raises:
        ValueError: a quote that is not closed.
    """
    for command in split_commands(text):
        words = [word for pieces in command for word in expand_word(pieces, variables)]
        if words:
            yield words


def expand_word(pieces: list[Piece], variables: Variables) -> list[str]:
    """One word; several, or none, where an unquoted variable holds several words or none."""
    words, opened = [""], False
    for piece in pieces:
        if piece.quote:
            words[-1] += piece.text if piece.quote == "'" else variables.expand(piece.text)
            opened = True
            continue
        expanded = variables.expand(piece.text)
        first, *more = re.split(r"\s+", expanded) if expanded != piece.text else [expanded]
        words[-1] += first
        words += more
    return [word for word in words if word or (opened and len(words) == 1)]


def split_commands(text: str) -> list[list[list[Piece]]]:
    """Commands as lists of words, each a list of pieces. Newlines, ``;``, ``&`` and ``|`` end a command.

    Raises:
        ValueError: a quote that is not closed.
    """
    found: list[list[list[Piece]]] = [[]]
    word: list[Piece] = []
    position = 0
    text = re.sub(r"\\\r?\n", " ", text)
    while position < len(text):
        char = text[position]
        if char in "'\"":
            end = closing_quote(text, position)
            inner = text[position + 1 : end]
            word.append(Piece(inner if char == "'" else re.sub(r'\\(["$`\\])', r"\1", inner), char))
            position = end + 1
            continue
        if char == "#" and not word:
            position = end_of_line(text, position)
            continue
        if char in " \t\r\n;&|":
            if word:
                found[-1].append(word)
                word = []
            if char in "\n;&|":
                found.append([])
            position += 1
            continue
        end = plain_end(text, position)
        word.append(Piece(text[position:end], ""))
        position = end
    if word:
        found[-1].append(word)
    return [command for command in found if command]


def closing_quote(text: str, start: int) -> int:
    quote = text[start]
    position = start + 1
    while position < len(text) and text[position] != quote:
        position += 2 if quote == '"' and text[position] == "\\" else 1
    if position >= len(text):
        line = text.count("\n", 0, start) + 1
        raise ValueError(f"the quote {quote} in line {line} is not closed")
    return position


def plain_end(text: str, start: int) -> int:
    """Where unquoted text ends; ``${...}`` belongs to it whatever it holds."""
    position = start
    while position < len(text) and text[position] not in " \t\r\n;&|'\"":
        if text.startswith("${", position) and "}" in text[position:]:
            position = text.index("}", position)
        position += 1
    return position


def end_of_line(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end
