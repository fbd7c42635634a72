"""Rows out of data files: JSON, JSONL, CSV, Parquet, Arrow and plain text, also gzipped where the format is text."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote

from roll.config.data import FORMATS, format_of, hub_name, matching_files, saved_splits
from roll.datasets.types import BadRows, DataError

T = TypeVar("T")
Row = dict[str, Any]
Numbered = Iterator[tuple[int, Row | DataError]]
"""Row numbers, each with its row, or with the error of a row that cannot be read."""
TOOLS = "tools"  # column of the schemas of the tools that a conversation has
MESSAGE_KEYS = frozenset({"role", "from"})  # keys of which every message has one (the second in ShareGPT's form)
ROWS_AT_A_TIME = 4096  # rows of a Parquet file that are decoded together


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row and where it was read."""

    path: Path
    number: int  # line number in files made of lines (counted from 1), else the row's position counted from 1
    row: Row
    file: int = 0  # position of the file among those that are read

    @property
    def place(self) -> str:
        return f"{self.path}, row {self.number}"


def read_rows(file_names: str | Sequence[str]) -> list[SourceRow]:
    """All rows of one or several files, see :func:`data_files` and :func:`stream_rows`."""
    return list(stream_rows(data_files(file_names)))


def data_files(file_names: str | Sequence[str]) -> list[Path]:
    """The files of the names: a folder for the data files in it, ``*`` and ``?`` for matching names,
    ``hub:OWNER/NAME[/CONFIG][:SPLIT]`` for the files that the hub's data set is kept in on this machine. Raises
    ``DataError``: no name, or one that nothing is found under."""
    names = [file_names] if isinstance(file_names, str) else list(file_names)
    if not names:
        raise DataError("data_args.file_name: no file given; for example file_name: data/train.jsonl")
    return [path for name in names for path in expand(name)]


def stream_rows(paths: Iterable[Path], bad_rows: BadRows | None = None) -> Generator[SourceRow, None, None]:
    """The rows of all files in order. ``bad_rows``: takes the rows that cannot be read; None: the first one raises.
    Raises ``DataError``: a file that is unreadable, of an unknown kind, or without rows."""
    bad_rows = bad_rows or BadRows()
    for file, path in enumerate(paths):
        found = False
        try:
            suffix = format_of(path)
            if suffix not in READERS:
                raise DataError(f"{path}: unknown kind of file {suffix!r}; expected one of {', '.join(READERS)}")
            if path.suffix == ".gz" and suffix in BINARY_FORMATS:
                raise DataError(f"{path}: {suffix} files are compressed inside; give the file without .gz")
            for number, row in READERS[suffix](path):
                found = True
                if isinstance(row, DataError):
                    bad_rows.report(row)
                else:
                    yield SourceRow(path, number, row, file)
        except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        if not found:
            raise DataError(f"{path}: no rows in it")


def first_row(path: Path) -> SourceRow:
    """The first row of a file; ``DataError`` as :func:`stream_rows`."""
    with closing(stream_rows([path])) as rows:
        return next(rows)


def expand(name: str) -> list[Path]:
    """The files of one configured name; of a data set of the hub, those in the cache of ``datasets``."""
    try:
        hub = hub_name(name)
    except ValueError as error:
        raise DataError(f"data_args.file_name: {name!r}: {error}") from error
    if hub is not None:
        import datasets

        try:
            rows = datasets.load_dataset(hub.name, hub.config, split=hub.split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            offline = datasets.config.HF_HUB_OFFLINE
            hint = "HF_HUB_OFFLINE is set" if offline else "is this machine online?"
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(
                f"data_args.file_name: {name!r} cannot be loaded ({type(error).__name__}: {reason}); {hint} "
                "Without the hub, download the data set's files elsewhere and name them, such as data/train.parquet"
            ) from error
        paths = [Path(entry["filename"]) for entry in rows.cache_files]
        if not hub.split.endswith("]"):
            return paths
        # The files have all rows of the split: its part is a file beside them, which appears as a whole.
        part = paths[0].with_name(f"{quote(hub.split, safe='')}.parquet")
        if not part.exists():
            unfinished = part.with_name(f"{part.name}.{os.getpid()}")
            rows.to_parquet(unfinished)
            unfinished.replace(part)
        return [part]
    path = Path(name).expanduser()
    found, splits = matching_files(path), saved_splits(path)
    if found:
        return found
    if splits:
        raise DataError(f"{path}: holds the splits {', '.join(splits)}: name one, as in {path / splits[0]}")
    if path.is_dir():
        raise DataError(f"{path}: the folder holds no data file; expected one ending in {', '.join(FORMATS)}")
    raise DataError(f"data file {name!r} does not exist (looked for {Path.cwd() / path})")


def unique_names(paths: Sequence[Path], names: Sequence[str]) -> Sequence[str]:
    """The files' short ``names``; where two of them are equal, paths from the folder that all files share.

    A file that is listed again has ``#2`` after its name, the next time ``#3``.
    """
    if len(set(names)) == len(paths):
        return names
    if len(set(paths)) == len(set(names)):
        shown = list(names)
    else:
        root = os.path.commonpath([path.absolute().parent for path in paths])
        shown = [os.path.relpath(path, root) for path in paths]
    times = [shown[: index + 1].count(name) for index, name in enumerate(shown)]
    return [f"{name}#{count}" if count > 1 else name for name, count in zip(shown, times, strict=True)]


def open_text(path: Path, newline: str | None = None) -> IO[str]:
    # utf-8-sig: editors and spreadsheets of Windows begin files with a byte order mark.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def read_json(path: Path) -> Numbered:
    """A JSON array of objects, or (as all ``.jsonl`` and many ``.json`` files are) one object a line."""
    with open_text(path) as file:
        beginning = file.read(1)
        while beginning.isspace():
            beginning = file.read(1)
        file.seek(0)
        if beginning != "[" or format_of(path) == ".jsonl":
            yield from parse_json_lines(path, file)
            return
        text = file.read()
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, lists in lists
        raise DataError(f"{path}: cannot be read: {error}") from error
    yield from ((number, expect_object(path, number, row, text)) for number, row in enumerate(rows, 1))


def whole_characters(value: T, text: str) -> T:
    """The value that was read from JSON ``text``, of whole characters only: JSON can write half a surrogate pair, which
    neither tokenizers nor files take. Raises ``UnicodeEncodeError``: half a character."""
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_json_lines(path: Path, lines: Iterable[str]) -> Numbered:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            message = f"{path}, row {number}: not valid JSON at column {error.colno}: {error.msg}; expected one object"
            yield number, DataError(message)
        except (ValueError, RecursionError) as error:
            yield number, DataError(f"{path}, row {number}: cannot be read: {error}")
        else:
            yield number, expect_object(path, number, row, line)


def expect_object(path: Path, number: int, row: object, text: str) -> Row | DataError:
    """The row that was read from JSON ``text``, or why it is none."""
    if not isinstance(row, dict):
        return DataError(f"{path}, row {number}: expected a JSON object such as {{...}}, found {type(row).__name__}")
    try:
        whole_characters(row, text)
    except UnicodeEncodeError as error:
        found = f"\\u{ord(error.object[error.start]):04x}"
        around = error.object[max(0, error.start - 20) : error.start]
        return DataError(
            f"{path}, row {number}: half of a character, {found}, behind {around!r}: a text that was cut inside a pair "
            "of surrogates; take it out, or set data_args.on_bad_row: skip"
        )
    return row


LONGEST_FIELD = 1 << 27  # characters of a field of a CSV file


def read_csv(path: Path) -> Numbered:
    """A table whose fields end at the commas of its header, or where that has none at its semicolons or tabs."""
    with open_text(path, newline="") as file:
        header = file.readline()
        file.seek(0)
        delimiter = next((mark for mark in ",;\t" if mark in header), ",")
        csv.field_size_limit(LONGEST_FIELD)  # 131,072 by default, and a long document is one field
        reader = csv.DictReader(file, strict=True, delimiter=delimiter)
        for row in reader:
            number = reader.line_num
            if None in row or None in row.values():
                expected = len(reader.fieldnames or ())
                yield number, DataError(f"{path}, row {number}: expected {expected} fields as in the header")
            else:
                yield number, row


def read_text(path: Path) -> Numbered:
    """One prompt a line, under the column ``text``."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, {"text": line.rstrip("\n")}


def numbered(batches: Iterable[Any]) -> Numbered:
    """Rows of Arrow record batches, without the nulls in place of missing keys of messages, calls and schemas."""
    import pyarrow.types as types

    numbers = itertools.count(1)
    for batch in batches:
        padded = []
        for field in batch.schema:
            kind = field.type  # of conversations, lists of them, or single messages
            while types.is_list(kind) or types.is_large_list(kind):
                kind = kind.value_type
            has_messages = types.is_struct(kind) and not MESSAGE_KEYS.isdisjoint(one.name for one in kind)
            padded += [field.name] * (field.name == TOOLS or has_messages)
        for row in batch.to_pylist():
            yield next(numbers), row | {name: without_padding(row[name]) for name in padded}


def without_padding(value: object, is_message: bool = True) -> Any:
    """``value`` without the null keys of its objects. A message keeps its ``content``, where null says that there is
    none besides the calls."""
    if isinstance(value, list):
        return [without_padding(one, is_message) for one in value]
    if not isinstance(value, dict):
        return value
    is_message = is_message and not MESSAGE_KEYS.isdisjoint(value)
    return {
        key: without_padding(one, False)
        for key, one in value.items()
        if one is not None or (is_message and key == "content")
    }


def read_parquet(path: Path) -> Numbered:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from numbered(file.iter_batches(batch_size=ROWS_AT_A_TIME))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def read_arrow(path: Path) -> Numbered:
    """Arrow IPC, as a file or as a stream (what ``datasets`` writes)."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            table = pyarrow.ipc.open_file(source).read_all()
        except pyarrow.ArrowInvalid:
            source.seek(0)
            try:
                table = pyarrow.ipc.open_stream(source).read_all()
            except pyarrow.ArrowException as error:
                raise DataError(f"{path}: not a readable Arrow file: {error}") from error
        # The table is mapped, not read: only the rows being handed out are in memory.
        yield from numbered(table.to_batches(max_chunksize=ROWS_AT_A_TIME))


READERS: dict[str, Callable[[Path], Numbered]] = {
    ".json": read_json,
    ".jsonl": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_text,
}
BINARY_FORMATS = frozenset({".parquet", ".arrow"})
