"""Conversations in the shapes that turns are published in."""

from __future__ import annotations

import re
from typing import Any

from published import PrepareOptions

from roll.datasets.columns import Message, check_messages, with_system
from roll.datasets.reading import SourceRow
from roll.datasets.types import DataError

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
HH_ROLES = {"Human": "user", "Assistant": "assistant"}
_HH_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \n]?")


def messages_of(source: SourceRow, column: str, value: Any) -> list[Message]:
    """A conversation with ``role`` and ``content`` (further keys dropped), from that or from ``from`` and ``value``.

    Raises:
        DataError: it is neither.
    """
    if isinstance(value, list) and value and all(isinstance(turn, dict) and "from" in turn for turn in value):
        unknown = {turn["from"] for turn in value} - SHAREGPT_ROLES.keys()
        if unknown:
            known = ", ".join(SHAREGPT_ROLES)
            raise DataError(f"{source.place}: {column} has turns from {sorted(unknown)}; known are {known}")
        return [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in value]
    check_messages(source, column, value)
    return [{"role": turn["role"], "content": turn["content"]} for turn in value]


def hh_messages(text: str) -> list[Message] | None:
    """The turns of a text such as ``\\n\\nHuman: ...\\n\\nAssistant: ...``; None for other texts."""
    parts = _HH_TURN.split(text)
    if len(parts) < 3 or parts[0].strip():
        return None
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": HH_ROLES[role], "content": content.strip()} for role, content in turns]


def with_options(messages: list[Message], options: PrepareOptions) -> list[Message]:
    """The messages with the system message in front, unless there is one, and the instruction after the last user's."""
    result = [dict(message) for message in messages]
    users = [i for i, message in enumerate(result) if message["role"] == "user"]
    if options.instruction and users:
        result[users[-1]]["content"] += f"\n\n{options.instruction}"
    return with_system(result, options.system)


CHATS = ("messages", "conversations", "conversation")
