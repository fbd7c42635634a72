"""Rows as they are published: the form of a file is recognised by its first row and read into the columns that the rest
of the package knows (``messages`` or ``prompt``, the response, ``ground_truth``).

Known are GSM8K (``question``, ``answer`` with ``####``), MATH (``problem``, ``solution`` with a box), Alpaca
(``instruction``, ``input``, ``output``), ShareGPT (turns of ``from`` and ``value``), conversations under
``conversations``, and pairs of prompt and completion. Columns that are there already, or that ``data_args`` names, win.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from roll.config.data import DataArguments
from roll.datasets.columns import parsed, require
from roll.datasets.reading import Row, SourceRow
from roll.datasets.types import DataError

FOREIGN_TRUTHS = ("reward_model", "reward_spec")
"""Columns in which the data sets of other projects keep the ground truth."""

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles by the names that ShareGPT's files have in ``from``."""
DIALOGUES = ("conversations", "conversation", "dialogue")
ALPACA = "instruction"
QUESTIONS = ("question", "problem", "query", ALPACA, "input")
ANSWERS = ("response", "completion", "output", "answer")
"""Columns of a prompt and of a response, for rows that have none under the usual names."""
_MARKED = re.compile(r"####[ \t]*([^\n]+)")
MAX_BOXES = 16
"""Boxes tried from the end: a text of unclosed boxes, as degenerate models write, must not take quadratic time."""


@dataclass(frozen=True)
class RowForm:
    """Columns of a file by their meaning."""

    dialogue: str | None = None  # column that becomes `messages`
    question: str | None = None
    """Column that becomes ``prompt``; :data:`ALPACA` becomes ``messages``, with ``input``, ``system``, ``history``."""
    response: tuple[str, str] | None = None  # column of the response, and the name it gets
    completion: str | None = None  # column of messages that continue those of `prompt`
    truth: str | None = None  # column of the ground truth
    pattern: str | None = None
    """Regular expression that finds the ground truth in it; None: the text after ``####``, the last box, or all."""
    entries: tuple[str, ...] = ()
    """Dotted names of entries of columns, such as ``extra_info.question``, which become columns."""

    def __call__(self, source: SourceRow) -> SourceRow:
        row = {name: turns(source, value) for name, value in source.row.items()}
        source = replace(source, row=row)
        row.update((name, entry_of(source, name)) for name in self.entries)
        if self.dialogue is not None:
            row["messages"] = require(source, self.dialogue)
            del row[self.dialogue]
        if self.completion is not None:
            row["messages"] = [*row.pop("prompt", ()), *require(source, self.completion)]
            del row[self.completion]
        if self.question == ALPACA:
            row["messages"] = alpaca_messages(source)
        elif self.question is not None:
            row["prompt"] = require(source, self.question)
        if self.response is not None and self.response[0] in row:
            row.setdefault(self.response[1], row[self.response[0]])
        if self.truth is not None and row.get(self.truth) is not None:
            row["ground_truth"] = found_truth(source, self.truth, row[self.truth], self.pattern)
        return source

    def __str__(self) -> str:
        parts = []
        if self.dialogue is not None:
            parts.append(f"messages from {self.dialogue}")
        if self.completion is not None:
            parts.append(f"messages from prompt and {self.completion}")
        if self.question == ALPACA:
            parts.append("messages from instruction, input, system and history")
        elif self.question is not None:
            parts.append(f"prompt from {self.question}")
        if self.response is not None:
            parts.append(f"{self.response[1]} from {self.response[0]}")
        if self.truth is not None:
            how = f"by {self.pattern!r}" if self.pattern else "after ####, in the last box, or all of it"
            parts.append(f"ground_truth from {self.truth} ({how})")
        return ", ".join(parts)


def form_of(data_args: DataArguments, first: SourceRow) -> RowForm:
    """The form of the rows that begin with ``first``; ``data_args`` and the usual names go before it. Raises
    ``DataError``: ``data_args.ground_truth`` names a column that the row does not have."""
    named = (data_args.messages, data_args.prompt, data_args.response)
    entries = tuple(name for name in named if name and name not in first.row and name.partition(".")[0] in first.row)
    first = replace(first, row={**first.row, **{name: entry_of(first, name) for name in entries}})
    row = first.row
    dialogue = question = completion = None
    free = data_args.messages is None and data_args.prompt is None and not {"messages", "prompt", "text"} & row.keys()
    if free:
        dialogue = next((name for name in DIALOGUES if isinstance(row.get(name), list)), None)
        question = None if dialogue else next((name for name in QUESTIONS if isinstance(row.get(name), str)), None)
    own_response, response = data_args.response, None
    talked = row.get(data_args.messages or dialogue or "messages")
    answered = isinstance(talked, str)
    if is_dialogue(talked):
        speaker = str(talked[-1].get("from", talked[-1].get("role"))).lower()
        answered = SPEAKERS.get(speaker) == "assistant"
    if own_response == DataArguments().response and own_response not in row and not answered:
        answers = ("answer", *ANSWERS) if question == "question" else ANSWERS
        found = next((name for name in answers if row.get(name) is not None), None)
        if found is not None and is_dialogue(row[found]):
            completion = found if data_args.messages is None and is_dialogue(row.get("prompt", row[found])) else None
        elif isinstance(row.get(found or ""), str):
            response = (str(found), own_response)
    truth, pattern = truth_column(data_args, first)
    return RowForm(dialogue, question, response, completion, truth, pattern, entries)


def entry_of(source: SourceRow, name: str) -> Any:
    """The entry of a column that a dotted name leads to; the column may be the JSON text of a section. Raises
    ``DataError``: a row without that entry."""
    column, *path = name.split(".")
    value = require(source, column)
    value = parsed(source, column, value) if isinstance(value, str) else value
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            found = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise DataError(f"{source.place}: {name} names an entry {key!r}, found {found}")
        value = value[key]
    return value


def read_ground_truth(row: Row) -> Any:
    """The column ``ground_truth``, else the entry of that name in ``reward_model`` (verl) or ``reward_spec`` (SkyRL);
    None: the row has none."""
    for section in (row, *map(row.get, FOREIGN_TRUTHS)):
        if isinstance(section, str) and section.startswith("{"):
            # CSV and some JSONL files hold the section as JSON text.
            with suppress(ValueError, RecursionError):
                section = json.loads(section)
        if isinstance(section, dict) and section.get("ground_truth") is not None:
            return section["ground_truth"]
    return None


def truth_column(data_args: DataArguments, first: SourceRow) -> tuple[str | None, str | None]:
    """Column and pattern of the ground truth; no column: rows have it under the usual names, or have none."""
    row, named = first.row, data_args.ground_truth
    if named is not None:
        column, pattern = (named, None) if isinstance(named, str) else (named["column"], named.get("pattern"))
        if column not in row:
            found = ", ".join(sorted(row))
            raise DataError(f"{first.place}: data_args.ground_truth names the column {column!r}, found only {found}")
        return column, pattern
    if read_ground_truth(row) is not None:
        return None, None
    if isinstance(row.get("answer"), str | int | float):
        return "answer", None
    boxed = isinstance(row.get("solution"), str) and last_boxed(row["solution"]) is not None
    return ("solution" if boxed else None), None


def found_truth(source: SourceRow, column: str, value: object, pattern: str | None) -> Any:
    """The ground truth in a column's value."""
    if not isinstance(value, str):
        return value
    if pattern is None:
        marked = last_marked(value)
        # GSM8K's thousands have commas, which an exact comparison would not know.
        return last_boxed(value) or value if marked is None else re.sub(r"(?<=\d),(?=\d{3})", "", marked)
    found = list(re.finditer(pattern, value))
    if not found:
        raise DataError(
            f"{source.place}: data_args.ground_truth.pattern {pattern!r} finds nothing in {column}: {value[-80:]!r}"
        )
    last = found[-1]
    return (last[1] if last.re.groups and last[1] is not None else last[0]).strip()


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete ``\boxed{...}`` or ``\fbox{...}``, braces balanced; also ``\boxed 5``.

    An empty box, as in a remark about the form of answers, counts only where all are.
    """
    position, found = len(text), None
    for _ in range(MAX_BOXES):
        position = max(text.rfind("\\boxed", 0, position), text.rfind("\\fbox", 0, position))
        if position < 0:
            break
        content = _box_at(text, text.index("box", position) + (5 if text[position + 1] == "b" else 3))
        if content:
            return content
        found = content if found is None else found
    return found


def _box_at(text: str, start: int) -> str | None:
    """The braced group (or the bare word) that begins at ``start``."""
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text) or text[start] != "{":
        word = re.match(r"[^\s$.,]+", text[start:])
        return word.group() if word else None
    depth = 0
    for position in range(start, len(text)):
        character = text[position]
        if character in "{}" and text[position - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start + 1 : position].strip()
    return None


def last_marked(text: str) -> str | None:
    """Text after the last ``####`` on its line."""
    found = _MARKED.findall(text)
    return found[-1].strip() if found else None


def is_dialogue(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)


def turns(source: SourceRow, value: Any) -> Any:
    """ShareGPT's turns of ``from`` and ``value`` as messages; any other value as it is."""
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in listed):
        return value
    messages = []
    for turn in listed:
        speaker = SPEAKERS.get(str(turn["from"]).lower())
        if speaker is None:
            known = ", ".join(SPEAKERS)
            raise DataError(f"{source.place}: a turn is from {turn['from']!r}; expected one of {known}")
        messages.append({"role": speaker, "content": turn["value"]})
    return messages


def alpaca_messages(source: SourceRow) -> list[dict[str, Any]]:
    """As LLaMA-Factory documents it: ``history`` has earlier pairs, ``input`` follows on a line of its own. Raises
    ``DataError``: no instruction, or a history that is no list of pairs."""
    row, asked = source.row, require(source, ALPACA)
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for pair in row.get("history") or ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(f"{source.place}: history must be a list of pairs [question, answer], found {pair!r}")
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    further = row.get("input")
    return [*messages, {"role": "user", "content": f"{asked}\n{further}" if further else asked}]
