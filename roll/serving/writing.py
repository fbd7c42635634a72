"""Completions and chat completions of a served model, whole and as a stream of events."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.agents.chat_ids import ChatTemplate
from roll.agents.tool_calls import DrawToken, call_opening, choose_opening, detect_format, parse_response
from roll.rollout.groups import FinishedGroup
from roll.serving.dialects.chat import chat_message, chunk, closing
from roll.serving.dialects.requests import ChatRequest, ModelRequest, head, usage_of
from roll.serving.http import Refusal, event
from roll.serving.service import EngineService
from roll.strategies.engines.requests import GenerationOutput, PromptScore, SamplingParams, visible_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CallReader:
    """Finds the calls in the responses to one request that offers tools, in the format that the chat template writes.
    ``template``: with the request's tools; ``prompt_ids``: the prompt, without the opening of a demanded call. Raises
    ``TemplateError``: a call is demanded, and the chat template writes none."""

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
        self._opened = template.opened_thought(prompt_ids)
        texts = [call_opening(template, self._format, request.messages, name) for name in request.must_call]
        self._openings = [template.encode(text) for text in texts]
        self._opening: list[int] = []
        self._demanded: str | None = None

    async def demand(self, prompt_ids: Sequence[int], draw: DrawToken) -> list[int]:
        """The prompt's ids with the opening of the call that the request demands, if any; ``draw`` samples the next
        token, which chooses among several tools."""
        if self._openings:
            chosen = await choose_opening(self._openings, prompt_ids, draw)
            self._opening, self._demanded = self._openings[chosen], self._request.must_call[chosen]
        return [*prompt_ids, *self._opening]

    def read(self, token_ids: Sequence[int], finish_reason: str) -> tuple[str, str, list[dict[str, Any]]]:
        """The response that was sampled after the prompt of :meth:`demand`: content, reasoning, and calls with ``id``
        and ``function``, which has ``name`` and ``arguments``."""
        ids = list(token_ids)
        if finish_reason == "stop" and ids and ids[-1] in self._ends:
            ids.pop()
        text = self._template.decode([*self._opening, *ids])
        forced = None if self._demanded is None else (self._demanded, self._template.decode(ids))
        parsed = parse_response(text, self._format, self._request.tools, self._opened, forced)
        functions = parsed.functions if self._request.parallel_calls else parsed.functions[:1]
        # Nine letters and digits are the only form of an id that the chat templates of Mistral take.
        calls = [{"id": uuid.uuid4().hex[:9], "type": "function", "function": one} for one in functions]
        return visible_text(parsed.content, self._request.params), parsed.reasoning, calls


@dataclass(frozen=True)
class Choice:
    """One sample, or the new piece of one that is streamed."""

    index: int  # numbered on from one prompt to the next
    text: str
    finish_reason: str
    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]
    prompt_token_ids: list[int]
    text_offset: int = 0  # position of the first token in the sample's text; 0 but for the later pieces of a stream
    echoed: PromptScore | None = None  # log-probs of the prompt, where the response begins with it (`echo`)
    scored: PromptScore | None = None  # log-probs of the prompt, where the request sets `prompt_logprobs`


def choices_of(
    prompt: Sequence[int], group: FinishedGroup, echoed: PromptScore | None = None, scored: PromptScore | None = None
) -> Iterator[Choice]:
    """The samples of one prompt."""
    token_ids, log_probs = group.split(group.token_ids), group.split(group.log_probs)
    for index in range(len(group.lengths)):
        yield Choice(
            index=index,
            text=group.texts[index],
            finish_reason=group.finish_reasons[index],
            token_ids=token_ids[index].tolist(),
            log_probs=log_probs[index].tolist(),
            top_log_probs=group.top_log_probs[index] if group.top_log_probs else [],
            prompt_token_ids=list(prompt),
            echoed=echoed,
            scored=scored,
        )


def usage_of_groups(prompts: Sequence[Sequence[int]], groups: Sequence[FinishedGroup]) -> dict[str, int]:
    """Numbers of tokens."""
    return usage_of(sum(map(len, prompts)), int(sum(group.lengths.sum() for group in groups)))


class Writer:
    """The body of the response to one request; ``calls``: of one that offers tools, which is not streamed token by
    token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, request: ModelRequest, calls: CallReader | None = None
    ) -> None:
        self._tokenizer, self._request, self._calls = tokenizer, request, calls
        self.chat = isinstance(request, ChatRequest)  # a chat completion; False: a completion
        prefix, kind = ("chatcmpl-", "chat.completion") if self.chat else ("cmpl-", "text_completion")
        self._head = head(prefix, f"{kind}.chunk" if self.chat and request.stream else kind, request.model)

    def body(
        self,
        prompts: Sequence[Sequence[int]],
        groups: Sequence[FinishedGroup],
        echoed: Sequence[PromptScore] | None = None,
        scored: Sequence[PromptScore] | None = None,
    ) -> dict[str, Any]:
        """Body of a response that is not streamed; ``echoed``, ``scored``: of each prompt, as in :class:`Choice`."""
        none: list[PromptScore | None] = [None] * len(prompts)
        found = zip(prompts, groups, echoed or none, scored or none, strict=True)
        every = (choice for one in found for choice in choices_of(*one))
        choices = [self._choice(replace(choice, index=index)) for index, choice in enumerate(every)]
        with_ids = self.chat and self._request.return_token_ids
        ids = {"prompt_token_ids": list(prompts[0])} if with_ids else {}
        return self._head | {"choices": choices, "usage": usage_of_groups(prompts, groups)} | ids

    def _choice(self, choice: Choice) -> dict[str, Any]:
        log_probs = self._chat_log_probs if self.chat else self._completion_log_probs
        body: dict[str, Any] = {
            "index": choice.index,
            "logprobs": log_probs(choice) if self._request.log_probs else None,
            "finish_reason": choice.finish_reason,
        }
        if self.chat:
            body["message"] = {"role": "assistant", "content": choice.text}
            if self._calls is not None:
                content, reasoning, calls = self._calls.read(choice.token_ids, choice.finish_reason)
                body["message"] = chat_message(content, reasoning, calls)
                body["finish_reason"] = "tool_calls" if calls else choice.finish_reason
        else:
            echo = "" if choice.echoed is None else str(self._tokenizer.decode(choice.prompt_token_ids))
            body["text"] = echo + choice.text
        if choice.scored is not None:
            body["prompt_logprobs"] = self._prompt_log_probs(choice.prompt_token_ids, choice.scored)
        if self._request.return_token_ids:
            body["token_ids"] = choice.token_ids
            if not self.chat:
                body["prompt_token_ids"] = choice.prompt_token_ids
        return body

    def _prompt_log_probs(self, token_ids: Sequence[int], score: PromptScore) -> list[dict[str, Any] | None]:
        """Log-probs in vLLM's form: for each position an object of token id to log-prob, rank and text, the prompt's
        own token first; None for the first position."""
        rows: list[dict[str, Any] | None] = [None]
        for token, own, rank, others in zip(token_ids[1:], score.log_probs, score.ranks, score.top, strict=True):
            row = {token: (own, rank)} | {other: (value, place) for place, (other, value) in enumerate(others, 1)}
            rows.append(
                {
                    str(other): {"logprob": _finite(value), "rank": place, "decoded_token": self._text(other)}
                    for other, (value, place) in row.items()
                }
            )
        return rows

    def _text(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))

    def _chat_log_probs(self, choice: Choice) -> dict[str, Any]:
        top_log_probs = choice.top_log_probs or [[] for _ in choice.token_ids]
        return {
            "content": [
                self._token(token, value) | {"top_logprobs": [self._token(*other) for other in others]}
                for token, value, others in zip(choice.token_ids, choice.log_probs, top_log_probs, strict=True)
            ]
        }

    def _token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {"token": text, "logprob": _finite(log_prob), "bytes": list(text.encode("utf-8"))}

    def _completion_log_probs(self, choice: Choice) -> dict[str, Any]:
        token_ids = choice.token_ids
        log_probs: list[float | None] = [*map(_finite, choice.log_probs)]
        tops: list[dict[str, float] | None] = [*map(self._by_text, choice.top_log_probs)]
        if choice.echoed is not None:
            token_ids = [*choice.prompt_token_ids, *token_ids]
            log_probs = [None, *map(_finite, choice.echoed.log_probs), *log_probs]
            tops = [None, *map(self._by_text, choice.echoed.top), *tops] if tops else []
        texts = [self._text(token) for token in token_ids]
        offsets = list(itertools.accumulate(map(len, texts), initial=choice.text_offset))
        return {"tokens": texts, "token_logprobs": log_probs, "top_logprobs": tops or None, "text_offset": offsets[:-1]}

    def _by_text(self, log_probs: Sequence[tuple[int, float]]) -> dict[str, float]:
        return {self._text(token): _finite(value) for token, value in log_probs}


def _finite(log_prob: float) -> float:
    # Minus infinity, of a token that cannot be sampled, is not in JSON.
    return max(log_prob, -9999.0)


class LiveResponse(Writer):
    """Prompts of one request in flight at an engine service, and their response as it grows."""

    def __init__(
        self,
        service: EngineService,
        tokenizer: PreTrainedTokenizerBase,
        request: ModelRequest,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(tokenizer, request)
        self._prompts = prompts
        size = request.num_samples
        # Samples of each prompt.
        self._samples = [
            [GrowingSample(tokenizer, request.params, first + index, list(prompt)) for index in range(size)]
            for first, prompt in zip(itertools.count(0, size), prompts)
        ]
        self._grown: dict[int, Sequence[GenerationOutput]] = {}  # number of a prompt to its samples so far
        self._changed = asyncio.Event()
        self._tasks = [
            asyncio.create_task(service.generate(prompt, request.params, size, partial(self._record, number)))
            for number, prompt in enumerate(prompts)
        ]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._changed.set())

    def _record(self, number: int, samples: Sequence[GenerationOutput]) -> None:
        self._grown[number] = samples
        self._changed.set()

    async def wait(self) -> None:
        """Wait for something new; raises the ``Refusal`` of a prompt that is not served."""
        await self._changed.wait()
        for task in self._tasks:
            if task.done():
                task.result()

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, from the first to the last."""
        try:
            for sample in itertools.chain(*self._samples) if self.chat else ():
                yield chunk(self._head, {"index": sample.index, "delta": {"role": "assistant", "content": ""}})
            open_prompts = set(range(len(self._prompts)))
            while open_prompts:
                await self.wait()
                self._changed.clear()
                grown, self._grown = self._grown, {}
                ended = sorted(number for number in open_prompts if self._tasks[number].done())
                open_prompts -= set(ended)
                for number in sorted(grown.keys() & open_prompts):
                    for output in grown[number]:
                        choice = self._samples[number][output.sample_index].grow(output)
                        if choice is not None:
                            yield self._piece(choice)
                for number in ended:
                    choices = choices_of(self._prompts[number], self._tasks[number].result())
                    for sample, choice in zip(self._samples[number], choices, strict=True):
                        last = sample.end(choice)
                        if not self.chat:
                            yield self._piece(last)
                            continue
                        if last.token_ids or last.text:
                            yield self._piece(replace(last, finish_reason=""))
                        yield chunk(self._head, {"index": last.index, "delta": {}}, last.finish_reason)
            usage = usage_of_groups(self._prompts, [task.result() for task in self._tasks])
            for ending in closing(self._head, usage if self._request.include_usage else None):
                yield ending
        except Refusal as refusal:  # the status has been sent long since
            yield event(refusal.openai)
        finally:
            self.close()

    def _piece(self, choice: Choice) -> bytes:
        """Event with new tokens and text of a sample."""
        body = self._choice(choice)
        if self.chat:
            body["delta"] = {"content": body.pop("message")["content"]}
        return chunk(self._head, body, choice.finish_reason or None)

    def close(self) -> None:
        """Drop the prompts that are still in flight."""
        for task in self._tasks:
            task.cancel()


@dataclass
class GrowingSample:
    """A sample as far as it has been sent. Texts and tokens are sent once each, in their order; text that
    a further token may change waits."""

    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    index: int
    prompt_token_ids: list[int]
    sent: str = ""
    num_tokens: int = 0
    token_text: str = field(default="", repr=False)  # text of the tokens that have been sent, each decoded by itself

    def grow(self, output: GenerationOutput) -> Choice | None:
        """New text and tokens since the last call; None: nothing that can be shown."""
        # The text as far as no further token changes it: without a character of which bytes are missing (U+FFFD), and
        # without what may be the beginning of a stop string.
        text = visible_text(str(self.tokenizer.decode(list(output.token_ids), skip_special_tokens=True)), self.params)
        text = text.rstrip("\ufffd")
        begun = (stop[:size] for stop in self.params.stop_strings for size in range(1, len(stop) + 1))
        text = text[: len(text) - max((len(part) for part in begun if text.endswith(part)), default=0)]
        # What has been sent cannot be taken back: a text that changed before its end waits for one that continues it.
        if not text.startswith(self.sent) or len(text) == len(self.sent):
            return None
        return self._new(text, "", output)

    def end(self, choice: Choice) -> Choice:
        """The rest of the finished sample."""
        text = choice.text if choice.text.startswith(self.sent) else self.sent
        return self._new(text, choice.finish_reason, choice)

    def _new(self, text: str, finish_reason: str, sample: Choice | GenerationOutput) -> Choice:
        begin, end = self.num_tokens, len(sample.token_ids)
        choice = Choice(
            index=self.index,
            text=text[len(self.sent) :],
            finish_reason=finish_reason,
            token_ids=list(sample.token_ids[begin:]),
            log_probs=list(sample.log_probs[begin:]),
            top_log_probs=list(sample.top_log_probs[begin:end]),
            prompt_token_ids=self.prompt_token_ids,
            text_offset=len(self.token_text),
        )
        self.token_text += "".join(str(self.tokenizer.decode([token])) for token in choice.token_ids)
        self.sent, self.num_tokens = text, end
        return choice
