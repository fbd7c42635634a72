"""Token ids of conversations that only grow: the text that a chat template puts between two turns, derived and checked.

A response is trained on the ids that were sampled, so no part of a conversation may be tokenised twice. The ids of a
later turn are those of the earlier ones, the sampled response, and a *bridge*: the template's text after the response
up to the next generation prompt. The bridge is found by rendering the conversation with a marker in place of every
response, so it works for any template.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

from roll.agents.images import ChatImages
from roll.rewards.thoughts import opened_thought, response_decoder, without_thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

# Replaces a response: plain ASCII, so that neither JSON nor a template's `trim` changes it.
_MARKER = "Zq7Response{}Zq7"


class TemplateError(ValueError):
    """A chat template cannot render a conversation, or not by appending to what it rendered before."""


@dataclass(frozen=True)
class Bridge:
    """The tokens between a sampled response and the next one."""

    token_ids: list[int]
    # The first of `token_ids` where the template ends a turn with a token; not repeated after a response that was
    # sampled up to its end.
    end_token: int | None
    # The first text that differs, where the template renders earlier turns differently than before.
    moved: str | None = None
    only_thoughts: bool = False  # the difference is thinking of earlier responses, which the template drops


class ChatTemplate:
    """The chat template of a tokenizer, with the tools and template arguments of a run.

    Args:
        end_tokens: ids that end a turn (the model's end tokens; empty: the tokenizer's).
        tools: JSON schemas in OpenAI's form, given to the template.
        arguments: further variables of the template (``enable_thinking``).
        images: images of a vision-language policy; None: a text model.

    Raises:
        TemplateError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Sequence[int] = (),
        tools: Sequence[Message] | None = None,
        arguments: dict[str, Any] | None = None,
        images: ChatImages | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise TemplateError("the tokenizer has no chat template: give one with `template` or `chat_template`")
        self._tokenizer = tokenizer
        self.tools: list[Any] = list(tools or ())
        self._arguments = dict(arguments or {})
        self.images = images
        self.eos_token: int | None = tokenizer.eos_token_id  # the tokenizer's own token for the end of a text
        ends = list(end_tokens) or ([] if self.eos_token is None else [self.eos_token])
        self._ends = {str(tokenizer.convert_ids_to_tokens(token)): token for token in ends}
        self.end_tokens, self.end_texts = frozenset(ends), tuple(self._ends)
        # Tool arguments are a JSON text (True) or a mapping; None until a call was rendered.
        self._json_arguments: bool | None = None

    def with_tools(self, tools: Sequence[Message]) -> ChatTemplate:
        """The same template for conversations that are offered ``tools`` in place of this one's."""
        other = copy.copy(self)
        other.tools = list(tools)
        return other

    @property
    def source(self) -> str:
        return str(self._arguments.get("chat_template") or self._tokenizer.get_chat_template(tools=self.tools or None))

    def shows_tools(self) -> bool:
        """Return whether a prompt names the tools that it offers."""
        name = "probe_tool"
        probe = {"name": name, "description": "Probe.", "parameters": {"type": "object", "properties": {}}}
        offered = self.with_tools([{"type": "function", "function": probe}])
        return name in offered.render([{"role": "user", "content": "probe"}])

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text; special tokens in it are recognised, none is added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int], special: bool = True) -> str:
        """The text of sampled ids, with or without special tokens; marks of thoughts stay."""
        if not special:
            return response_decoder(self._tokenizer)([list(token_ids)])[0]
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def opened_thought(self, prompt_ids: Sequence[int]) -> str:
        """The mark, of one or several tokens, with which a prompt opens a thought; empty: it opens none."""
        return opened_thought(self.decode(prompt_ids[-16:]))  # no mark has more tokens

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of messages with the generation prompt."""
        return self.encode(self.render(messages))

    def render(self, messages: Sequence[Message], generation_prompt: bool = True) -> str:
        """The text of ``messages``, with arguments of tool calls in the form that the template takes; a
        ``TemplateError`` has the template's message."""
        messages = messages if self.images is None else list(map(self.images.as_text, messages))
        known, has_calls = self._json_arguments, any(message.get("tool_calls") for message in messages)
        try:
            text = self._render(_with_json_arguments(messages) if known else messages, generation_prompt)
        except TemplateError:
            if known is not None or not has_calls:
                raise
            text, known = self._render(_with_json_arguments(messages), generation_prompt), True
        if has_calls:
            self._json_arguments = bool(known)
        return text

    def _render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        import jinja2

        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                list(messages),
                tools=self.tools or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._arguments,
            )
            return str(rendered)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(f"the chat template cannot render the roles {roles}: {error}") from error

    def bridge(self, history: Sequence[Message], new: Sequence[Message]) -> Bridge:
        """The ids between the last response of ``history`` and the generation prompt after ``new``. ``history``: all
        messages so far; the last one is the response; ``new``: the messages that answer it; none of an assistant.
        Raises ``TemplateError``: the template refuses the conversation, or leaves out a response."""
        assert history and history[-1]["role"] == "assistant"
        assert new and all(message["role"] != "assistant" for message in new)
        new = new if self.images is None else list(map(self.images.as_text, new))
        text = self.render(self._with_markers([*history, *new]))
        # From the right: the text of a response and each of its tool calls hold the same marker.
        _, found, tail = text.rpartition(_MARKER.format(len(history) - 1))
        if not found:
            raise TemplateError("the chat template leaves out the response that the new messages answer")
        # What precedes the first end token closes the tool call around the marker: the policy sampled that itself.
        starts = [(tail.find(end), end) for end in self._ends if end in tail]
        end = min(starts)[1] if starts else None
        ids = self.encode(tail if end is None else tail[tail.index(end) :])
        for message in new:
            content = message.get("content")
            if isinstance(content, str):
                # Templates that write a result as JSON escape it, with or without the characters beyond ASCII.
                shown = content.strip()
                forms = (shown, *(json.dumps(shown, ensure_ascii=ascii)[1:-1] for ascii in (True, False)))
                if not any(form in tail for form in forms):
                    raise TemplateError(f"the chat template leaves out the message of role {message['role']}")
        earlier = self._with_markers(history[:-1])
        # The common prefix is the messages alone: templates may end a conversation with a further token.
        shown = common_prefix([self.render(earlier), self.render(earlier, generation_prompt=False)])
        moved = None
        if not text.startswith(shown):
            at = len(common_prefix([shown, text]))
            moved = shown[max(0, at - 20) : at + 40]
        only_thoughts = moved is not None and without_thoughts(text).startswith(without_thoughts(shown))
        return Bridge(ids, None if end is None else self._ends[end], moved, only_thoughts)

    def drops_thoughts(self, prompt: Sequence[Message], response: Message, new: Sequence[Message]) -> bool:
        """Return whether the template renders ``response`` without its thinking once ``new`` follows it.

        Compares the text in which the response is the last message with the one in which it is not, both with the
        response as it was sampled, thinking included.
        """
        try:
            alone = self.render([*prompt, response], generation_prompt=False)
            followed = self.render([*prompt, response, *new])
        except TemplateError:
            return True
        text = str(response.get("content") or "")
        return not followed.startswith(alone) and without_thoughts(text) != text

    def _with_markers(self, messages: Sequence[Message]) -> list[Message]:
        """``messages`` with a marker as the text of every response, and a tool call for every tool message after it."""
        marked: list[Message] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                marked.append(message)
                continue
            marker = _MARKER.format(index)
            results = itertools.takewhile(lambda one: one["role"] == "tool", messages[index + 1 :])
            calls = [
                {
                    "id": str(result.get("tool_call_id", f"call{number:05d}")),
                    "type": "function",
                    "function": {"name": str(result.get("name", "tool")), "arguments": {"value": marker}},
                }
                for number, result in enumerate(results)
            ]
            response: Message = {"role": "assistant", "content": marker}
            marked.append(response | {"tool_calls": calls} if calls else response)
        return marked


def _with_json_arguments(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with the arguments of tool calls as JSON texts."""
    rendered = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            calls.append(call | {"function": call["function"] | {"arguments": text}})
        rendered.append(message | {"tool_calls": calls} if calls else message)
    return rendered


def common_prefix(texts: Sequence[str]) -> str:
    """The longest text that all of ``texts`` begin with."""
    return commonprefix(texts)  # noqa: RUF071  (texts, not paths)


# Where a template drops the thinking of earlier turns: keep its ids anyway, or start a new sample there.
Thinking = Literal["keep", "new_sample"]

# Name of a boundary between turns to the roles before and after it.
BOUNDARIES: dict[str, tuple[list[str], list[str]]] = {
    "user": (["user", "assistant"], ["user"]),
    "user, twice": (["user", "assistant", "user", "assistant"], ["user"]),
    "tool": (["user", "assistant"], ["tool"]),
    "tool, twice": (["user", "assistant", "tool", "assistant"], ["tool"]),
    "two tools": (["user", "assistant"], ["tool", "tool"]),
    "user after tool": (["user", "assistant", "tool", "assistant"], ["user"]),
}


def probe_boundary(template: ChatTemplate, name: str) -> Bridge:
    """Render a short conversation with one of :data:`BOUNDARIES`; ``TemplateError`` where the template cannot."""
    before, after = BOUNDARIES[name]
    messages: list[Message] = []
    for index, role in enumerate([*before, *after]):
        tool = {"name": "probe", "tool_call_id": f"probe{index:04d}"} if role == "tool" else {}
        messages.append({"role": role, "content": f"probe {index} of {role}", **tool})
    return template.bridge(messages[: len(before)], messages[len(before) :])


def check_template(template: ChatTemplate, thinking: Thinking, tools: bool) -> None:
    """Refuse a template whose conversations cannot grow by appending, before anything is generated. ``tools``: they
    have tool messages; otherwise only the boundaries between users and responses count. Raises ``TemplateError``:
    ``thinking`` is ``keep`` and the template moves earlier text at a boundary that is needed, or cannot render it at
    all."""
    for name in ("tool", "tool, twice") if tools else ("user", "user, twice"):
        try:
            bridge = probe_boundary(template, name)
        except TemplateError as error:
            raise TemplateError(f"the chat template has no turns of the kind '{name}': {error}") from error
        if thinking == "keep" and bridge.moved is not None and not bridge.only_thoughts:
            raise TemplateError(
                f"the chat template renders earlier turns otherwise once a later one is there ('{name}': "
                f"{bridge.moved!r} moves), so a conversation's ids cannot grow; set thinking: new_sample, which "
                "begins a new sample at every such place, or give a `chat_template` that only appends"
            )
