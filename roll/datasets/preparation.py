"""Prepares the rows of files: into a store, which may be read from the cache on disk, or as they are needed.

The latter is for sets that are too large to prepare, or to keep, before the first step. An epoch then reads the files
in their order, ``WINDOW`` rows at a time.  A window is prepared, shuffled (its order depends on seed, epoch and number
of the window alone), and handed out.  So a row moves by less than a window, memory holds one, and a checkpoint is three
numbers: epoch, window, and how many of its rows have been drawn. To continue, rows in front of the window are read
again, not prepared.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import random
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.model_files import cache_home
from roll.datasets.columns import build_filter, filter_source
from roll.datasets.forms import RowForm, form_of
from roll.datasets.making import RowMaker, Tally, make_all, num_processes
from roll.datasets.reading import SourceRow, data_files, stream_rows, unique_names
from roll.datasets.templates import TEMPLATES, template_text
from roll.datasets.types import BadRows, DataError, LoadCounts, SftRow

if TYPE_CHECKING:
    from roll.datasets.store import RowStore, StoredRow
    from roll.protocol.vision import VisionInputs

logger = logging.getLogger(__name__)


CHUNK = 1024  # rows that are rendered and tokenised together; what is in memory at a time
FORMAT = 4
"""Version of a cache entry, its rows and their counts; increased when the same settings give other rows or files."""
SMALLEST = 4 * 2**20  # bytes of data files from which rows are kept by default
KEYS_OF_NO_ROW = ("on_bad_row", "use_cache", "shuffle", "domain_interleave_probs", "preprocessing_num_workers")
"""Keys of a data section that change no prepared row."""


def load_rows(maker: RowMaker[Any]) -> tuple[RowStore, Callable[..., VisionInputs | None] | None]:
    """The prepared rows of ``data_args.file_name``, and what reads their images again where the model sees any. Raises
    ``DataError``: a file or row that cannot be used, or no row left."""
    store, paths = prepare(maker)
    files = ", ".join(str(path) for path in paths)
    logger.info("%s: %s (%s %d)", files, store.counts, maker.limit_key, maker.limit)
    if maker.images.model is None:
        return store, None
    return store, partial(maker.images.restore, paths, maker.conversation)


def prepare(maker: RowMaker[Any]) -> tuple[RowStore, list[Path]]:
    """The prepared rows of ``data_args.file_name``, and its files."""
    import pyarrow

    from roll.datasets.store import RowStore

    data_args = maker.data_args
    assert data_args.file_name is not None, "checked by the maker"
    paths = data_files(data_args.file_name)
    is_wanted = data_args.use_cache
    if is_wanted is None:  # large files are worth it
        is_wanted = sum(path.stat().st_size for path in paths) >= SMALLEST
    settings = cache_settings(maker) if is_wanted else None
    if settings is None:
        return build_store(maker, paths, None), paths
    folder = cache_home() / "datasets" / cache_key(paths, settings)
    if folder.is_dir():
        try:
            found = RowStore.open(folder)
        except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"{folder}: these prepared rows cannot be read ({error}); delete the folder") from error
        if not found.counts.bad or data_args.on_bad_row != "raise":
            logger.info("prepared rows are read from %s", folder)
            return found, paths
    # Written under another name, which becomes the entry's once it is whole. Of several processes that write the same
    # entry the first to finish wins; the others' is the same.
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        build_store(maker, paths, draft)
        try:
            draft.rename(folder)
        except OSError:
            # A rename onto a folder with files fails: another process was first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return RowStore.open(folder), paths


def build_store(maker: RowMaker[Any], paths: Sequence[Path], folder: Path | None) -> RowStore:
    """Read, prepare and write all rows."""
    from roll.datasets.store import RowStoreWriter, unique_ids

    policy = maker.data_args.on_bad_row
    # Counted apart: a row that cannot be parsed has not reached the selection, which counts the rows read.
    unreadable, unusable = BadRows(policy), BadRows(policy)
    selection = Selection(maker, unusable)
    writer, tally = RowStoreWriter(folder), Tally()
    try:
        sources = selection(stream_rows(paths, unreadable))
        chunks = iter(lambda: list(islice(sources, CHUNK)), [])
        for made in make_all(maker, chunks, num_processes(maker.data_args, paths)):
            for problem in made.bad:
                unusable.report(problem)
            tally.add(made.tally)
            writer.add(made.rows)
        index = unique_ids(writer.index(), paths, maker.data_args.id, unusable)
        counts = LoadCounts(
            read=selection.read + unreadable.count,
            kept=dict(Counter(index["domain"].to_pylist())),
            too_long=dict(tally.too_long),
            truncated=dict(tally.truncated),
            without_truth=dict(tally.without_truth),
            answered=dict(tally.answered),
            filtered=selection.filtered,
            bad=unreadable.count + unusable.count,
        )
        if not len(index):
            names = ", ".join(str(path) for path in paths)
            raise DataError(f"{names}: {nothing_left(maker, tally, counts)}")
        return writer.finish(index, counts)
    except BaseException:
        writer.abandon()
        raise


def nothing_left(maker: RowMaker[Any], tally: Tally, counts: LoadCounts) -> str:
    """The reason why no row is left."""
    if not counts.too_long:
        return f"no row is left: {counts}"
    limit, what = maker.limit, maker.what
    none_fits = f"none of {sum(counts.too_long.values())} {what} fits into {maker.limit_key} = {limit}"
    return f"{none_fits}; the shortest has {tally.shortest} tokens"


@dataclass
class Selection:
    """Rows that ``dataset_filter`` lets through, in the columns of their file's form; the first chooses the maker's."""

    maker: RowMaker[Any]
    bad_rows: BadRows
    read: int = 0
    filtered: int = 0

    def __call__(self, sources: Iterable[SourceRow]) -> Iterator[SourceRow]:
        data_args, form, file, is_first = self.maker.data_args, RowForm(), -1, True
        keep = build_filter(data_args.dataset_filter)
        for source in sources:
            if source.file != file:
                form, file = form_of(data_args, source), source.file
                if str(form):
                    logger.info("%s is read as: %s", source.path, form)
            self.read += 1
            try:
                source = form(source)
                wanted = keep is None or keep(source)
            except DataError as error:
                self.bad_rows.report(error)
                continue
            if wanted:
                if is_first:
                    self.maker.columns, is_first = self.maker.columns_of(source), False
                yield source
            else:
                self.filtered += 1


def cache_settings(maker: RowMaker[Any]) -> dict[str, Any] | None:
    """Everything that the rows depend on besides the files; None where that is not known."""
    tokenizer = maker.renderer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # slow tokenizers do not show what their ids depend on
        return None
    inner, template = hashlib.sha256(backend.to_str().encode()).hexdigest(), tokenizer.chat_template
    # A template that writes today's date gives other prompts tomorrow.
    day = str(datetime.date.today()) if "strftime_now" in str(template) else ""
    fingerprint = [type(tokenizer).__name__, inner, template, str(tokenizer.special_tokens_map), day]
    try:
        chosen = filter_source(maker.data_args.dataset_filter)
    except OSError:
        return None
    section = {k: v for k, v in asdict(maker.data_args).items() if k not in KEYS_OF_NO_ROW}
    section |= {"file_name": None, "dataset_filter": chosen}
    names = sorted(maker.renderer.templates.renders)
    templates = {name: "" if name in TEMPLATES else template_text(name) for name in names}
    choice = [maker.renderer.templates.common, dict(maker.renderer.templates.by_tag or {})]
    kind = [type(maker).__name__, maker.limit, maker.settings()]
    found = {"kind": kind, "data": section, "tokenizer": fingerprint, "choice": choice, "templates": templates}
    images = maker.images
    return found if images.model is None else found | {"vision": asdict(images.model), "videos": images.video_column}


def cache_key(paths: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """Changes with the content of a file, the order of the files and every setting."""
    # Ids of rows have both in them.
    names = unique_names(paths, [path.name for path in paths])
    stems = unique_names(paths, [path.stem for path in paths])
    files = []
    for name, stem, path in zip(names, stems, paths, strict=True):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        files.append([name, stem, content])
    text = json.dumps([FORMAT, files, settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def blocks_hash(path: Path, blocks: int = 64, size: int = 1 << 18) -> str:
    """A hash of a file that is too large to be read twice.

    Up to ``blocks * size`` bytes (16 MiB) it is the whole file. Of a larger one it is the length and ``blocks`` evenly
    spaced blocks, the first and the last bytes among them: any change of length is seen, and any change that reaches
    over more than a ``blocks``-th of the file, such as other rows, another order or another file of the same length. A
    change of the same length that lies between two blocks is not.
    """
    total = path.stat().st_size
    whole = total <= blocks * size
    digest = hashlib.blake2b(str(total).encode(), digest_size=16)
    with path.open("rb") as file:
        for number in range(blocks):
            file.seek(number * size if whole else number * (total - size) // (blocks - 1))
            digest.update(file.read(size))
    return digest.hexdigest()


WINDOW = 8192
"""Rows that a stream prepares at a time, and shuffles among themselves."""


class StreamedEpochs:
    """Endless passes over the demonstrations that ``maker`` makes. ``name``: of the stream, part of its seeds. Raises
    ``DataError``: no file."""

    def __init__(self, maker: RowMaker[Any], seed: int, name: str, window: int = WINDOW) -> None:
        data_args = maker.data_args
        assert data_args.file_name is not None, "checked by the maker's maker"
        self._maker, self._seed, self._name = maker, seed, name
        self._paths = data_files(data_args.file_name)
        self._names = unique_names(self._paths, [path.name for path in self._paths])
        self._size = window
        self._files = [[path.name, blocks_hash(path)] for path in self._paths]
        self._epoch, self._window, self._taken = 0, -1, 0  # place of the next row; window -1: none is open
        self._sources: Iterator[SourceRow] | None = None
        self._stream: Generator[SourceRow, None, None] | None = None
        self._rows: deque[StoredRow] = deque()
        self._kept = 0  # rows that this epoch has made
        self._tally = Tally()
        self._bad = BadRows(data_args.on_bad_row)
        self._selection = Selection(maker, self._bad)

    def next_batch(self, size: int) -> list[SftRow]:
        """The next rows. Raises ``DataError``: a row that cannot be used, or an epoch without any that can."""
        drawn = []
        for _ in range(size):
            while not self._rows:
                self._open_next()
            self._taken += 1
            row = self._rows.popleft()
            assert row.id is not None, "rows are named where their window is opened"
            drawn.append(SftRow(row.id, row.tag, row.token_ids, row.prompt_length, spans=row.spans))
        return drawn

    def _open_next(self) -> None:
        """Prepare the next window, of the next epoch where this one has ended."""
        if self._sources is None:
            self._sources, self._kept = self._read(), 0
        self._window, self._taken = self._window + 1, 0
        sources = list(islice(self._sources, self._size))
        if sources:
            self._maker.tally = Tally()
            rows = self._maker.make(sources, self._bad.report)
            self._tally.add(self._maker.tally)
            self._kept += len(rows)
            if self._maker.data_args.shuffle:
                random.Random(f"{self._seed}/{self._name}/{self._epoch}/{self._window}").shuffle(rows)
            self._rows = deque(
                replace(row, id=f"{self._names[row.file]}:{row.number}") if row.id is None else row for row in rows
            )
            return
        if not self._kept:
            names = ", ".join(str(path) for path in self._paths)
            counts = LoadCounts(read=self._selection.read, kept={}, too_long=dict(self._tally.too_long))
            raise DataError(f"{names}: {nothing_left(self._maker, self._tally, counts)}")
        logger.info("epoch %d has ended: %d rows, %s", self._epoch, self._kept, self.counts())
        self._sources, self._epoch, self._window = None, self._epoch + 1, -1

    def _read(self) -> Iterator[SourceRow]:
        self.close()
        self._stream = stream_rows(self._paths, self._bad)
        return self._selection(self._stream)

    def close(self) -> None:
        """Close the file that is being read."""
        if self._stream is not None:
            self._stream.close()

    def counts(self) -> dict[str, int]:
        """Rows left out so far, by reason."""
        found = {"too_long": sum(self._tally.too_long.values()), "bad": self._bad.count}
        return found | {"filtered": self._selection.filtered}

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        place = {"epoch": self._epoch, "window": self._window, "taken": self._taken}
        return {"seed": self._seed, "size": self._size, "files": self._files, **place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken. Raises ``DataError``: it belongs to other files, another seed or another
        window."""
        mine = self.state_dict()
        for key in ("seed", "size", "files"):
            if state.get(key) != mine[key]:
                differs = f"the checkpoint was drawing with {key} {state.get(key)}, this run with {mine[key]}"
                raise DataError(f"{differs}: not the same data")
        self._epoch, window, taken = int(state["epoch"]), int(state["window"]), int(state["taken"])
        self._rows.clear()
        self._sources, self._kept, self._window, self._taken = None, 0, -1, 0
        if window < 0:
            return
        self._sources = self._read()
        skipped = sum(1 for _ in islice(self._sources, window * self._size))
        self._kept = skipped  # they were made once; an epoch that had none would have ended
        # _open_next() advances to the window that was open.
        self._window = window - 1
        self._open_next()
        for _ in range(taken):
            self._rows.popleft()
        self._taken = taken
