"""Conversations in which the loss is on every assistant turn, tool calls included, and on nothing else.

The chat template determines these tokens: by its own ``{% generation %}`` marks, where it has them; else by what it
renders of the conversation's beginnings.  Turn i begins after ``render(messages[:i], add_generation_prompt=True)``,
the prompt that the model would be given for it, and ends with ``render(messages[:i + 1])``, at the last special token
of that (the model never has to write what a template adds after the end of a turn).  Both must be beginnings of the
whole, or a turn would be learned in a context that it is never generated in; a row for which they are not is refused
(templates that drop the thoughts of earlier turns, for one).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from roll.config.names import TEMPLATE_ENDINGS
from roll.datasets.columns import Columns, Message
from roll.datasets.reading import TOOLS, SourceRow
from roll.datasets.templates import Conversation, TemplateChoice, tokenize
from roll.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
GROWING_TEMPLATES = frozenset(("native", "qwen2_5", "qwen3_coder", "qwen3", "qwen3_nothink", "chatml", "empty"))
"""Templates that render a conversation turn by turn; a file is taken for one, too."""


@dataclass(frozen=True)
class Masked:
    """The tokens of a conversation, and which of them carry the loss."""

    token_ids: list[int]
    mask: list[bool]


def read_dialogue(columns: Columns, source: SourceRow) -> tuple[list[Message], list[Any] | None]:
    """The conversation of a row and its tools; a response in a column of its own becomes the last turn.

    Raises:
        DataError: no conversation, no assistant's turn in it, or tools that are no list.
    """
    messages = [plain_message(source, one) for one in columns.read_messages(source)]
    answer = source.row.get(columns.response)
    if isinstance(answer, str) and answer and messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": answer})
    if not any(one["role"] == "assistant" for one in messages):
        raise DataError(
            f"{source.place}: no assistant's turn in the conversation, and no column {columns.response!r} "
            "(data_args.response): there is nothing to learn"
        )
    tools = source.row.get(TOOLS)
    if isinstance(tools, str):
        tools = parsed(source, TOOLS, tools) if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{source.place}: {TOOLS} must be a list of schemas, found {type(tools).__name__}")
    return messages, list(tools) if tools else None


def plain_message(source: SourceRow, message: Message) -> Message:
    """Return the message as templates expect it: text as content, arguments of tool calls as objects."""
    kept = message | {"content": message["content"] or ""}
    if "tool_calls" not in kept:
        return kept
    calls = []
    for call in kept["tool_calls"]:
        function = dict(call["function"] if isinstance(call.get("function"), Mapping) else call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = parsed(source, "tool_calls.arguments", function["arguments"] or "{}")
        # A call without the wrapper of OpenAI's interface is given one: templates look for it.
        rest = call if "function" in call else {"type": "function"}
        calls.append({**rest, "function": function})
    return kept | {"tool_calls": calls}


def parsed(source: SourceRow, column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source.place}: {column} is a text but not JSON ({error})") from error


class AssistantTurns:
    """Renders, tokenises and masks conversations; ``DataError`` for a template that does not render turn by turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, templates: TemplateChoice) -> None:
        for name in templates.renders:
            if name not in GROWING_TEMPLATES and not name.endswith(TEMPLATE_ENDINGS):
                raise DataError(
                    f"template {name!r} renders no conversation turn by turn, which train_on: assistant needs; "
                    f"use one of {', '.join(sorted(GROWING_TEMPLATES))}, or a .jinja file"
                )
        self._tokenizer = tokenizer
        self._templates = templates
        self._special = set(tokenizer.all_special_ids)

    def __call__(self, one: Conversation) -> Masked | DataError:
        """Tokens and mask of a conversation, or what is wrong with it."""
        from jinja2 import TemplateError

        name = self._templates.of(one.tag)
        # Arguments of the tokenizer's template by a template's name.
        variables = {**getattr(self._templates.renders[name], "keywords", {}), **self._templates.variables}
        template = str(variables.get("chat_template") or self._tokenizer.chat_template)
        try:
            if name in ("chatml", "empty") or GENERATION.search(template) is None:
                found = self._by_beginnings(one, name)
            else:
                options = {"tools": one.tools, "return_assistant_tokens_mask": True, **variables}
                marked: Any = self._tokenizer.apply_chat_template(
                    one.messages, tokenize=True, return_dict=True, **options
                )
                found = Masked(list(marked["input_ids"]), [bool(value) for value in marked["assistant_masks"]])
        except DataError as error:
            return error
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            return DataError(f"{one.source.place}: template {name!r} cannot render this conversation: {error}")
        if not any(found.mask):
            return DataError(f"{one.source.place}: the template {name!r} marks no token of an assistant's turn")
        return found

    def _by_beginnings(self, one: Conversation, name: str) -> Masked:
        """Find the turns by what the template renders of the conversation's beginnings, which are the whole's."""
        turns = [number for number, message in enumerate(one.messages) if message["role"] == "assistant"]
        text = self._render(one, name, len(one.messages), opens=False)
        beginnings = []
        for turn in turns:
            for beginning, what in (
                (self._render(one, name, turn, opens=True), "the prompt of"),
                (self._render(one, name, turn + 1, opens=False), "the conversation up to"),
            ):
                if not text.startswith(beginning):
                    raise DataError(
                        f"{one.source.place}: with template {name!r} {what} message {turn} is no beginning of the "
                        "whole conversation: that turn would be learned in a context in which it is never generated; "
                        "use train_on: last, or a template with {% generation %} marks"
                    )
                beginnings.append(beginning)
        # Where a token would span the end of a beginning, the parts are tokenised apart, as when the model generates.
        whole, *parts = tokenize(self._tokenizer, [text, *beginnings])
        edges = [len(part) for part in parts]
        if not all(whole[: len(part)] == part for part in parts):
            places = [0, *map(len, beginnings), len(text)]
            pieces = tokenize(self._tokenizer, [text[begin:end] for begin, end in pairwise(places)])
            whole, edges = [token for piece in pieces for token in piece], list(accumulate(map(len, pieces[:-1])))
        mask = [False] * len(whole)
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            # A turn ends with its last special token, if only space follows it.
            last = next((place for place in range(end - 1, begin - 1, -1) if whole[place] in self._special), None)
            if last is not None and not str(self._tokenizer.decode(whole[last + 1 : end])).strip():
                end = last + 1
            mask[begin:end] = [True] * (end - begin)
        if turns[-1] == len(one.messages) - 1 and mask[-1] and whole[-1] not in self._special:
            # A template without an end of turn: the model would never learn to stop.
            whole, mask = [*whole, self._tokenizer.eos_token_id], [*mask, True]
        return Masked(whole, mask)

    def _render(self, one: Conversation, name: str, count: int, opens: bool) -> str:
        """The first ``count`` messages, with the opening of the assistant's turn or without."""
        if count == 0:
            return ""
        tools: dict[str, Any] = {} if one.tools is None else {"tools": one.tools}
        render, variables = self._templates.renders[name], self._templates.variables
        return render(self._tokenizer, one.messages[:count], add_generation_prompt=opens, **tools, **variables)


def spans_of(mask: Sequence[bool]) -> list[int]:
    """Begin and end of every run of True, one after the other."""
    edges = [0, *map(int, mask), 0]
    return [number for number in range(len(mask) + 1) if edges[number] != edges[number + 1]]
