"""Responses in OpenAI's form, whole and as a stream of events."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.rollout.groups import FinishedGroup
from roll.serving.requests import ParsedRequest
from roll.serving.service import EngineService, Overloaded, Refused, Unavailable
from roll.strategies.engines.requests import GenerationOutput, PromptScore, SamplingParams, visible_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ResponseBody:
    """The samples of every prompt of a request."""

    parsed: ParsedRequest
    prompts: Sequence[Sequence[int]]
    groups: Sequence[FinishedGroup]
    echoed: Sequence[PromptScore] | None = None
    """With ``echo``: log-probs of each prompt."""
    scored: Sequence[PromptScore] | None = None
    """With ``prompt_logprobs``: log-probs of each prompt."""

    def choices(self) -> Iterator[Choice]:
        """The samples of all prompts, numbered on from one prompt to the next."""
        index = 0
        echoed: Sequence[PromptScore | None] = self.echoed or [None] * len(self.prompts)
        scored: Sequence[PromptScore | None] = self.scored or [None] * len(self.prompts)
        for prompt, group, score, of_prompt in zip(self.prompts, self.groups, echoed, scored, strict=True):
            token_ids, log_probs = group.split(group.token_ids), group.split(group.log_probs)
            for sample in range(len(group.lengths)):
                yield Choice(
                    index=index,
                    text=group.texts[sample],
                    finish_reason=group.finish_reasons[sample],
                    token_ids=token_ids[sample].tolist(),
                    log_probs=log_probs[sample].tolist(),
                    top_log_probs=group.top_log_probs[sample] if group.top_log_probs else [],
                    prompt_token_ids=list(prompt),
                    echoed=score,
                    scored=of_prompt,
                )
                index += 1

    def usage(self) -> dict[str, int]:
        prompt = sum(len(token_ids) for token_ids in self.prompts)
        completion = int(sum(group.lengths.sum() for group in self.groups))
        return usage_of(prompt, completion)


@dataclass(frozen=True)
class Choice:
    """One sample, or the new piece of one that is streamed."""

    index: int
    text: str
    finish_reason: str
    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]
    prompt_token_ids: list[int]
    text_offset: int = 0
    """Position of the first token in the sample's text; 0 but for the later pieces of a stream."""
    echoed: PromptScore | None = None
    """Log-probs of the prompt, where the response begins with it (``echo``)."""
    scored: PromptScore | None = None
    """Log-probs of the prompt, where ``prompt_logprobs`` asks for them."""


class Writer:
    """Bodies of one endpoint.

    Args:
        chat: chat completions; False: completions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._chat = chat

    def body(self, response: ResponseBody) -> dict[str, Any]:
        """Body of a response that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(choice, response.parsed) for choice in response.choices()]
        ids = {"prompt_token_ids": list(response.prompts[0])} if self._chat and response.parsed.return_token_ids else {}
        return self._head(kind) | {"choices": choices, "usage": response.usage()} | ids

    def stream_head(self) -> dict[str, Any]:
        """Fields that all chunks of a stream have in common."""
        return self._head("chat.completion.chunk" if self._chat else "text_completion")

    def opening(self, head: dict[str, Any], index: int) -> Iterator[bytes]:
        """Events before the first piece of a sample."""
        if self._chat:
            start = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield event(head | {"choices": [start]})

    def piece(self, head: dict[str, Any], choice: Choice, parsed: ParsedRequest) -> bytes:
        """Event with new tokens and text of a sample."""
        body = self._choice(choice, parsed)
        body["finish_reason"] = body["finish_reason"] or None
        if self._chat:
            body["delta"] = {"content": body.pop("message")["content"]}
        return event(head | {"choices": [body]})

    def last_pieces(self, head: dict[str, Any], choice: Choice, parsed: ParsedRequest) -> Iterator[bytes]:
        """Events with the rest of a sample, and why it ended."""
        if not self._chat:
            yield self.piece(head, choice, parsed)
            return
        if choice.token_ids or choice.text:
            yield self.piece(head, replace(choice, finish_reason=""), parsed)
        last = {"index": choice.index, "delta": {}, "finish_reason": choice.finish_reason}
        yield event(head | {"choices": [last]})

    def closing(self, head: dict[str, Any], response: ResponseBody) -> Iterator[bytes]:
        """Events after the last sample."""
        if response.parsed.include_usage:
            yield event(head | {"choices": [], "usage": response.usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._model}

    def _choice(self, choice: Choice, parsed: ParsedRequest) -> dict[str, Any]:
        body: dict[str, Any] = (
            {"message": {"role": "assistant", "content": choice.text}} if self._chat else {"text": self._shown(choice)}
        )
        log_probs = None
        if parsed.log_probs:
            log_probs = self._chat_log_probs(choice) if self._chat else self._completion_log_probs(choice)
        ids: dict[str, Any] = {"token_ids": choice.token_ids} if parsed.return_token_ids else {}
        if ids and not self._chat:
            ids["prompt_token_ids"] = choice.prompt_token_ids
        body |= {"logprobs": log_probs, "finish_reason": choice.finish_reason}
        if choice.scored is not None:
            body["prompt_logprobs"] = self._prompt_log_probs(choice.prompt_token_ids, choice.scored)
        return {"index": choice.index} | body | ids

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

    def _shown(self, choice: Choice) -> str:
        """The text, after the prompt's where the request has ``echo``."""
        prompt = "" if choice.echoed is None else str(self._tokenizer.decode(choice.prompt_token_ids))
        return prompt + choice.text

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
        return {
            "tokens": texts,
            "token_logprobs": log_probs,
            "top_logprobs": tops or None,
            "text_offset": offsets[:-1],
        }

    def _by_text(self, log_probs: Sequence[tuple[int, float]]) -> dict[str, float]:
        return {self._text(token): _finite(value) for token, value in log_probs}


def _finite(log_prob: float) -> float:
    """The log-prob, or -9999 for the minus infinity of a token that cannot be sampled, which JSON does not have."""
    return max(log_prob, -9999.0)


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def error_body(message: str, kind: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


UNFINISHED_CHARACTER = "\ufffd"


class LiveResponse:
    """Prompts of one request in flight at an engine service, and their response as it grows."""

    def __init__(self, service: EngineService, parsed: ParsedRequest, prompts: Sequence[Sequence[int]]) -> None:
        self._parsed = parsed
        self._prompts = prompts
        self._grown: dict[int, Sequence[GenerationOutput]] = {}
        self._changed = asyncio.Event()
        self._tasks = [
            asyncio.create_task(
                service.generate(prompt, parsed.params, parsed.num_samples, partial(self._record, number))
            )
            for number, prompt in enumerate(prompts)
        ]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._changed.set())

    def _record(self, number: int, samples: Sequence[GenerationOutput]) -> None:
        self._grown[number] = samples
        self._changed.set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for something new; False if ``seconds`` pass without.

        Raises:
            Overloaded, Unavailable, Refused: one of the prompts is not served.
        """
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        for task in self._tasks:
            if task.done():
                task.result()
        return True

    async def events(self, writer: Writer, tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[bytes]:
        """Server-sent events, from the first to the last."""
        parsed, size = self._parsed, self._parsed.num_samples
        samples = [
            GrowingSample(tokenizer, parsed.params, index, list(self._prompts[index // size]))
            for index in range(size * len(self._prompts))
        ]
        head = writer.stream_head()
        try:
            for sample in samples:
                for piece in writer.opening(head, sample.index):
                    yield piece
            open_prompts = set(range(len(self._prompts)))
            while open_prompts:
                await self.wait()
                self._changed.clear()
                for number, grown in self._take_grown():
                    for output in grown:
                        choice = samples[number * size + output.sample_index].grow(output)
                        if choice is not None:
                            yield writer.piece(head, choice, parsed)
                for number in sorted(n for n in open_prompts if self._tasks[n].done()):
                    open_prompts.remove(number)
                    for choice in self._ends(number, samples[number * size : (number + 1) * size]):
                        for piece in writer.last_pieces(head, choice, parsed):
                            yield piece
            response = ResponseBody(parsed, self._prompts, [task.result() for task in self._tasks])
            for piece in writer.closing(head, response):
                yield piece
        except (Overloaded, Refused, Unavailable) as error:
            # The status has been sent long since.
            yield event(error_body(str(error), "server_error"))
        finally:
            self.close()

    def _take_grown(self) -> list[tuple[int, Sequence[GenerationOutput]]]:
        grown, self._grown = self._grown, {}
        return [(number, samples) for number, samples in grown.items() if not self._tasks[number].done()]

    def _ends(self, number: int, samples: Sequence[GrowingSample]) -> Iterator[Choice]:
        group: FinishedGroup = self._tasks[number].result()
        for choice, sample in zip(
            ResponseBody(self._parsed, [self._prompts[number]], [group]).choices(), samples, strict=True
        ):
            yield sample.end(choice)

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
    token_text: str = field(default="", repr=False)
    """Text of the tokens that have been sent, each decoded by itself."""

    def grow(self, output: GenerationOutput) -> Choice | None:
        """New text and tokens since the last call; None: nothing that can be shown."""
        text = settled_text(self.tokenizer, self.params, output.token_ids)
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


def settled_text(tokenizer: PreTrainedTokenizerBase, params: SamplingParams, token_ids: Sequence[int]) -> str:
    """The visible text of an unfinished response as far as no further token changes it: without a character of which
    bytes are missing, and without what may be the beginning of a stop string."""
    text = visible_text(str(tokenizer.decode(list(token_ids), skip_special_tokens=True)), params)
    text = text.rstrip(UNFINISHED_CHARACTER)
    longest = max((_overlap(text, stop) for stop in params.stop_strings), default=0)
    return text[: len(text) - longest]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that ``stop`` begins with."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
