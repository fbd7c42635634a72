"""Answers while they grow: what is new of every sample, as often as its engine reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from roll.rollout.groups import FinishedGroup
from roll.serving.requests import Question
from roll.serving.responses import Answer, Choice, Writer, error_body, event
from roll.serving.service import EngineService, Overloaded, Refused, Unavailable
from roll.strategies.generation import GenerationOutput, SamplingParams, visible_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED_CHARACTER = "\ufffd"


class LiveAnswer:
    """The prompts of one request under way at an engine service."""

    def __init__(self, service: EngineService, question: Question, prompts: Sequence[Sequence[int]]) -> None:
        self._question = question
        self._prompts = prompts
        self._grown: dict[int, Sequence[GenerationOutput]] = {}
        self._changed = asyncio.Event()
        self._asked = [
            asyncio.create_task(
                service.generate(prompt, question.params, question.num_samples, partial(self._note, number))
            )
            for number, prompt in enumerate(prompts)
        ]
        for task in self._asked:
            task.add_done_callback(lambda _: self._changed.set())

    def _note(self, number: int, samples: Sequence[GenerationOutput]) -> None:
        self._grown[number] = samples
        self._changed.set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Whether there is news within ``seconds``.

        Raises:
            Overloaded, Unavailable, Refused: the answer to one of the prompts.
        """
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        for task in self._asked:
            if task.done():
                task.result()
        return True

    async def events(self, writer: Writer, tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[bytes]:
        """Server-sent events, from the first to the last."""
        question, size = self._question, self._question.num_samples
        samples = [
            GrowingSample(tokenizer, question.params, index, list(self._prompts[index // size]))
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
                            yield writer.piece(head, choice, question)
                for number in sorted(n for n in open_prompts if self._asked[n].done()):
                    open_prompts.remove(number)
                    for choice in self._ends(number, samples[number * size : (number + 1) * size]):
                        for piece in writer.last_pieces(head, choice, question):
                            yield piece
            answer = Answer(question, self._prompts, [task.result() for task in self._asked])
            for piece in writer.closing(head, answer):
                yield piece
        except (Overloaded, Refused, Unavailable) as error:
            # The status has been sent long since.
            yield event(error_body(str(error), "server_error"))
        finally:
            self.close()

    def _take_grown(self) -> list[tuple[int, Sequence[GenerationOutput]]]:
        grown, self._grown = self._grown, {}
        return [(number, samples) for number, samples in grown.items() if not self._asked[number].done()]

    def _ends(self, number: int, samples: Sequence[GrowingSample]) -> Iterator[Choice]:
        group: FinishedGroup = self._asked[number].result()
        for choice, sample in zip(
            Answer(self._question, [self._prompts[number]], [group]).choices(), samples, strict=True
        ):
            yield sample.end(choice)

    def close(self) -> None:
        """Whoever asked waits no more: what is under way is dropped."""
        for task in self._asked:
            task.cancel()


@dataclass
class GrowingSample:
    """What has been said of a sample, and what is new. Texts and tokens are said once each, in their order; text that
    a further token may change waits."""

    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    index: int
    prompt_token_ids: list[int]
    said: str = ""
    num_tokens: int = 0
    token_text: str = field(default="", repr=False)
    """Of the tokens that have been said, each by itself."""

    def grow(self, output: GenerationOutput) -> Choice | None:
        """What is new since the last call; None: nothing that can be shown."""
        text = settled_text(self.tokenizer, self.params, output.token_ids)
        if not text.startswith(self.said) or len(text) == len(self.said):
            return None
        return self._new(text, "", output.token_ids, output.log_probs, output.top_log_probs)

    def end(self, choice: Choice) -> Choice:
        """The rest of the finished sample."""
        text = choice.text if choice.text.startswith(self.said) else self.said
        return self._new(text, choice.finish_reason, choice.token_ids, choice.log_probs, choice.likeliest)

    def _new(
        self,
        text: str,
        finish_reason: str,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        likeliest: Sequence[list[tuple[int, float]]],
    ) -> Choice:
        begin, end = self.num_tokens, len(token_ids)
        choice = Choice(
            index=self.index,
            text=text[len(self.said) :],
            finish_reason=finish_reason,
            token_ids=list(token_ids[begin:]),
            log_probs=list(log_probs[begin:]),
            likeliest=list(likeliest[begin:end]),
            prompt_token_ids=self.prompt_token_ids,
            text_offset=len(self.token_text),
        )
        self.token_text += "".join(str(self.tokenizer.decode([token])) for token in choice.token_ids)
        self.said, self.num_tokens = text, end
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
