"""A set of prompts: read, routed to domains, rendered, tokenised, and filtered by length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from roll.config.data import DataArguments
from roll.datasets.columns import DomainRouter, Message
from roll.datasets.forms import read_ground_truth
from roll.datasets.images import ImageReader
from roll.datasets.making import Draft, RowMaker
from roll.datasets.preparation import load_rows
from roll.datasets.reading import SourceRow
from roll.datasets.sampling import PreparedRows
from roll.datasets.templates import Rendered, Renderer, TemplateChoice, truncate
from roll.datasets.types import DataError, PromptRow
from roll.datasets.vision_model import VisionModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.datasets.store import StoredRow


class PromptDataset(PreparedRows[PromptRow]):
    """Prompts in file order; draw from it with :class:`roll.datasets.DomainSampler`."""

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
        templates = TemplateChoice.of_settings(data_args, global_template, tag_to_template)
        images = ImageReader.of(data_args, vision)
        renderer = Renderer(tokenizer, templates)
        store, read_images = load_rows(PromptMaker(data_args, renderer, prompt_length, images, domains=domains))
        kept = store.counts.kept  # in the order of the files; from here on in that of the configuration
        store.counts = replace(store.counts, kept={domain: kept[domain] for domain in domains if domain in kept})
        return cls(store, read_images)

    def by_domain(self) -> dict[str, PromptDataset]:
        """The rows of each domain that has any, in file order."""
        domains = self._store.column("domain")[self._positions]
        return {
            domain: PromptDataset(self._store, self._images, self._positions[domains == domain])
            for domain in self.counts.kept
        }

    def tags(self) -> dict[str, int]:
        """Rows of each tag."""
        return dict(Counter(self._store.column("tag")[self._positions].tolist()))

    def _row(self, position: int) -> PromptRow:
        store = self._store
        row, token_ids = store.content("row", position), store.token_ids(position)
        return PromptRow(
            prompt_id=store.value("id", position),
            domain=store.value("domain", position),
            tag=store.value("tag", position),
            token_ids=token_ids,
            prompt_text=store.content("text", position),
            ground_truth=read_ground_truth(row),
            row=row,
            vision=self._vision(position, row, token_ids),
        )


@dataclass(eq=False)
class PromptMaker(RowMaker[Rendered]):
    """Makes prompts; the content of a draft is its domain; ``domains``: ``tag_included`` of each reward section."""

    limit_key, example = "prompt_length", "data/train.jsonl"
    what: str = field(init=False, default="prompts")
    domains: Mapping[str, Sequence[str] | None] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._router = DomainRouter(self.domains)

    def settings(self) -> dict[str, Any]:
        return {"domains": {name: sorted(tags or ()) for name, tags in self.domains.items()}}

    def read(self, source: SourceRow) -> tuple[list[Message], str]:
        domain = self._router.route(source, self.columns.read_tag(source))
        return self.columns.read_messages(source), domain

    def tokenize(self, drafts: Sequence[Draft]) -> list[Rendered | DataError]:
        return self.renderer(drafts)

    def expand(self, draft: Draft, tokens: Rendered) -> Rendered:
        token_ids = self.images.expand(draft.source, tokens.token_ids, draft.vision)
        return tokens if token_ids is tokens.token_ids else Rendered(tokens.text, token_ids)

    def finish(self, draft: Draft, tokens: Rendered) -> StoredRow | None:
        """The row; ``DataError`` where it is too long, and neither left out nor cut by choice."""
        domain, length, side = draft.content, len(tokens.token_ids), self.data_args.truncation
        if length > self.limit:
            if self.data_args.filter_overlong_prompts:
                self.tally.leave_out(domain, length)
                return None
            if side == "error":
                raise DataError(
                    f"{draft.source.place}: the prompt has {length} tokens, prompt_length is {self.limit}; set "
                    "data_args.filter_overlong_prompts: true to leave such rows out, or data_args.truncation to cut "
                    "them"
                )
            # A cut could go through an image.
            shortened = None if draft.vision is not None else truncate(draft, tokens, self.limit, side, self.renderer)
            if shortened is None:
                self.tally.leave_out(domain, length)
                return None
            self.tally.truncated[domain] += 1
            tokens = shortened
        self.tally.without_truth[domain] += read_ground_truth(draft.source.row) is None
        self.tally.answered[domain] += draft.messages[-1]["role"] == "assistant"
        row, ids = draft.source.row, tokens.token_ids
        return self.stored(draft, domain, ids, len(ids), row, text=tokens.text)
