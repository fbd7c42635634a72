"""Preferences: a prompt with two responses, of which one is preferred."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roll.config.data import DataArguments
from roll.datasets.columns import Columns, Message, as_number, check_messages, is_conversation, require
from roll.datasets.making import RowMaker
from roll.datasets.preparation import PreparedRows, prepare
from roll.datasets.reading import SourceRow
from roll.datasets.templates import Conversation, Rendered, Renderer, TemplateChoice, tokenize, truncate
from roll.datasets.types import BadRows, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.datasets.store import StoredRow

logger = logging.getLogger(__name__)

DOMAIN = "preferences"
"""Domain that pairs are counted under."""
PROMPT_COLUMNS = ("messages", "prompt", "instruction", "question")
"""Where a prompt is looked for when the data section names no column."""


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A prompt with two responses as token ids; the end-of-turn token closes both."""

    row_id: str
    tag: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float | None
    """How much better the chosen response is, where the row says it."""

    @property
    def responses(self) -> list[list[int]]:
        """Both, the chosen one first."""
        return [self.chosen_ids, self.rejected_ids]

    @property
    def sides(self) -> list[list[int]]:
        """The two sequences, the chosen one first."""
        return [self.prompt_ids + response for response in self.responses]


@dataclass(frozen=True)
class PreferenceColumns:
    """Columns of the two responses, and of the margin."""

    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None


class PreferenceDataset(PreparedRows[PreferenceRow]):
    """Pairs in file order; draw from it with :class:`roll.datasets.ShuffledEpochs`."""

    @classmethod
    def build(
        cls,
        data_args: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        columns: PreferenceColumns,
        *,
        global_template: str | None = None,
        tag_to_template: Mapping[str, str] | None = None,
    ) -> PreferenceDataset:
        """Read ``data_args.file_name`` and keep the pairs whose longer side has at most ``sequence_length`` tokens.

        A response is a text, or a conversation whose last message is the assistant's.  The prompt is a column of its
        own (a text or messages), or what two conversations have in common before their last messages.

        Raises:
            DataError: a file, row or template that cannot be used, or no row left.
        """
        if data_args.file_name is None:
            raise DataError("data_args.file_name is not set; for example file_name: data/preferences.jsonl")
        if tokenizer.eos_token is None:
            raise DataError(f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token to close a response with")
        templates = TemplateChoice.of_settings(data_args, global_template, tag_to_template)
        store, paths = prepare(PreferenceMaker(data_args, Renderer(tokenizer, templates), sequence_length, columns))
        files = ", ".join(str(path) for path in paths)
        logger.info("%s: %s (sequence_length %d)", files, store.counts, sequence_length)
        return cls(store)

    def _row(self, position: int) -> PreferenceRow:
        store, extra = self._store, self._store.row(position)
        ids, prompt = store.token_ids(position), store.value("prompt_length", position)
        chosen_end = prompt + extra["chosen_length"]
        return PreferenceRow(
            row_id=store.value("id", position),
            tag=store.value("tag", position),
            prompt_ids=ids[:prompt],
            chosen_ids=ids[prompt:chosen_end],
            rejected_ids=ids[chosen_end:],
            margin=extra["margin"],
        )


class PreferenceMaker(RowMaker):
    """Makes pairs out of rows as read."""

    what, limit_key = "pairs", "sequence_length"

    def __init__(
        self, data_args: DataArguments, renderer: Renderer, limit: int, preferences: PreferenceColumns
    ) -> None:
        super().__init__(data_args, renderer, limit)
        self._preferences = preferences

    def settings(self) -> dict[str, Any]:
        names = self._preferences
        return {
            "columns": [names.chosen, names.rejected, names.margin],
            "eos_token": self.renderer.tokenizer.eos_token,
        }

    def columns_of(self, first: SourceRow) -> Columns:
        """The prompt's column is the configured one, else one of the usual names; without any of them the prompt stands
        in the conversations of ``chosen``."""
        if self.data_args.prompt is not None or self.data_args.messages is not None:
            return Columns.of(self.data_args, first)
        name = next((name for name in PROMPT_COLUMNS if name in first.row), self._preferences.chosen)
        return Columns.of(replace(self.data_args, prompt=name), first)

    def make(self, sources: Sequence[SourceRow], bad_rows: BadRows) -> list[StoredRow]:
        from roll.datasets.store import StoredRow

        conversations, answers, extras = [], [], []
        for source in sources:
            try:
                messages, chosen, rejected = self.read_pair(source)
                extra = self.margin(source), self.difficulty(source)
            except DataError as error:
                bad_rows.report(error)
                continue
            tag = self.columns.read_tag(source)
            conversations.append(Conversation(source, tag, self.renderer.templates.with_system(messages, tag)))
            answers += [chosen, rejected]
            extras.append(extra)
        tokenizer = self.renderer.tokenizer
        texts = [f"{answer}{tokenizer.eos_token}" for answer in answers]
        responses = tokenize(tokenizer, texts, [False] * len(texts))
        rows = []
        for index, (one, rendered) in enumerate(zip(conversations, self.renderer(conversations), strict=True)):
            if isinstance(rendered, DataError):
                bad_rows.report(rendered)
                continue
            chosen_ids, rejected_ids = responses[2 * index], responses[2 * index + 1]
            longest = max(len(chosen_ids), len(rejected_ids))
            rendered = fitting(self, one, rendered, longest, DOMAIN)
            length = len(rendered.token_ids) + longest
            if length > self.limit:
                self.tally.leave_out(DOMAIN, length)
                continue
            margin, difficulty = extras[index]
            rows.append(
                StoredRow(
                    id=self.columns.read_id(one.source),
                    file=self.files[one.source.path],
                    number=one.source.number,
                    tag=one.tag,
                    domain=DOMAIN,
                    token_ids=[*rendered.token_ids, *chosen_ids, *rejected_ids],
                    prompt_length=len(rendered.token_ids),
                    text="",
                    row={"chosen_length": len(chosen_ids), "margin": margin},
                    difficulty=difficulty,
                )
            )
        return rows

    def margin(self, source: SourceRow) -> float | None:
        column = self._preferences.margin
        return None if column is None else as_number(source, column, "margin_key")

    def read_pair(self, source: SourceRow) -> tuple[list[Message], str, str]:
        """The prompt's messages, and the chosen and the rejected response.

        Raises:
            DataError: a response that is missing, empty or no text; two that are equal; conversations that differ
                before their last message.
        """
        names = self._preferences
        chosen, chosen_before = response_of(source, names.chosen, require(source, names.chosen))
        rejected, rejected_before = response_of(source, names.rejected, require(source, names.rejected))
        if names.chosen in (self.columns.prompt, self.columns.messages):
            if chosen_before is None or rejected_before is None:
                raise DataError(
                    f"{source.place}: no prompt: neither one of the columns {', '.join(PROMPT_COLUMNS)} nor "
                    f"conversations under {names.chosen} and {names.rejected}; name it with data_args.prompt"
                )
            if chosen_before != rejected_before:
                raise DataError(
                    f"{source.place}: {names.chosen} and {names.rejected} differ before their last messages, so that "
                    "they answer different prompts"
                )
            messages = chosen_before
        else:
            messages = self.columns.read_messages(source)
        if chosen == rejected:
            raise DataError(f"{source.place}: {names.chosen} and {names.rejected} are the same text")
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{source.place}: the prompt ends with an assistant's message; expected the user's turn")
        return messages, chosen, rejected


def fitting(maker: RowMaker, one: Conversation, rendered: Rendered, longest: int, domain: str) -> Rendered:
    """The prompt, with ``filter_overlong_prompts: false`` cut as ``truncation`` says until the ``longest`` response
    fits behind it; never a response, whose end is what is judged. As it is where that cannot be."""
    side, room = maker.data_args.truncation, maker.limit - longest
    if maker.data_args.filter_overlong_prompts or side == "error" or len(rendered.token_ids) <= room:
        return rendered
    shortened = truncate(one, rendered, room, side, maker.renderer)
    if shortened is None:
        return rendered
    maker.tally.truncated[domain] += 1
    return shortened


def response_of(source: SourceRow, column: str, value: Any) -> tuple[str, list[Message] | None]:
    """The text of a response, and the messages before it where the ``value`` is a conversation.

    Raises:
        DataError: it is neither a text nor a conversation that ends with one.
    """
    before: list[Message] | None = None
    if isinstance(value, Mapping):
        value = [value]
    if is_conversation(value):
        check_messages(source, column, value)
        if value[-1]["role"] != "assistant":
            role = value[-1]["role"]
            raise DataError(f"{source.place}: {column} ends with a message of {role}, expected the assistant's")
        before, value = list(value[:-1]) or None, value[-1]["content"]
    if not isinstance(value, str) or not value:
        raise DataError(f"{source.place}: {column} must be a non-empty text or conversation, found {value!r}")
    return value, before
