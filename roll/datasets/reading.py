"""Rows out of data files: JSON, JSONL, CSV, Parquet, Arrow and plain text, also gzipped where the format is text."""

from __future__ import annotations

import csv
import glob
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from roll.datasets.types import DataError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row and where it was read."""

    path: Path
    number: int
    """Line number in files made of lines (counted from 1), else the row's position counted from 1."""
    row: Row

    @property
    def place(self) -> str:
        return f"{self.path}, row {self.number}"


def read_rows(file_names: str | Sequence[str], dataset_dir: str | None = None) -> list[SourceRow]:
    """All rows of one or several files; a folder stands for the data files in it, and ``*`` and ``?`` match names.

    Args:
        dataset_dir: where a relative name is looked for too, if it is not found from the working directory.

    Raises:
        DataError: a file that is missing, unreadable, of an unknown kind, or without rows.
    """
    names = [file_names] if isinstance(file_names, str) else list(file_names)
    if not names:
        raise DataError("data_args.file_name: no file given; for example file_name: data/train.jsonl")
    rows: list[SourceRow] = []
    for path in (path for name in names for path in expand(name, dataset_dir)):
        before = len(rows)
        try:
            rows.extend(SourceRow(path, number, row) for number, row in reader_of(path)(path))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        if len(rows) == before:
            raise DataError(f"{path}: no rows in it")
    return rows


def expand(name: str, dataset_dir: str | None = None) -> list[Path]:
    """The files that a configured name stands for, in alphabetical order."""
    path = Path(name).expanduser()
    places = [path] if dataset_dir is None else [path, Path(dataset_dir).expanduser() / path]
    for place in places:
        found = matches(place)
        if found:
            return found
    looked = " and ".join(str(Path.cwd() / place) for place in places)
    raise DataError(f"data file {name!r} does not exist (looked for {looked})")


def matches(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file() and format_suffix(p) in READERS)
        if not found:
            raise DataError(f"{path}: the folder holds no data file; expected one ending in {', '.join(READERS)}")
        return found
    return sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())


def format_suffix(path: Path) -> str:
    """``.jsonl`` of ``train.jsonl`` and of ``train.jsonl.gz``."""
    return path.with_suffix("").suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def reader_of(path: Path) -> Callable[[Path], Iterator[tuple[int, Row]]]:
    suffix = format_suffix(path)
    if suffix not in READERS:
        raise DataError(f"{path}: unknown kind of file {suffix!r}; expected one of {', '.join(READERS)}")
    if path.suffix == ".gz" and suffix in BINARY_FORMATS:
        raise DataError(f"{path}: {suffix} files are compressed inside; give the file without .gz")
    return READERS[suffix]


def open_text(path: Path, newline: str | None = None) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def read_json(path: Path) -> Iterator[tuple[int, Row]]:
    """A JSON array of objects, or (as many ``.json`` files are) one object a line."""
    with open_text(path) as file:
        text = file.read()
    if not text.lstrip().startswith("["):
        # Not splitlines(): it also cuts at characters that stand unescaped inside JSON texts, such as U+2028.
        yield from parse_json_lines(path, text.split("\n"))
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from error
    for number, row in enumerate(rows, 1):
        yield number, expect_object(path, number, row)


def read_json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    with open_text(path) as file:
        yield from parse_json_lines(path, file)


def parse_json_lines(path: Path, lines: Sequence[str] | IO[str]) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            message = f"{path}, row {number}: not valid JSON at column {error.colno}: {error.msg}; expected one object"
            raise DataError(message) from error
        yield number, expect_object(path, number, row)


def expect_object(path: Path, number: int, row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{path}, row {number}: expected a JSON object such as {{...}}, found {type(row).__name__}")
    return row


def read_csv(path: Path) -> Iterator[tuple[int, Row]]:
    with open_text(path, newline="") as file:
        reader = csv.DictReader(file, strict=True)
        for row in reader:
            if None in row or None in row.values():
                expected = len(reader.fieldnames or ())
                raise DataError(f"{path}, row {reader.line_num}: expected {expected} fields as in the header")
            yield reader.line_num, row


def read_text(path: Path) -> Iterator[tuple[int, Row]]:
    """One prompt a line, under the column ``text``."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, {"text": line.rstrip("\n")}


def read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    yield from enumerate(table.to_pylist(), 1)


def read_arrow(path: Path) -> Iterator[tuple[int, Row]]:
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
        yield from enumerate(table.to_pylist(), 1)


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Row]]]] = {
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_text,
}
BINARY_FORMATS = frozenset({".parquet", ".arrow"})
