"""Demonstrations for supervised training: prompt and response as one sequence, loss on the response alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from roll.config.data import DataArguments
from roll.datasets.assistant_turns import AssistantTurns, Masked, read_dialogue, spans_of
from roll.datasets.columns import Columns, Message, require, with_system
from roll.datasets.images import ImageReader
from roll.datasets.making import Draft, RowMaker
from roll.datasets.preparation import PreparedRows, load_rows
from roll.datasets.reading import SourceRow
from roll.datasets.templates import Renderer, TemplateChoice, end_of_response, tokenize
from roll.datasets.types import DataError, SftRow
from roll.datasets.vision_model import VisionModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.datasets.store import StoredRow

TrainOn = Literal["last", "assistant"]
DOMAIN = "sft"
"""Domain that demonstrations are counted under."""


class SftDataset(PreparedRows[SftRow]):
    """Demonstrations in file order; draw from it with :class:`roll.datasets.ShuffledEpochs`."""

    @classmethod
    def build(
        cls,
        data_args: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        *,
        global_template: str | None = None,
        tag_to_template: Mapping[str, str] | None = None,
        query_key: str | None = None,
        system_key: str | None = None,
        vision: VisionModel | None = None,
        train_on: TrainOn = "last",
    ) -> SftDataset:
        """Read ``data_args.file_name`` and keep the demonstrations of at most ``sequence_length`` tokens.

        The response is the column ``data_args.response``; in conversations without that column it is the last message,
        which must then be the assistant's.  Prompt and response are tokenised apart, as they are when the model
        generates, and the tokenizer's end-of-turn token closes the response.

        Args:
            query_key: a column appended to the prompt after an empty line (instruction data sets keep inputs apart).
            system_key: a column with the system message of conversations that have none of their own.
            vision: of a model that sees images.
            train_on: ``assistant``: every turn of the assistant carries the loss, as
                :mod:`~roll.datasets.assistant_turns` finds them.

        Raises:
            DataError: a file, row or template that cannot be used, or no row left.
        """
        templates = TemplateChoice.of_settings(data_args, global_template, tag_to_template)
        images = ImageReader.of(data_args, vision)
        keys = query_key, system_key
        maker = sft_maker(data_args, tokenizer, templates, sequence_length, keys, images, train_on)
        return cls(*load_rows(maker))

    def _row(self, position: int) -> SftRow:
        store = self._store
        input_ids = store.token_ids(position)
        return SftRow(
            row_id=store.value("id", position),
            tag=store.value("tag", position),
            input_ids=input_ids,
            prompt_length=store.value("prompt_length", position),
            vision=self._vision(position, (store.row(position) or {}) if self._images is not None else {}, input_ids),
            spans=store.spans(position),
        )


def sft_maker(
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    templates: TemplateChoice,
    sequence_length: int,
    keys: tuple[str | None, str | None],
    images: ImageReader,
    train_on: TrainOn,
) -> RowMaker[Any]:
    """The maker of demonstrations.

    Args:
        keys: ``query_key`` and ``system_key``.

    Raises:
        DataError: no file, a tokenizer without an end of text, or a template that cannot be used.
    """
    renderer = Renderer(tokenizer, templates)
    query_key, system_key = keys
    if train_on == "assistant":
        return DialogueMaker(data_args, renderer, sequence_length, system_key, images)
    return SftMaker(data_args, renderer, sequence_length, query_key, system_key, images)


class DialogueMaker(RowMaker[Masked]):
    """Makes demonstrations in which every turn of the assistant carries the loss."""

    what, limit_key, example = "demonstrations", "sequence_length", "data/sft.jsonl"

    def __init__(
        self, data_args: DataArguments, renderer: Renderer, limit: int, system_key: str | None, images: ImageReader
    ) -> None:
        super().__init__(data_args, renderer, limit, images)
        self._end = end_of_response(renderer.tokenizer)
        self._system_key = system_key
        self._turns = AssistantTurns(renderer.tokenizer, renderer.templates)

    def settings(self) -> dict[str, Any]:
        return {"train_on": "assistant", "eos_token": self._end, "system_key": self._system_key}

    def read(self, source: SourceRow) -> tuple[list[Message], list[Any] | None]:
        messages, tools = read_dialogue(self.columns, source)
        return with_system(messages, column_of(source, self._system_key)), tools

    def tokenize(self, drafts: Sequence[Draft]) -> list[Masked | DataError]:
        return [self._turns(replace(draft, tools=draft.content)) for draft in drafts]

    def expand(self, draft: Draft, tokens: Masked) -> Masked:
        ids = self.images.expand(draft.source, tokens.token_ids, draft.vision)
        if draft.vision is None:
            return replace(tokens, token_ids=ids)
        widths = zip(self.images.widths(tokens.token_ids, draft.vision), tokens.mask, strict=True)
        return Masked(ids, [flag for (_, count), flag in widths for _ in range(count)])

    def finish(self, draft: Draft, tokens: Masked) -> StoredRow | None:
        length = len(tokens.token_ids)
        if length > self.limit:
            self.tally.leave_out(DOMAIN, length)
            return None
        spans, row = spans_of(tokens.mask), None if draft.vision is None else self.images.row_of(draft.source)
        return self.stored(draft, DOMAIN, tokens.token_ids, spans[0], row, spans=spans)


class SftMaker(RowMaker[tuple[list[int], list[int]]]):
    """Makes demonstrations in which the response alone carries the loss: ids of the prompt and of the response."""

    what, limit_key, example = "demonstrations", "sequence_length", "data/sft.jsonl"

    def __init__(
        self,
        data_args: DataArguments,
        renderer: Renderer,
        limit: int,
        query_key: str | None,
        system_key: str | None,
        images: ImageReader,
    ) -> None:
        super().__init__(data_args, renderer, limit, images)
        self._end = end_of_response(renderer.tokenizer)
        self._query_key, self._system_key = query_key, system_key

    def settings(self) -> dict[str, Any]:
        return {"query_key": self._query_key, "system_key": self._system_key, "eos_token": self._end}

    def read(self, source: SourceRow) -> tuple[list[Message], str]:
        messages, response = read_demonstration(self.columns, source, self._query_key)
        return with_system(messages, column_of(source, self._system_key)), response

    def tokenize(self, drafts: Sequence[Draft]) -> list[tuple[list[int], list[int]] | DataError]:
        texts = [f"{draft.content}{self._end}" for draft in drafts]
        responses = tokenize(self.renderer.tokenizer, texts, [False] * len(texts))
        pairs = zip(self.renderer(drafts), responses, strict=True)
        return [prompt if isinstance(prompt, DataError) else (prompt.token_ids, response) for prompt, response in pairs]

    def expand(self, draft: Draft, tokens: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
        prompt, response = tokens
        return self.images.expand(draft.source, prompt, draft.vision), response

    def finish(self, draft: Draft, tokens: tuple[list[int], list[int]]) -> StoredRow | None:
        prompt, response = tokens
        length = len(prompt) + len(response)
        if length > self.limit:
            self.tally.leave_out(DOMAIN, length)
            return None
        row = None if draft.vision is None else self.images.row_of(draft.source)
        return self.stored(draft, DOMAIN, prompt + response, len(prompt), row)


def column_of(source: SourceRow, name: str | None) -> Any:
    """The row's value in a column that may have no name, or may not be there."""
    return None if name is None else source.row.get(name)


def read_demonstration(columns: Columns, source: SourceRow, query_key: str | None = None) -> tuple[list[Message], str]:
    """The conversation up to the response, and the response.

    Raises:
        DataError: no response, or one that is not a text.
    """
    messages = columns.read_messages(source)
    if columns.response in source.row:
        response = require(source, columns.response)
    elif messages[-1]["role"] == "assistant":
        response = messages.pop()["content"]
        if not messages:
            raise DataError(f"{source.place}: the conversation has only an answer; expected a user's message before it")
    else:
        raise DataError(
            f"{source.place}: no response: neither a column {columns.response!r} (data_args.response) among "
            f"{sorted(source.row)} nor a last message from the assistant"
        )
    if not isinstance(response, str) or not response:
        raise DataError(f"{source.place}: the response must be a non-empty text, found {response!r}")
    if query := column_of(source, query_key):
        content, further = messages[-1]["content"], f"\n\n{query}"
        parts = [*content, {"type": "text", "text": further}] if isinstance(content, list) else f"{content}{further}"
        messages[-1] = {**messages[-1], "content": parts}
    return messages, response
