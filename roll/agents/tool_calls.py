"""Responses as an agent sees them: what is thought, what is said, and the tool calls.

What is trained are the sampled ids; what is parsed here only decides what an agent sees of them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.agents.call_formats import TOOL_FORMATS, BadCall, ToolCall
from roll.agents.chat_ids import ChatTemplate, Message, TemplateError, common_prefix
from roll.rewards.thoughts import split_thought, with_channel


@dataclass
class ParsedResponse:
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    # Reasons why calls that were begun cannot be parsed; their text stays in `content`.
    errors: list[str] = field(default_factory=list)
    # The calls as messages have them: each a `name` and `arguments`.
    functions: list[dict[str, Any]] = field(default_factory=list)


def parse_response(
    text: str,
    tool_format: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    opened: str = "",
    demanded: tuple[str, str] | None = None,
) -> ParsedResponse:
    """Parse a response in ``tool_format``.

    Args:
        text: decoded with special tokens, without the token that ended the turn.
        tool_format: one of :data:`TOOL_FORMATS`.
        tools: schemas of the tools that were offered, which type arguments; None: not known.
        opened: the mark with which the prompt opened a thought (:func:`~roll.rewards.thoughts.opened_thought`).
        demanded: the tool whose call the response was forced to begin, and what was sampled after that. It has been
            called even where the arguments cannot be parsed, which are then that text, and not said as well.
    """
    thought, answer = split_thought(text, opened)
    parsed, said, at, kept = ParsedResponse(reasoning=thought or ""), answer or "", 0, []
    # Messages of gpt-oss follow one another: its calls are not part of the content.
    searched = with_channel(text, opened) if tool_format == "gpt_oss" else said
    # In OpenAI's form, with or without `function`.
    named = [one for tool in tools or () if isinstance((one := tool.get("function", tool)).get("name"), str)]
    schemas = None if tools is None else {one["name"]: one.get("parameters") or {} for one in named}
    for begin, end, read in TOOL_FORMATS[tool_format](searched, schemas):
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
    parsed.functions = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
    if demanded is not None and not parsed.calls:
        parsed.content, parsed.functions = "", [{"name": demanded[0], "arguments": demanded[1].strip() or {}}]
    return parsed


def detect_format(chat_template: str) -> str:
    """The format that a chat template writes calls in; ``hermes`` where it has none of its own."""
    return next((name for mark, name in _MARKS if mark in chat_template), "hermes")


# Text that only the template of one format has, the most specific first.
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


DrawToken = Callable[[list[int]], Awaitable[int]]  # the policy's next token after these ids
MOST_DRAWS = 8  # draws at a token where openings differ; after them the first tool that is offered is called
# Arguments of calls that share their opening in every format, and nothing after it.
_ARGUMENTS: tuple[dict[str, str], ...] = ({"Zq7A": "1"}, {"Bq7Z": "2"}, {})
_HERMES_OPENING = '<tool_call>\n{{"name": "{}", "arguments":'
_THINK, _THOUGHT = "<think>", "\n</think>\n\n"


def call_opening(template: ChatTemplate, tool_format: str, messages: Sequence[Message], name: str) -> str:
    """The opening of a response to ``messages`` that calls ``name``, up to its arguments.

    ``tool_choice: required`` holds whatever the policy would have said: this text is appended to the prompt as ids, and
    the policy writes the arguments. Ids of an opening are context and are never trained: they were not sampled from the
    policy's own distribution.

    It is derived from the chat template; where that writes no calls, ``hermes`` has a default form. Thinking that the
    generation prompt has opened is closed first. Raises ``TemplateError``: the template writes calls in no form, or in
    one that ``tool_format`` does not read.
    """
    begun = template.render(messages)
    texts: list[str] = []
    for arguments in _ARGUMENTS:
        text = None
        # Some templates write calls only where there is no content at all, and then with arguments as JSON.
        for content, value in (("", arguments), (None, json.dumps(arguments))):
            call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": value}}
            response: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
            try:
                text = template.render([*messages, response], False)
            except TemplateError:
                continue
            if name in text[len(template.render(messages, False)) :]:
                break
        texts += [] if text is None else [text]
    stem, closing = begun, ""
    if (texts and not texts[0].startswith(begun)) or (begun.rstrip().endswith(_THINK) and not texts):
        stem, closing = begun.rpartition(_THINK)[0], _THOUGHT
    shown = [text.removeprefix(stem) for text in texts if text.startswith(stem)]
    if not shown or name not in shown[0]:
        if tool_format != "hermes":
            raise TemplateError(f"the chat template writes no tool calls, so none of the form {tool_format} can begin")
        return (_THOUGHT if begun.rstrip().endswith(_THINK) else "") + _HERMES_OPENING.format(name)
    written = shown[0].rstrip()
    for end in template.end_texts:
        written = written.removesuffix(end)
    if [one.name for one in parse_response(written, tool_format).calls] != [name]:
        raise TemplateError(f"the chat template writes tool calls in another form than {tool_format}")
    # A brace or a quote is one token with what follows it, so it is the policy's.
    return closing + common_prefix(shown).rstrip(' {"<')


async def choose_opening(openings: Sequence[list[int]], prompt_ids: Sequence[int], draw: DrawToken) -> int:
    """Index of the opening that the policy chooses.

    Tokens that openings share are given, and where they differ the policy draws one. A draw that continues no opening
    is repeated, which leaves the policy's distribution over the tokens that do. None of ``openings`` (token ids) is the
    beginning of another.
    """
    left, at = list(range(len(openings))), 0
    while len(left) > 1:
        here = {openings[index][at] for index in left}
        if len(here) > 1:
            ids, chosen = [*prompt_ids, *openings[left[0]][:at]], openings[left[0]][at]
            for _ in range(MOST_DRAWS):
                if (token := await draw(ids)) in here:
                    chosen = token
                    break
            left = [index for index in left if openings[index][at] == chosen]
        at += 1
    return left[0]
