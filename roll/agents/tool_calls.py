"""Responses as an agent sees them: what is thought, what is said, and the tool calls.

What is trained are the sampled ids; what is parsed here only decides what an agent sees of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.agents.call_formats import TOOL_FORMATS, BadCall, ToolCall
from roll.agents.tool_arguments import parameters_of
from roll.rewards.thoughts import split_thought, with_channel


@dataclass
class ParsedResponse:
    """A response as an agent sees it."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Reasons why calls that were begun cannot be parsed; their text stays in ``content``."""


def parse_response(
    text: str, tool_format: str, tools: Sequence[Mapping[str, Any]] | None = None, opened: str = ""
) -> ParsedResponse:
    """Parse a response in ``tool_format``.

    Args:
        text: decoded with special tokens, without the token that ended the turn.
        tool_format: one of :data:`TOOL_FORMATS`.
        tools: schemas of the tools that were offered, which type arguments; None: not known.
        opened: the mark with which the prompt opened a thought (:func:`~roll.rewards.thoughts.opened_thought`).
    """
    thought, answer = split_thought(text, opened)
    parsed, said, at, kept = ParsedResponse(reasoning=thought or ""), answer or "", 0, []
    # Messages of gpt-oss follow one another: its calls are not part of the content.
    searched = with_channel(text, opened) if tool_format == "gpt_oss" else said
    for begin, end, read in TOOL_FORMATS[tool_format](searched, None if tools is None else parameters_of(tools)):
        try:
            parsed.calls += read()
        except BadCall as error:
            parsed.errors.append(str(error))
            continue
        kept.append(searched[at:begin])
        at = end
    if parsed.calls and tool_format != "gpt_oss":
        said = "".join([*kept, said[at:]])
    parsed.content = said.strip()
    return parsed


def function_calls(parsed: ParsedResponse, demanded: str | None = None, written: str = "") -> list[dict[str, Any]]:
    """The calls of a response as messages have them: each a ``name`` and ``arguments``.

    Args:
        demanded: the tool whose call the response was forced to begin. It has been called even where the arguments
            cannot be parsed, which are then ``written``, a text.
    """
    found = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
    return found or ([] if demanded is None else [{"name": demanded, "arguments": written or {}}])


def detect_format(chat_template: str) -> str:
    """The format that a chat template writes calls in; ``hermes`` where it has none of its own."""
    for mark, name in _MARKS:
        if mark in chat_template:
            return name
    return "hermes"


_MARKS = (
    ("<|channel|>", "gpt_oss"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen_xml"),
    ("<minimax:tool_call>", "minimax"),
    ("<|tool_call_begin|>", "kimi"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("tool▁call", "deepseek"),
    ("<|python_tag|>", "llama3"),
)
"""Text that only the template of one format has, the most specific first."""
