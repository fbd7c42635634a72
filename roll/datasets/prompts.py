"""A set of prompts: read, routed to domains, rendered, tokenised, and filtered by length."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll.config.data import DataArguments
from roll.datasets.columns import DomainRouter
from roll.datasets.images import ImageReader, PreparedImages
from roll.datasets.making import RowMaker
from roll.datasets.preparation import prepare
from roll.datasets.reading import Row, SourceRow
from roll.datasets.templates import Conversation, Rendered, Renderer, TemplateChoice, truncate
from roll.datasets.types import BadRows, DataError, LoadCounts, PromptRow
from roll.datasets.vision_model import VisionModel

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from roll.datasets.store import RowStore, StoredRow

logger = logging.getLogger(__name__)


class PromptDataset(Sequence[PromptRow]):
    """Prompts in file order, with what became of the rows in ``counts``. A row is built when it is asked for.

    Args:
        positions: int64 (rows,), of the store's rows that belong to this set; None: all.
    """

    def __init__(
        self,
        store: RowStore,
        counts: LoadCounts,
        positions: np.ndarray | None = None,
        reader: PreparedImages | None = None,
    ) -> None:
        self._store = store
        self._images = reader
        self._positions = store.positions() if positions is None else positions
        self.counts = counts

    @classmethod
    def build(
        cls,
        data_args: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        prompt_length: int,
        domains: Mapping[str, Sequence[str] | None],
        *,
        global_template: str | None = None,
        tag_to_template: Mapping[str, str] | None = None,
        vision: VisionModel | None = None,
    ) -> PromptDataset:
        """Read ``data_args.file_name`` and keep the prompts of at most ``prompt_length`` tokens, or cut them to that.

        A validation set is built by a call of its own, with its own ``data_args`` and its own ``prompt_length``.

        Args:
            prompt_length: in tokens, template included.
            domains: ``tag_included`` of each reward section.
            global_template: instead of ``data_args.template``, for all rows.
            tag_to_template: instead of both, for rows of the given tags.
            vision: of a model that sees images.

        Raises:
            DataError: a file, row, template or tag that cannot be used, or no row left.
        """
        if data_args.file_name is None:
            raise DataError("data_args.file_name is not set; for example file_name: data/train.jsonl")
        templates = TemplateChoice.of_settings(data_args, global_template, tag_to_template)
        images = ImageReader.of(data_args, vision)
        store, paths = prepare(PromptMaker(data_args, Renderer(tokenizer, templates), prompt_length, domains, images))
        prepared = PreparedImages(images, data_args, paths) if vision is not None else None
        dataset = cls(store, in_order(store.counts, domains), reader=prepared)
        files = ", ".join(str(path) for path in paths)
        logger.info("%s: %s (prompt_length %d)", files, dataset.counts, prompt_length)
        return dataset

    def by_domain(self) -> dict[str, PromptDataset]:
        """The rows of each domain that has any, in file order."""
        domains = self._store.column("domain")[self._positions]
        return {
            domain: PromptDataset(self._store, self.counts, self._positions[domains == domain], self._images)
            for domain in self.counts.kept
        }

    @property
    def ids(self) -> list[str]:
        """Of all rows, without building them."""
        return [str(name) for name in self._store.column("id")[self._positions]]

    @property
    def difficulties(self) -> np.ndarray | None:
        """float64 (rows,); None without a curriculum."""
        return self._store.difficulties(self._positions)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens, int32 (rows,)."""
        return self._store.column("length")[self._positions]

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self._row(int(position)) for position in self._positions[index]]
        return self._row(int(self._positions[index]))

    def __iter__(self) -> Iterator[PromptRow]:
        return (self._row(int(position)) for position in self._positions)

    def _row(self, position: int) -> PromptRow:
        store = self._store
        row, token_ids = store.row(position), store.token_ids(position)
        vision = None
        if self._images is not None:
            vision = self._images.of(row, token_ids, store.value("file", position), store.value("number", position))
        return PromptRow(
            prompt_id=store.value("id", position),
            domain=store.value("domain", position),
            tag=store.value("tag", position),
            token_ids=token_ids,
            prompt_text=store.text(position),
            ground_truth=read_ground_truth(row),
            row=row,
            vision=vision,
        )


FOREIGN_TRUTHS = ("reward_model", "reward_spec")
"""Columns in which the data sets of other projects keep the ground truth."""


def read_ground_truth(row: Row) -> Any:
    """The column ``ground_truth``, else the entry of that name in ``reward_model`` (verl) or ``reward_spec`` (SkyRL);
    None: the row has none."""
    value = row.get("ground_truth")
    if value is not None:
        return value
    sections = (_as_section(row.get(name)) for name in FOREIGN_TRUTHS)
    found = (section.get("ground_truth") for section in sections if isinstance(section, dict))
    return next((truth for truth in found if truth is not None), None)


def _as_section(value: Any) -> Any:
    """CSV and some JSONL files hold the section as JSON text."""
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


class PromptMaker(RowMaker):
    """Makes prompts out of rows as read."""

    what, limit_key = "prompts", "prompt_length"

    def __init__(
        self,
        data_args: DataArguments,
        renderer: Renderer,
        prompt_length: int,
        domains: Mapping[str, Sequence[str] | None],
        images: ImageReader | None = None,
    ) -> None:
        super().__init__(data_args, renderer, prompt_length, images)
        self._domains = domains
        self._router = DomainRouter(domains)

    def settings(self) -> dict[str, Any]:
        return {"domains": {name: sorted(tags or ()) for name, tags in self._domains.items()}}

    def make(self, sources: Sequence[SourceRow], bad_rows: BadRows) -> list[StoredRow]:
        conversations, domains, difficulties, pictures = [], [], [], []
        for source in sources:
            try:
                tag = self.columns.read_tag(source)
                domain = self._router.route(source, tag)
                messages = self.columns.read_messages(source)
                difficulty = self.difficulty(source)
                messages, vision = self.seen(source, messages)
            except DataError as error:
                bad_rows.report(error)
                continue
            messages = self.renderer.templates.with_system(messages, tag)
            conversations.append(Conversation(source, tag, messages))
            domains.append(domain)
            difficulties.append(difficulty)
            pictures.append(vision)
        rows: list[StoredRow] = []
        for one, domain, difficulty, vision, rendered in zip(
            conversations, domains, difficulties, pictures, self.renderer(conversations), strict=True
        ):
            try:
                rendered = self.expanded(one.source, rendered, vision)
            except DataError as error:
                bad_rows.report(error)
                continue
            fitting = self._fit(one, domain, rendered, has_images=vision is not None)
            if fitting is not None:
                ids, row = fitting.token_ids, self.images.row_of(one.source)
                rows.append(self.stored(one, domain, ids, len(ids), difficulty, row, text=fitting.text))
                self.tally.without_truth[domain] += read_ground_truth(one.source.row) is None
                self.tally.answered[domain] += one.messages[-1]["role"] == "assistant"
        return rows

    def _fit(self, one: Conversation, domain: str, rendered: Rendered, has_images: bool) -> Rendered | None:
        """The prompt within its limit; None where it is left out, as a prompt with images is that would be cut.

        Raises:
            DataError: too long, and neither left out nor cut by choice.
        """
        length = len(rendered.token_ids)
        if length <= self.limit:
            return rendered
        side = self.data_args.truncation
        if self.data_args.filter_overlong_prompts:
            self.tally.leave_out(domain, length)
            return None
        if side == "error":
            raise DataError(
                f"{one.source.place}: the prompt has {length} tokens, prompt_length is {self.limit}; set "
                "data_args.filter_overlong_prompts: true to leave such rows out, or data_args.truncation to cut them"
            )
        shortened = None if has_images else truncate(one, rendered, self.limit, side, self.renderer)
        if shortened is None:
            self.tally.leave_out(domain, length)
        else:
            self.tally.truncated[domain] += 1
        return shortened


def in_order(counts: LoadCounts, domains: Mapping[str, Any]) -> LoadCounts:
    """The counts with domains in the order of the configuration."""
    return replace(counts, kept={domain: counts.kept[domain] for domain in domains if domain in counts.kept})
