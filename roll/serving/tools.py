"""Tools in chats with a served model: the opening of a call that a request demands, and the calls in a response."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.agents.call_openings import DrawToken, call_opening, choose_opening
from roll.agents.chat_ids import ChatTemplate
from roll.agents.tool_calls import detect_format, function_calls, parse_response
from roll.rewards.thoughts import opened_thought
from roll.serving.dialects.parts import ChatRequest
from roll.strategies.engines.requests import visible_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL = 16
"""Tokens at the end of a prompt that show whether a thought is open."""


@dataclass(frozen=True)
class Called:
    """A response as a client gets it."""

    content: str
    reasoning: str
    calls: list[dict[str, Any]]
    """Calls with ``id`` and ``function``, which has ``name`` and ``arguments``."""


class CallReader:
    """Finds the calls in the responses to one request that offers tools, in the format that the chat template writes.

    Args:
        template: with the request's tools.
        prompt_ids: the prompt, without the opening of a demanded call.

    Raises:
        TemplateError: a call is demanded, and the chat template writes none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        request: ChatRequest,
        prompt_ids: Sequence[int],
    ) -> None:
        self._template, self._request = template, request
        self._ends = {*tokenizer.all_special_ids, *request.params.stop_token_ids}
        self._format = detect_format(template.source)
        self._opened = opened_thought(template.decode(prompt_ids[-_TAIL:]))
        texts = [call_opening(template, self._format, request.messages, name) for name in request.must_call]
        self._openings = [template.encode(text) for text in texts]
        self._opening: list[int] = []
        self._demanded: str | None = None

    async def demand(self, prompt_ids: Sequence[int], draw: DrawToken) -> list[int]:
        """The prompt's ids with the opening of the call that the request demands, if any.

        Args:
            draw: the model's next token, which chooses among several tools.
        """
        if self._openings:
            chosen = await choose_opening(self._openings, prompt_ids, draw)
            self._opening, self._demanded = self._openings[chosen], self._request.must_call[chosen]
        return [*prompt_ids, *self._opening]

    def read(self, token_ids: Sequence[int], finish_reason: str) -> Called:
        """The response that was sampled after the prompt of :meth:`demand`."""
        ids = list(token_ids)
        if finish_reason == "stop" and ids and ids[-1] in self._ends:
            ids.pop()
        text = self._template.decode([*self._opening, *ids])
        parsed = parse_response(text, self._format, self._request.tools, self._opened)
        functions = function_calls(parsed, self._demanded, self._template.decode(ids).strip())
        if not self._request.parallel_calls:
            functions = functions[:1]
        # Nine letters and digits are the only form of an id that the chat templates of Mistral take.
        calls = [{"id": uuid.uuid4().hex[:9], "type": "function", "function": one} for one in functions]
        content = parsed.content if parsed.calls or not calls else ""
        return Called(visible_text(content, self._request.params), parsed.reasoning, calls)
