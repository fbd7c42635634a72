"""Demonstrations for supervised training: prompt and response as one sequence, loss on the response alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from roll.config.data import DataArguments
from roll.datasets.assistant_turns import AssistantTurns, Masked, read_dialogue, spans_of
from roll.datasets.columns import Columns, Message, require
from roll.datasets.images import ImageReader, PreparedImages
from roll.datasets.making import RowMaker
from roll.datasets.preparation import PreparedRows, prepare
from roll.datasets.reading import SourceRow
from roll.datasets.templates import Conversation, Renderer, TemplateChoice, tokenize
from roll.datasets.types import BadRows, DataError, SftRow
from roll.datasets.vision_model import VisionModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.datasets.store import RowStore, StoredRow
    from roll.protocol.vision import VisionInputs

logger = logging.getLogger(__name__)

TrainOn = Literal["last", "assistant"]
DOMAIN = "sft"
"""Domain that demonstrations are counted under."""


class SftDataset(PreparedRows[SftRow]):
    """Demonstrations in file order; draw from it with :class:`roll.datasets.ShuffledEpochs`."""

    def __init__(self, store: RowStore, images: PreparedImages | None = None) -> None:
        super().__init__(store)
        self._images = images

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
        vision: VisionModel | None = None,
        train_on: TrainOn = "last",
    ) -> SftDataset:
        """Read ``data_args.file_name`` and keep the demonstrations of at most ``sequence_length`` tokens.

        The response is the column ``data_args.response``; in conversations without that column it is the last message,
        which must then be the assistant's.  Prompt and response are tokenised apart, as they are when the model
        generates, and the tokenizer's end-of-turn token closes the response.

        Args:
            query_key: a column appended to the prompt after an empty line (instruction data sets keep inputs apart).
            vision: of a model that sees images.
            train_on: ``assistant``: every turn of the assistant carries the loss, as
                :mod:`~roll.datasets.assistant_turns` finds them.

        Raises:
            DataError: a file, row or template that cannot be used, or no row left.
        """
        templates = TemplateChoice.of_settings(data_args, global_template, tag_to_template)
        images = ImageReader.of(data_args, vision)
        maker = sft_maker(data_args, tokenizer, templates, sequence_length, query_key, images, train_on)
        store, paths = prepare(maker)
        files = ", ".join(str(path) for path in paths)
        logger.info("%s: %s (sequence_length %d)", files, store.counts, sequence_length)
        return cls(store, PreparedImages(images, data_args, paths) if vision is not None else None)

    def _row(self, position: int) -> SftRow:
        store = self._store
        input_ids, vision = store.token_ids(position), None
        if self._images is not None:
            place = store.value("file", position), store.value("number", position)
            vision = self._images.of(store.row(position) or {}, input_ids, *place)
        return SftRow(
            row_id=store.value("id", position),
            tag=store.value("tag", position),
            input_ids=input_ids,
            prompt_length=store.value("prompt_length", position),
            vision=vision,
            spans=store.spans(position),
        )


def sft_maker(
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    templates: TemplateChoice,
    sequence_length: int,
    query_key: str | None,
    images: ImageReader,
    train_on: TrainOn,
) -> RowMaker:
    """Converter of rows as read to demonstrations.

    Raises:
        DataError: no file, a tokenizer without an end of text, or a template that cannot be used.
    """
    if data_args.file_name is None:
        raise DataError("data_args.file_name is not set; for example file_name: data/sft.jsonl")
    if tokenizer.eos_token is None:
        raise DataError(f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token to close a response with")
    renderer = Renderer(tokenizer, templates)
    if train_on == "assistant":
        return DialogueMaker(data_args, renderer, sequence_length, images)
    return SftMaker(data_args, renderer, sequence_length, query_key, images)


class DialogueMaker(RowMaker):
    """Makes demonstrations of which every assistant's turn carries the loss."""

    what, limit_key = "demonstrations", "sequence_length"

    def __init__(self, data_args: DataArguments, renderer: Renderer, limit: int, images: ImageReader) -> None:
        super().__init__(data_args, renderer, limit, images)
        self._turns = AssistantTurns(renderer.tokenizer, renderer.templates)

    def settings(self) -> dict[str, Any]:
        return {"train_on": "assistant", "eos_token": self.renderer.tokenizer.eos_token}

    def make(self, sources: Sequence[SourceRow], bad_rows: BadRows) -> list[StoredRow]:
        dialogues, difficulties, pictures = [], [], []
        for source in sources:
            try:
                one = read_dialogue(self.columns, source, self.renderer.templates)
                messages, vision = self.seen(source, one.messages)
                difficulties.append(self.difficulty(source))
            except DataError as error:
                bad_rows.report(error)
                continue
            dialogues.append(replace(one, messages=messages))
            pictures.append(vision)
        rows = []
        for one, difficulty, vision, masked in zip(
            dialogues, difficulties, pictures, self._turns(dialogues), strict=True
        ):
            try:
                if isinstance(masked, DataError):
                    raise masked
                ids = self.images.expand(one.source, masked.token_ids, vision)
            except DataError as error:
                bad_rows.report(error)
                continue
            if len(ids) > self.limit:
                self.tally.leave_out(DOMAIN, len(ids))
                continue
            mask = masked.mask if ids is masked.token_ids else self._widened(masked, vision)
            spans, row = spans_of(mask), None if vision is None else self.images.row_of(one.source)
            rows.append(self.stored(one, DOMAIN, ids, spans[0], difficulty, row, spans=spans))
        return rows

    def _widened(self, masked: Masked, vision: VisionInputs | None) -> list[bool]:
        """The mask with as many entries for each image and video as it takes."""
        assert self.images.model is not None
        placeholders = {self.images.model.image_token_id, self.images.model.video_token_id}
        runs = iter(vision.runs if vision is not None else ())
        pairs = zip(masked.token_ids, masked.mask, strict=True)
        return [flag for token, flag in pairs for _ in range(next(runs)[1] if token in placeholders else 1)]


class SftMaker(RowMaker):
    """Makes demonstrations out of rows as read."""

    what, limit_key = "demonstrations", "sequence_length"

    def __init__(
        self,
        data_args: DataArguments,
        renderer: Renderer,
        limit: int,
        query_key: str | None,
        images: ImageReader | None = None,
    ) -> None:
        super().__init__(data_args, renderer, limit, images)
        self._query_key = query_key

    def settings(self) -> dict[str, Any]:
        return {"query_key": self._query_key, "eos_token": self.renderer.tokenizer.eos_token}

    def make(self, sources: Sequence[SourceRow], bad_rows: BadRows) -> list[StoredRow]:
        conversations, answers, difficulties, pictures = [], [], [], []
        for source in sources:
            try:
                messages, answer = read_demonstration(self.columns, source, self._query_key)
                difficulty = self.difficulty(source)
                messages, vision = self.seen(source, messages)
            except DataError as error:
                bad_rows.report(error)
                continue
            tag = self.columns.read_tag(source)
            messages = self.renderer.templates.with_system(messages, tag)
            conversations.append(Conversation(source, tag, messages))
            answers.append(answer)
            difficulties.append(difficulty)
            pictures.append(vision)
        tokenizer = self.renderer.tokenizer
        responses = tokenize(
            tokenizer, [f"{answer}{tokenizer.eos_token}" for answer in answers], [False] * len(answers)
        )
        rows = []
        for one, difficulty, vision, rendered, response in zip(
            conversations, difficulties, pictures, self.renderer(conversations), responses, strict=True
        ):
            try:
                rendered = self.expanded(one.source, rendered, vision)
            except DataError as error:
                bad_rows.report(error)
                continue
            length = len(rendered.token_ids) + len(response)
            if length > self.limit:
                self.tally.leave_out(DOMAIN, length)
            else:
                ids, row = rendered.token_ids, None if vision is None else self.images.row_of(one.source)
                rows.append(self.stored(one, DOMAIN, ids + response, len(ids), difficulty, row))
        return rows


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
    if query_key is not None and source.row.get(query_key):
        last = messages[-1]
        messages[-1] = {**last, "content": f"{last['content']}\n\n{source.row[query_key]}"}
    return messages, response
