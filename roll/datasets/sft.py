"""Demonstrations for supervised training: prompt and response as one sequence, loss on the response alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from roll.config.data import DataArguments
from roll.datasets.assistant_turns import AssistantTurns, Masked, read_dialogue, spans_of
from roll.datasets.columns import Columns, Message, require, with_system
from roll.datasets.images import ImageReader
from roll.datasets.making import Draft, RowMaker
from roll.datasets.preparation import load_rows
from roll.datasets.reading import SourceRow
from roll.datasets.sampling import PreparedRows
from roll.datasets.templates import Rendered, Renderer, TemplateChoice, end_of_response, tokenize
from roll.datasets.types import DataError, SftRow
from roll.datasets.vision_model import VisionModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.datasets.store import StoredRow

TrainOn = Literal["last", "assistant"]
DOMAIN = "sft"  # domain that demonstrations are counted under


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
        renderer = Renderer(tokenizer, TemplateChoice.of_settings(data_args, global_template, tag_to_template))
        images = ImageReader.of(data_args, vision)
        return cls(*load_rows(SftMaker(data_args, renderer, sequence_length, images, train_on, query_key, system_key)))

    def _row(self, position: int) -> SftRow:
        store = self._store
        input_ids = store.token_ids(position)
        return SftRow(
            row_id=store.value("id", position),
            tag=store.value("tag", position),
            input_ids=input_ids,
            prompt_length=store.value("prompt_length", position),
            vision=self._vision(
                position, (store.content("row", position) or {}) if self._images is not None else {}, input_ids
            ),
            spans=store.content("spans", position),
        )


@dataclass(eq=False)
class SftMaker(RowMaker[Masked]):
    """Makes demonstrations, of which the response alone carries the loss, or every turn of the assistant.

    Args:
        train_on, query_key, system_key: as :meth:`SftDataset.build` has them.

    Raises:
        DataError: no file, a tokenizer without an end of text, or a template that does not render turn by turn.
    """

    limit_key, example = "sequence_length", "data/sft.jsonl"
    what: str = field(init=False, default="demonstrations")
    train_on: TrainOn = "last"
    query_key: str | None = None
    system_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._end = end_of_response(self.renderer.tokenizer)
        every_turn = self.train_on == "assistant"
        self._turns = AssistantTurns(self.renderer.tokenizer, self.renderer.templates) if every_turn else None

    def settings(self) -> dict[str, Any]:
        keys = {"query_key": self.query_key, "system_key": self.system_key}
        return {**keys, "train_on": self.train_on, "eos_token": self._end}

    def read(self, source: SourceRow) -> tuple[list[Message], Any]:
        """The messages, and the response, or with ``train_on: assistant`` the tools."""
        rest: Any
        if self._turns is not None:
            messages, rest = read_dialogue(self.columns, source)
        else:
            messages, rest = read_demonstration(self.columns, source, self.query_key)
        return with_system(messages, self.system_key and source.row.get(self.system_key)), rest

    def tokenize(self, drafts: Sequence[Draft]) -> list[Masked | DataError]:
        if self._turns is not None:
            return [self._turns(replace(draft, tools=draft.content)) for draft in drafts]
        texts = [f"{draft.content}{self._end}" for draft in drafts]
        responses = tokenize(self.renderer.tokenizer, texts)
        found: list[Masked | DataError] = []
        for prompt, response in zip(self.renderer(drafts), responses, strict=True):
            if isinstance(prompt, Rendered):
                mask = [False] * len(prompt.token_ids) + [True] * len(response)
                found.append(Masked(prompt.token_ids + response, mask))
            else:
                found.append(prompt)
        return found

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
        spans, row = spans_of(tokens.mask), None if draft.vision is None else draft.source.row
        # A response after its prompt needs no spans.
        kept = spans if self._turns is not None else ()
        return self.stored(draft, DOMAIN, tokens.token_ids, spans[0], row, spans=kept)


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
    if query := query_key and source.row.get(query_key):
        content, further = messages[-1]["content"], f"\n\n{query}"
        parts = [*content, {"type": "text", "text": further}] if isinstance(content, list) else f"{content}{further}"
        messages[-1] = {**messages[-1], "content": parts}
    return messages, response
