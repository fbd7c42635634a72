"""Columns of a row: id, tag, conversation, ground truth; the domain it belongs to and the filter it passes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from roll.config.objects import imported
from roll.config.roles import DataArguments
from roll.datasets.reading import SourceRow, whole_characters
from roll.datasets.types import DataError

Message = dict[str, Any]
SOURCE = "data_source"  # verl's column of the data set that a row comes from, which its rewards go by
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names of a data set; exactly one of ``messages`` and ``prompt`` is set."""

    id: str
    tag: str
    messages: str | None
    prompt: str | None
    response: str
    source: str | None = None  # the column that verl's data sets route by, for rows without a tag

    @classmethod
    def of(cls, data_args: DataArguments, first: SourceRow) -> Columns:
        """The configured names; without ``messages`` and ``prompt``, whichever of ``messages``, ``prompt``, ``text``
        the set's first row has. Raises ``DataError``: both configured, or none configured and none found."""
        messages, prompt = data_args.messages, data_args.prompt
        if messages is not None and prompt is not None:
            raise DataError(f"data_args: messages ({messages!r}) and prompt ({prompt!r}) exclude each other: set one")
        if messages is None and prompt is None:
            found = next((name for name in ("messages", "prompt", "text") if name in first.row), None)
            if found is None:
                raise DataError(
                    f"{first.place}: neither messages nor prompt among the columns {sorted(first.row)}; "
                    "name the right one with data_args.messages or data_args.prompt"
                )
            messages, prompt = (found, None) if found == "messages" else (None, found)
        if prompt is not None and is_conversation(first.row.get(prompt)):
            messages, prompt = prompt, None
        own_tag = data_args.tag != DataArguments().tag
        return cls(data_args.id, data_args.tag, messages, prompt, data_args.response, None if own_tag else SOURCE)

    def read_messages(self, source: SourceRow) -> list[Message]:
        """The conversation: ``messages`` as a list or as the JSON text of one, or ``prompt`` as a user's turn. Raises
        ``DataError``: column missing, not a conversation, or a message without role or content."""
        if self.prompt is not None:
            prompt = require(source, self.prompt)
            if not isinstance(prompt, str):
                raise DataError(f"{source.place}: {self.prompt} must be a text, found {type(prompt).__name__}")
            return [{"role": "user", "content": prompt}]
        assert self.messages is not None
        value = require(source, self.messages)
        if isinstance(value, str):
            try:
                value = whole_characters(json.loads(value), value)
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{source.place}: {self.messages} holds half of a character (a lone surrogate)"
                ) from error
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{source.place}: {self.messages} is a text but not the JSON of a list of messages ({error}); "
                    f"if it is the prompt itself, set data_args.prompt: {self.messages}"
                ) from error
        check_messages(source, self.messages, value)
        # JSON that was written from a table has null where a message or a call has no such key.
        return [{"content": "", **without_nulls(one)} for one in value]

    def read_tag(self, source: SourceRow) -> str:
        """The row's tag, else its ``data_source``; where both are absent, the empty tag."""
        value = source.row.get(self.tag)
        if value is None and self.source is not None:
            value = source.row.get(self.source)
        return "" if value is None else str(value)


def without_nulls(message: Message) -> Message:
    """The message without keys that are null, its ``content`` excepted, and so its calls; no calls are no key."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    calls = kept.pop("tool_calls", None)
    return kept | {"tool_calls": [_present(call) for call in calls]} if calls else kept


def _present(call: object) -> Any:
    """A call without keys that are null; nulls among its arguments are the caller's."""
    if not isinstance(call, Mapping):
        return call
    return {key: _present(one) if key == "function" else one for key, one in call.items() if one is not None}


def is_conversation(value: object) -> TypeGuard[list[Message]]:
    """A list of messages, as verl keeps under ``prompt``."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def require(source: SourceRow, column: str) -> Any:
    if source.row.get(column) is None:
        found = "it is null" if column in source.row else f"found only {sorted(source.row)}"
        raise DataError(f"{source.place}: column {column!r} expected, {found}")
    return source.row[column]


def check_messages(source: SourceRow, column: str, value: object) -> None:
    example = '[{"role": "user", "content": "..."}]'
    if not isinstance(value, list) or not value:
        raise DataError(f"{source.place}: {column} must be a non-empty list of messages such as {example}")
    for position, message in enumerate(value):
        is_message = isinstance(message, dict) and "role" in message
        if not is_message or not ("content" in message or message.get("tool_calls")):
            raise DataError(f"{source.place}: {column}[{position}] needs role and content, such as {example}")
        if message["role"] not in ROLES:
            found = f"{column}[{position}].role is {message['role']!r}"
            raise DataError(f"{source.place}: {found}; expected one of {', '.join(ROLES)}")


def parsed(source: SourceRow, column: str, text: str) -> Any:
    """JSON in a column. Raises ``DataError``: it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source.place}: {column} is a text but not JSON ({error})") from error


class DomainRouter:
    """Sends a row to a domain: by its ``domain`` column, else by its tag, else (one domain only) to that domain.

    There is no default domain beyond that: a row that nothing claims is an error that lists what is known, because a
    row scored by the wrong rule teaches the wrong thing without anyone noticing.

    Args:
        domains: each domain's ``tag_included``. Null or empty: claims no tag by name.

    Raises:
        DataError: no domain at all, or a tag claimed by two.
    """

    def __init__(self, domains: Mapping[str, Sequence[str] | None]) -> None:
        if not domains:
            raise DataError("rewards: no domain configured; for example rewards: {math_rule: {tag_included: [gsm8k]}}")
        self._domains = list(domains)
        self._by_tag: dict[str, str] = {}
        for domain, tags in domains.items():
            for tag in tags or ():
                if tag in self._by_tag:
                    first = self._by_tag[tag]
                    raise DataError(f"rewards.{domain}.tag_included: tag {tag!r} already belongs to rewards.{first}")
                self._by_tag[tag] = domain
        self._only_domain = self._domains[0] if len(domains) == 1 and not self._by_tag else None

    def route(self, source: SourceRow, tag: str) -> str:
        """The domain of a row. Raises ``DataError``: an unknown domain, or an unknown tag in a row without domain."""
        domain = source.row.get("domain")
        if domain:
            if domain not in self._domains:
                known = ", ".join(self._domains)
                raise DataError(f"{source.place}: unknown domain {domain!r}; the configured rewards are {known}")
            return str(domain)
        if tag in self._by_tag:
            return self._by_tag[tag]
        if self._only_domain is not None:
            return self._only_domain
        known = ", ".join(sorted(self._by_tag)) or "none"
        shown = f"unknown tag {tag!r}" if tag else "no tag and no domain"
        raise DataError(
            f"{source.place}: {shown}; known tags are {known}; add it to tag_included of the reward that scores it"
        )


Keep = Callable[[SourceRow], bool]


def build_filter(setting: str | Mapping[str, Any] | None) -> Keep | None:
    """The filter of ``dataset_filter``: conditions, or the dotted path of a function ``(row) -> bool``; None: all rows
    are kept.

    The filter raises DataError for a row that it cannot judge.

    Raises:
        DataError: a function that is not there.
    """
    if not setting:
        return None
    if not isinstance(setting, str):
        conditions = setting
        return lambda source: all(holds(source, column, condition) for column, condition in conditions.items())
    path, function = setting, import_function(setting)

    def keep(source: SourceRow) -> bool:
        try:
            return bool(function(source.row))
        except Exception as error:
            raise DataError(f"{source.place}: dataset_filter {path} failed: {type(error).__name__}: {error}") from error

    return keep


def holds(source: SourceRow, column: str, condition: object) -> bool:
    """The value is equal, one of a list, or within ``{min, max}`` (both included). Raises ``DataError``: no such
    column, or no number where the condition is a range."""
    if column not in source.row:
        found = sorted(source.row)
        raise DataError(f"{source.place}: dataset_filter asks for the column {column!r}, found only {found}")
    value = source.row[column]
    if isinstance(condition, Mapping):
        number = as_number(source, column, "dataset_filter")
        low, high = condition.get("min", -float("inf")), condition.get("max", float("inf"))
        return bool(low <= number <= high)
    return value in condition if isinstance(condition, list) else bool(value == condition)


def as_number(source: SourceRow, column: str, wanted_by: str) -> float:
    """The row's value in ``column`` as a number (CSV files hold texts). Raises ``DataError``: no such column, or no
    number in it."""
    value = source.row.get(column)
    try:
        # float(True) is 1.0, but a flag is no number.
        if value is None or isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise DataError(f"{source.place}: {wanted_by} wants a number in column {column!r}, found {value!r}") from None


def import_function(path: str) -> Callable[..., Any]:
    try:
        function = imported(path)
    except ImportError as error:
        raise DataError(f"dataset_filter {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise DataError(f"dataset_filter {path!r} is {type(function).__name__}, not a function")
    return function


def filter_source(setting: str | Mapping[str, Any] | None) -> Any:
    """Source of the filter's result, for a cache key: the conditions, or the module that holds the function. Raises
    ``OSError``: the function's source is not there, so nobody can tell whether it changed."""
    if not isinstance(setting, str):
        return None if setting is None else dict(setting)
    module = inspect.getmodule(import_function(setting))
    if module is None or getattr(module, "__file__", None) is None:  # a notebook's
        raise OSError(f"no source of {setting}")
    return [setting, inspect.getsource(module)]


def with_system(messages: list[Message], system: object) -> list[Message]:
    """The messages with a system message in front, where ``system`` is a non-empty text and there is none yet."""
    if not isinstance(system, str) or not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]
