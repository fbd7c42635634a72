"""Makes prepared rows, and those of prompts: chunks of rows become record batches, in this process or in several, in
the order of the files."""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from roll.config import objects
from roll.config.data import DataArguments
from roll.datasets.columns import Columns, DomainRouter, Message, as_number
from roll.datasets.forms import read_ground_truth
from roll.datasets.images import ImageReader
from roll.datasets.reading import SourceRow
from roll.datasets.templates import Conversation, Rendered, Renderer, truncate
from roll.datasets.types import DataError

if TYPE_CHECKING:
    from roll.datasets.store import EncodedRows, StoredRow
    from roll.protocol.vision import VisionInputs

logger = logging.getLogger(__name__)

BYTES_PER_PROCESS = 8 * 2**20  # bytes of data files that make a further process worth its imports
CHUNKS_AHEAD = 2  # chunks in flight per process: in work, ready for it, or finished and waiting for their turn


@dataclass
class Tally:
    """Counts while rows are made."""

    too_long: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    without_truth: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    shortest: float = math.inf  # tokens of the shortest row that was left out as too long; infinite: none was

    def leave_out(self, domain: str, length: int) -> None:
        self.too_long[domain] += 1
        self.shortest = min(length, self.shortest)

    def add(self, other: Tally) -> None:
        self.too_long += other.too_long
        self.truncated += other.truncated
        self.without_truth += other.without_truth
        self.answered += other.answered
        self.shortest = min(other.shortest, self.shortest)


@dataclass(frozen=True, kw_only=True)
class Draft(Conversation):
    """A row whose prompt has been read and not yet tokenised."""

    content: Any  # the rest of the row, as `RowMaker.read` returns it
    difficulty: float | None
    vision: VisionInputs | None


TokensT = TypeVar("TokensT")


@dataclass(eq=False)
class RowMaker(ABC, Generic[TokensT]):
    """Turns rows as read into prepared rows of one kind (prompts, demonstrations). Raises ``DataError``: no file is
    named."""

    limit_key: ClassVar[str]  # the key that limits the tokens of a row
    example: ClassVar[str]  # a file name, for error messages
    what: str = field(init=False, default="rows")  # rows of this kind, in the plural
    data_args: DataArguments
    renderer: Renderer
    limit: int  # most tokens of a row
    images: ImageReader = field(default_factory=lambda: ImageReader(None))
    columns: Columns = field(init=False)
    tally: Tally = field(init=False, default_factory=Tally)  # the counts of the present chunk

    def __post_init__(self) -> None:
        if self.data_args.file_name is None:
            raise DataError(f"data_args.file_name is not set; for example file_name: {self.example}")

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings that the rows depend on besides data section, tokenizer, templates and limit."""

    @abstractmethod
    def read(self, source: SourceRow) -> tuple[list[Message], Any]:
        """The messages of a row's prompt, and the rest of the row (:attr:`Draft.content`). Raises ``DataError``: a row
        that cannot be used."""

    @abstractmethod
    def tokenize(self, drafts: Sequence[Draft]) -> Sequence[TokensT | DataError]:
        """The tokens of each draft, with one placeholder for every image; or why it has none."""

    @abstractmethod
    def expand(self, draft: Draft, tokens: TokensT) -> TokensT:
        """The tokens with as many placeholders for each image as it takes. Raises ``DataError``: placeholders in the
        row's own text."""

    @abstractmethod
    def finish(self, draft: Draft, tokens: TokensT) -> StoredRow | None:
        """The row to keep; None: it is too long and was counted as such."""

    def make(self, sources: Sequence[SourceRow], report: Callable[[DataError], None]) -> list[StoredRow]:
        """The rows that are kept; the others are counted, or given to ``report``, which may raise."""
        drafts, curriculum = [], self.data_args.curriculum
        for source in sources:
            try:
                messages, content = self.read(source)
                difficulty = (
                    None if curriculum is None else as_number(source, curriculum.column, "data_args.curriculum")
                )
                messages, images = self.images.read(source, messages)
                vision = self.images.look(source, images)
                tag = self.columns.read_tag(source)
                messages = self.renderer.templates.with_system(messages)
                drafts.append(Draft(source, tag, messages, content=content, difficulty=difficulty, vision=vision))
            except DataError as error:
                report(error)
        rows = []
        for draft, tokens in zip(drafts, self.tokenize(drafts), strict=True):
            try:
                if isinstance(tokens, DataError):
                    raise tokens
                tokens = self.expand(draft, tokens)
            except DataError as error:
                report(error)
                continue
            row = self.finish(draft, tokens)
            if row is not None:
                rows.append(row)
        return rows

    def stored(
        self,
        draft: Draft,
        domain: str,
        token_ids: list[int],
        prompt_length: int,
        row: dict[str, Any] | None = None,
        text: str = "",
        spans: Sequence[int] = (),
    ) -> StoredRow:
        """A prepared row; ``row``, ``text`` and ``spans`` as :class:`~roll.datasets.store.StoredRow` has them."""
        from roll.datasets.store import StoredRow

        row_id = draft.source.row.get(self.columns.id)
        return StoredRow(
            id=None if row_id is None else str(row_id),
            file=draft.source.file,
            number=draft.source.number,
            tag=draft.tag,
            domain=domain,
            token_ids=token_ids,
            prompt_length=prompt_length,
            text=text,
            row=row,
            difficulty=draft.difficulty,
            spans=list(spans),
        )

    def columns_of(self, first: SourceRow) -> Columns:
        """The columns of the set that begins with ``first``."""
        return Columns.of(self.data_args, first)

    def conversation(self, source: SourceRow) -> list[Message]:
        """The messages of a row's prompt, also of a set that was prepared before."""
        return self.columns_of(source).read_messages(source)


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


@dataclass(frozen=True)
class Made:
    """Outcome of a chunk."""

    rows: EncodedRows
    tally: Tally
    bad: list[DataError]  # rows that cannot be used, in order


def make_all(maker: RowMaker[Any], chunks: Iterable[list[SourceRow]], processes: int) -> Iterator[Made]:
    """Outcomes of all chunks, in order, from ``processes`` worker processes (1: this one); few chunks are in memory.
    Raises ``DataError``: a row that ends the loading, or a process that has died."""
    if processes <= 1:
        yield from (make(maker, chunk) for chunk in chunks)
        return
    # Forked children would inherit the locks of threads that Ray and the tokenizer have in this process.
    # They start with the first chunk, whose first row has chosen the maker's columns.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (maker, objects.pickles()))
    waiting: deque[Future[Made]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_make, chunk))
            if len(waiting) >= CHUNKS_AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        rule = "a process that prepares rows has died, perhaps for want of memory; fewer of them need less"
        raise DataError(f"{rule}: data_args.preprocessing_num_workers = 1 prepares them in this one") from error
    finally:
        # A row that ends the loading must not wait for the chunks that are still queued.
        pool.shutdown(cancel_futures=True)


def make(maker: RowMaker[Any], chunk: Sequence[SourceRow]) -> Made:
    from roll.datasets.store import encode_rows

    bad: list[DataError] = []
    maker.tally = Tally()
    # Collected for the process that applies ``on_bad_row``.
    return Made(encode_rows(maker.make(chunk, bad.append)), maker.tally, bad)


def num_processes(data_args: DataArguments, paths: Sequence[Path]) -> int:
    """``preprocessing_num_workers``, but no more than there are cores and work for."""
    wanted = data_args.preprocessing_num_workers or 1
    work = sum(path.stat().st_size for path in paths) // BYTES_PER_PROCESS
    processes = max(1, min(wanted, len(os.sched_getaffinity(0)), work))
    if processes > 1:
        logger.info("rows are prepared by %d processes", processes)
    return processes


_maker: RowMaker[Any] | None = None  # the maker of this process, if it is one of a pool


def _begin(maker: RowMaker[Any], own_objects: Mapping[str, bytes]) -> None:
    global _maker
    objects.adopt(own_objects)
    # The processes are as many as there are cores: the tokenizer needs no threads of its own in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = maker


def _make(chunk: list[SourceRow]) -> Made:
    assert _maker is not None, "the pool begins its processes by _begin"
    return make(_maker, chunk)
