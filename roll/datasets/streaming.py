"""Rows prepared as they are needed: for sets that are too large to prepare, or to keep, before the first step.

An epoch reads the files in their order, ``WINDOW`` rows at a time.  A window is prepared, shuffled
(its order depends on seed, epoch and number of the window alone), and handed out.  So a row moves by less than a
window, memory holds one, and a checkpoint is three numbers: epoch, window, and how many of its rows have been drawn.
To continue, rows in front of the window are read again, not prepared.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from roll.datasets.making import RowMaker, Tally
from roll.datasets.preparation import Selection, blocks_hash, nothing_left
from roll.datasets.reading import SourceRow, data_files, stream_rows, unique_names
from roll.datasets.store import StoredRow
from roll.datasets.types import BadRows, DataError, LoadCounts, SftRow

WINDOW = 8192
"""Rows that a stream prepares at a time, and shuffles among themselves."""

logger = logging.getLogger(__name__)


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
