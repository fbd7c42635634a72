"""Conversations: demonstrations for supervised training, and the shapes that turns are published in."""

from __future__ import annotations

import re
from typing import Any

from published import PrepareOptions, one_of, others, text_of

from roll.datasets.columns import Message, check_messages, with_system
from roll.datasets.reading import Row, SourceRow
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


CHAT_TAG = "chat"
CHATS = ("messages", "conversations", "conversation")
INSTRUCTIONS = ("instruction", "prompt", "question", "query")
RESPONSES = ("output", "response", "completion", "answer", "solution")
CHAT_COLUMNS = ("id", "tag", *CHATS, "input", "system", *INSTRUCTIONS, *RESPONSES)


def convert_chat(source: SourceRow, row_id: str, options: PrepareOptions) -> Row:
    """``id, tag, messages``, of which the last is the assistant's and is learnt, and all other columns.

    A chat is in ``messages`` or ``conversations`` (with role and content, or ShareGPT's from and value); else it is
    an instruction, its ``input`` behind it after an empty line (Alpaca), and an output.

    Raises:
        DataError: no conversation, or none that ends with the assistant.
    """
    column = next((name for name in CHATS if source.row.get(name) is not None), None)
    messages = messages_of(source, column, source.row[column]) if column else from_columns(source)
    messages = with_system(messages, source.row.get("system"))
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{source.place}: the conversation must end with the assistant, found {messages[-1]['role']!r}")
    if not any(message["role"] == "user" for message in messages):
        raise DataError(f"{source.place}: the conversation has no message from a user")
    head = {"id": row_id, "tag": options.tag, "messages": with_options(messages, options)}
    return {**head, **others(source, CHAT_COLUMNS)}


def from_columns(source: SourceRow) -> list[Message]:
    column, value = one_of(source, INSTRUCTIONS)
    prompt = messages_of(source, column, value) if isinstance(value, list) else None
    if prompt is None:
        extra = source.row.get("input")
        text = text_of(source, INSTRUCTIONS)
        prompt = [{"role": "user", "content": f"{text}\n\n{extra}" if extra else text}]
    column, answer = one_of(source, RESPONSES)
    if isinstance(answer, list):
        return [*prompt, *messages_of(source, column, answer)]
    return [*prompt, {"role": "assistant", "content": text_of(source, RESPONSES)}]
