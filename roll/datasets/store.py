"""Prepared rows as Arrow record batches, in memory or mapped from disk."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from roll.datasets.reading import unique_names
from roll.datasets.types import BadRows, DataError, LoadCounts

MARK = "\x00roll"  # key of an object that encodes a value of another type
_ESCAPED_MARK = json.dumps(MARK)[1:-1]


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=_encode)


def from_json(text: str) -> Any:
    return json.loads(text, object_hook=_decode if _ESCAPED_MARK in text else None)


_CODECS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        lambda value: value / datetime.timedelta(microseconds=1),
        lambda microseconds: datetime.timedelta(microseconds=microseconds),
    ),
    decimal.Decimal: (str, decimal.Decimal),
}
"""Types that JSON lacks and columns hold, to a JSON value and back."""
_DECODERS = {kind.__name__.lower(): decode for kind, (_, decode) in _CODECS.items()}


def _encode(value: object) -> dict[str, Any]:
    # A datetime is a date too: the more special type comes first in the table.
    for kind, (encode, _) in _CODECS.items():
        if isinstance(value, kind):
            return {MARK: [kind.__name__.lower(), encode(value)]}
    raise TypeError(f"a column holds a {type(value).__name__}, which a row cannot carry")


def _decode(found: dict[str, Any]) -> Any:
    if found.keys() != {MARK}:
        return found
    kind, value = found[MARK]
    return _DECODERS[kind](value)


ROWS_FILE, INDEX_FILE = "rows.arrow", "index.arrow"
COUNTS_KEY = b"roll.counts"

ROWS = pa.schema(
    {"token_ids": pa.list_(pa.int32()), "text": pa.string(), "row": pa.string(), "spans": pa.list_(pa.int32())}
)
INDEX = pa.schema(
    {
        "position": pa.int64(),
        "id": pa.string(),
        "file": pa.int32(),
        "number": pa.int64(),
        "tag": pa.string(),
        "domain": pa.string(),
        "length": pa.int32(),
        "prompt_length": pa.int32(),
        "difficulty": pa.float64(),
        "digest": pa.uint64(),
    }
)


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row on its way into a store."""

    id: str | None  # the row's id in its file; None: it has none
    file: int  # position of its file among the set's
    number: int  # number of the row in its file
    tag: str
    domain: str
    token_ids: list[int]
    prompt_length: int  # tokens of the prompt: all of them, unless a response follows
    text: str  # the prompt as the model sees it; empty where it is not needed
    row: dict[str, Any] | None  # the columns as read; None where they are not needed
    difficulty: float | None
    spans: list[int] = field(default_factory=list)
    """Begin and end of every run of tokens that carry the loss, in a demonstration; empty: all after the prompt."""


EncodedRows = tuple[pa.RecordBatch, pa.RecordBatch]
"""Rows on their way into a store, and their index without ``position``, which the store knows."""


def encode_rows(rows: Sequence[StoredRow]) -> EncodedRows:
    without_position = INDEX.remove(INDEX.get_field_index("position"))

    def batch(schema: pa.Schema, **made: list[Any]) -> pa.RecordBatch:
        columns = {name: made.get(name) or [getattr(row, name) for row in rows] for name in schema.names}
        return pa.record_batch(columns, schema=schema)

    columns = [to_json(row.row) for row in rows]
    digests = [
        # Of a demonstration, whose columns are not kept, the tokens are all that is learned from.
        xxhash.xxh3_64_intdigest(np.asarray(row.token_ids + row.spans, dtype=np.int32).tobytes())
        if row.row is None
        else xxhash.xxh3_64_intdigest(f"{len(row.token_ids)} {row.text} {text}".encode())
        for row, text in zip(rows, columns, strict=True)
    ]
    lengths = [len(row.token_ids) for row in rows]
    return batch(ROWS, row=columns), batch(without_position, length=lengths, digest=digests)


class RowStore:
    """Reads prepared rows by their position in the index."""

    def __init__(self, rows: pa.Table, index: pa.Table) -> None:
        self._rows = rows
        self.index = index
        self._positions = index["position"].to_numpy()
        self.counts = LoadCounts(**json.loads(index.schema.metadata[COUNTS_KEY]))

    @classmethod
    def open(cls, folder: Path) -> RowStore:
        """Map the files of a folder that :class:`RowStoreWriter` wrote."""
        rows, index = (pa.ipc.open_file(pa.memory_map(str(folder / name))) for name in (ROWS_FILE, INDEX_FILE))
        return cls(rows.read_all(), index.read_all())

    def __len__(self) -> int:
        return len(self._positions)

    def column(self, name: str) -> np.ndarray:
        """An index column as a whole, (rows,)."""
        return self.index[name].to_numpy()

    def value(self, name: str, index: int) -> Any:
        """One value of an index column."""
        return self.index[name][index].as_py()

    def token_ids(self, index: int) -> list[int]:
        scalar = self._rows["token_ids"][self._positions[index]]
        ids: list[int] = scalar.values.to_numpy().tolist()
        return ids

    def content(self, name: str, index: int) -> Any:
        """``text``, ``spans`` or ``row`` (all columns as read) of :class:`StoredRow`."""
        found = self._rows[name][self._positions[index]].as_py()
        return from_json(found) if name == "row" else found


class RowStoreWriter:
    """Collects rows for two files in ``folder`` (None: in memory); :meth:`finish` makes a store of them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._sink = pa.BufferOutputStream() if folder is None else pa.OSFile(str(folder / ROWS_FILE), "wb")
        self._writer = pa.ipc.new_file(self._sink, ROWS)
        self._index: list[pa.RecordBatch] = []
        self._count = 0

    def add(self, encoded: EncodedRows) -> None:
        rows, index = encoded
        count = index.num_rows
        if not count:
            return
        self._writer.write_batch(rows)
        positions = pa.array(range(self._count, self._count + count), pa.int64())
        # Positions are kept with the rows: the final index may leave rows out, which stay in the file.
        self._index.append(pa.record_batch([positions, *index.columns], schema=INDEX))
        self._count += count

    def index(self) -> pa.Table:
        """Index of all rows so far, in the order of arrival."""
        return pa.Table.from_batches(self._index, INDEX)

    def finish(self, index: pa.Table, counts: LoadCounts) -> RowStore:
        """The store of the rows in ``index``, which may be fewer than were added and have other ids."""
        self._writer.close()
        table = index.combine_chunks().replace_schema_metadata({COUNTS_KEY: json.dumps(asdict(counts)).encode()})
        if self._folder is None:
            rows = pa.ipc.open_file(self._sink.getvalue()).read_all()
            return RowStore(rows, table)
        self._sink.close()
        path = str(self._folder / INDEX_FILE)
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return RowStore.open(self._folder)

    def abandon(self) -> None:
        """Close the files; they make no store."""
        self._writer.close()
        self._sink.close()


def unique_ids(index: pa.Table, paths: Sequence[Path], id_column: str, bad_rows: BadRows) -> pa.Table:
    """The index with its final ids. Rows without an id get ``<file>:<row>``; equal ids in different files get the
    file's name in front; a row whose id its file has already is reported to ``bad_rows`` and left out. Files of equal
    names in different folders go by their paths.

    Raises:
        DataError: an id twice in one file, unless bad rows are skipped.
    """
    ids = index["id"]
    # Candidates are found in Arrow: usually there are none, and a million ids never become Python strings.
    counted = pc.value_counts(ids.drop_null().combine_chunks())
    repeated = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
    unnamed = pc.is_null(ids)
    suspects = pc.or_(unnamed, pc.is_in(ids, value_set=repeated))
    if not pc.any(suspects).as_py():
        return index
    final, dropped = ids.to_pylist(), set()
    files: dict[str, set[int]] = {}
    seen: dict[tuple[str, int], int] = {}
    places = [i for i, suspect in enumerate(suspects.to_pylist()) if suspect]
    file_of, number_of = index["file"].to_pylist(), index["number"].to_pylist()
    for i in places:
        name, file = final[i], file_of[i]
        if name is None:
            continue
        first = seen.setdefault((name, file), number_of[i])
        if first != number_of[i]:
            dropped.add(i)
            message = f"duplicate id {name!r}, already in row {first}; ids must be unique (or drop the column "
            message += f"{id_column!r} and rows are numbered)"
            bad_rows.report(DataError(f"{paths[file]}, row {number_of[i]}: {message}"))
        files.setdefault(name, set()).add(file)
    names = unique_names(paths, [path.name for path in paths])
    stems = unique_names(paths, [path.stem for path in paths])
    for i in places:
        if final[i] is None:
            final[i] = f"{names[file_of[i]]}:{number_of[i]}"
        elif len(files[final[i]]) > 1:
            final[i] = f"{stems[file_of[i]]}/{final[i]}"
    result = index.set_column(index.schema.get_field_index("id"), index.schema.field("id"), [pa.array(final)])
    return result.take([i for i in range(len(final)) if i not in dropped]) if dropped else result
