"""Demonstrations for supervised training: prompt and response as one sequence, loss on the response alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from roll.config.roles import DataArguments
from roll.datasets.columns import Columns, Message, require, unique_ids
from roll.datasets.prompts import LoadCounts
from roll.datasets.reading import SourceRow, read_rows
from roll.datasets.rendering import TemplateChoice, render_and_tokenize, tokenize
from roll.datasets.types import DataError, SftRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class SftDataset(Sequence[SftRow]):
    """Demonstrations in file order; draw from it with :class:`roll.datasets.ShuffledEpochs`."""

    def __init__(self, rows: Sequence[SftRow], counts: LoadCounts) -> None:
        self._rows = list(rows)
        self.counts = counts

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
    ) -> SftDataset:
        """Read ``data_args.file_name`` and keep the demonstrations of at most ``sequence_length`` tokens.

        The response is the column ``data_args.response``; in conversations without that column it is the last message,
        which must then be the assistant's.  Prompt and response are tokenised apart, as they are when the model
        generates, and the tokenizer's end-of-turn token closes the response.

        Args:
            query_key: a column appended to the prompt after an empty line (instruction data sets keep inputs apart).

        Raises:
            DataError: a file, row or template that cannot be used, or no row left.
        """
        if data_args.file_name is None:
            raise DataError("data_args.file_name is not set; for example file_name: data/sft.jsonl")
        if tokenizer.eos_token is None:
            raise DataError(f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token to close a response with")
        sources = read_rows(data_args.file_name, data_args.dataset_dir)
        columns = Columns.of(data_args, sources)
        templates = TemplateChoice(global_template or data_args.template, tag_to_template)
        tags = [columns.read_tag(source) for source in sources]
        pairs = [read_demonstration(columns, source, query_key) for source in sources]
        prompts = render_and_tokenize(tokenizer, templates, [messages for messages, _ in pairs], tags, sources)
        closed = [response + tokenizer.eos_token for _, response in pairs]
        responses = tokenize(tokenizer, closed, [False] * len(closed))
        rows = [
            SftRow(row_id, tag, prompt + response, len(prompt))
            for row_id, tag, (_, prompt), response in zip(
                unique_ids(columns, sources), tags, prompts, responses, strict=True
            )
        ]
        return cls._filtered(rows, sources, sequence_length)

    @classmethod
    def _filtered(cls, rows: list[SftRow], sources: Sequence[SourceRow], sequence_length: int) -> SftDataset:
        kept = [row for row in rows if len(row.input_ids) <= sequence_length]
        counts = LoadCounts(len(rows), {"sft": len(kept)}, {"sft": len(rows) - len(kept)})
        files = ", ".join(dict.fromkeys(str(source.path) for source in sources))
        if not kept:
            shortest = min(len(row.input_ids) for row in rows)
            raise DataError(
                f"{files}: none of {len(rows)} demonstrations fits into sequence_length = {sequence_length}; "
                f"the shortest has {shortest} tokens"
            )
        logger.info("%s: %s (sequence_length %d)", files, counts, sequence_length)
        return cls(kept, counts)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._rows[index]

    def __iter__(self) -> Iterator[SftRow]:
        return iter(self._rows)


def read_demonstration(columns: Columns, source: SourceRow, query_key: str | None = None) -> tuple[list[Message], str]:
    """The conversation up to the response, and the response.

    Raises:
        DataError: no response, or one that is not a text.
    """
    messages = columns.read_messages(source)
    if source.row.get(query_key or "") and messages:
        last = messages[-1]
        messages[-1] = {**last, "content": f"{last['content']}\n\n{source.row[query_key or '']}"}
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
    return messages, response
