"""A set of prompts: read, routed to domains, rendered, tokenised, and filtered by length."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll.config.roles import DataArguments
from roll.datasets.columns import Columns, unique_ids
from roll.datasets.reading import SourceRow, read_rows
from roll.datasets.rendering import TemplateChoice, render_and_tokenize
from roll.datasets.routing import DomainRouter
from roll.datasets.types import DataError, PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadCounts:
    """What became of the rows that were read."""

    read: int
    kept: dict[str, int]
    """By domain."""
    too_long: dict[str, int] = field(default_factory=dict)
    """By domain: prompts above the length limit."""

    def __str__(self) -> str:
        dropped = sum(self.too_long.values())
        return f"{self.read} rows read, {sum(self.kept.values())} kept, {dropped} too long; kept by domain: {self.kept}"


class PromptDataset(Sequence[PromptRow]):
    """Prompts in file order, with what became of the rows in ``counts``."""

    def __init__(self, rows: Sequence[PromptRow], counts: LoadCounts) -> None:
        self._rows = list(rows)
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
    ) -> PromptDataset:
        """Read ``data_args.file_name`` and keep the prompts of at most ``prompt_length`` tokens.

        A validation set is built by a call of its own, with its own ``data_args`` and its own ``prompt_length``.

        Args:
            prompt_length: in tokens, template included.
            domains: ``tag_included`` of each reward section.
            global_template: instead of ``data_args.template``, for all rows.
            tag_to_template: instead of both, for rows of the given tags.

        Raises:
            DataError: a file, row, template or tag that cannot be used, or no row left.
        """
        if data_args.file_name is None:
            raise DataError("data_args.file_name is not set; for example file_name: data/train.jsonl")
        sources = read_rows(data_args.file_name, data_args.dataset_dir)
        columns = Columns.of(data_args, sources)
        router = DomainRouter(domains)
        templates = TemplateChoice(global_template or data_args.template, tag_to_template)
        tags = [columns.read_tag(source) for source in sources]
        routes = [router.route(source, tag) for source, tag in zip(sources, tags, strict=True)]
        ids = unique_ids(columns, sources)
        messages = [columns.read_messages(source) for source in sources]
        rendered = render_and_tokenize(tokenizer, templates, messages, tags, sources)
        rows = [
            PromptRow(row_id, domain, tag, token_ids, text, columns.read_ground_truth(source), source.row)
            for row_id, domain, tag, (text, token_ids), source in zip(ids, routes, tags, rendered, sources, strict=True)
        ]
        return cls._filtered(rows, sources, prompt_length, list(domains))

    @classmethod
    def _filtered(
        cls, rows: list[PromptRow], sources: Sequence[SourceRow], prompt_length: int, domains: Sequence[str]
    ) -> PromptDataset:
        kept = [row for row in rows if len(row.token_ids) <= prompt_length]
        too_long = Counter(row.domain for row in rows if len(row.token_ids) > prompt_length)
        by_domain = Counter(row.domain for row in kept)
        counts = LoadCounts(len(rows), {d: by_domain[d] for d in domains if by_domain[d]}, dict(too_long))
        files = ", ".join(dict.fromkeys(str(source.path) for source in sources))
        if not kept:
            shortest = min(len(row.token_ids) for row in rows)
            raise DataError(
                f"{files}: none of {len(rows)} prompts fits into prompt_length = {prompt_length}; "
                f"the shortest has {shortest} tokens"
            )
        logger.info("%s: %s (prompt_length %d)", files, counts, prompt_length)
        return cls(kept, counts)

    def by_domain(self) -> dict[str, list[PromptRow]]:
        """The rows of each domain that has any, in file order."""
        groups: dict[str, list[PromptRow]] = {domain: [] for domain in self.counts.kept}
        for row in self._rows:
            groups[row.domain].append(row)
        return groups

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._rows[index]

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self._rows)
