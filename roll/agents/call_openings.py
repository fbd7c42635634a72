"""Openings of tool calls that a request demands.

``tool_choice: required`` holds whatever the policy would have said: the text that the chat template writes in front of
a call's arguments, the tool's name included, is appended to the prompt as ids, and the policy writes the arguments.
Where several tools would do, their openings are walked token by token: tokens that they share are given, and where they
differ the policy draws one. A draw that continues no opening is repeated, which leaves the policy's distribution over
the tokens that do. Ids of an opening are context and are never trained: they were not sampled from the policy's own
distribution.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence

from roll.agents.chat_ids import ChatTemplate, Message, TemplateError, common_prefix
from roll.agents.tool_calls import parse_response

DrawToken = Callable[[list[int]], Awaitable[int]]
"""The policy's next token after these ids."""
MOST_DRAWS = 8
"""Draws at a token where openings differ; after them the first tool that is offered is called."""
_ARGUMENTS: tuple[dict[str, str], ...] = ({"Zq7A": "1"}, {"Bq7Z": "2"}, {})
"""Arguments of calls that share their opening in every format, and nothing after it."""
_HERMES_OPENING = '<tool_call>\n{{"name": "{}", "arguments":'
_THINK, _THOUGHT = "<think>", "\n</think>\n\n"


def call_opening(template: ChatTemplate, tool_format: str, messages: Sequence[Message], name: str) -> str:
    """The opening of a response to ``messages`` that calls ``name``, up to its arguments.

    It is derived from the chat template; where that writes no calls, ``hermes`` has a default form. Thinking that the
    generation prompt has opened is closed first.

    Raises:
        TemplateError: the template writes calls in no form, or in one that ``tool_format`` does not read.
    """
    begun = template.render(messages)
    texts = [text for arguments in _ARGUMENTS if (text := _rendered(template, messages, name, arguments)) is not None]
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
    if [call.name for call in parse_response(written, tool_format).calls] != [name]:
        raise TemplateError(f"the chat template writes tool calls in another form than {tool_format}")
    # A brace or a quote is one token with what follows it, so it is the policy's.
    return closing + common_prefix(shown).rstrip(' {"<')


def _rendered(template: ChatTemplate, messages: Sequence[Message], name: str, arguments: dict[str, str]) -> str | None:
    text = None
    # Some templates write calls only where there is no content at all, and then with arguments as JSON.
    for content, value in (("", arguments), (None, json.dumps(arguments))):
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": value}}
        try:
            text = template.render([*messages, {"role": "assistant", "content": content, "tool_calls": [call]}], False)
        except TemplateError:
            continue
        if name in text[len(template.render(messages, False)) :]:
            break
    return text


async def choose_opening(openings: Sequence[list[int]], prompt_ids: Sequence[int], draw: DrawToken) -> int:
    """Index of the opening that the policy chooses.

    Args:
        openings: token ids; none is the beginning of another.
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
