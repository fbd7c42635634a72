"""Rows prepared as they are drawn: all of them, once an epoch, continued anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config.roles import DataArguments
from roll.datasets import DataError, SftDataset
from roll.datasets.images import ImageReader
from roll.datasets.preparation import blocks_hash
from roll.datasets.sft import SftMaker
from roll.datasets.streaming import StreamedEpochs
from roll.datasets.templates import Renderer, TemplateChoice
from tests.datasets.conftest import Write

NUMBER, LIMIT = 23, 60


@pytest.fixture
def file(write_jsonl: Write) -> str:
    """Every seventh row is too long."""
    rows = [{"prompt": f"How many is {i}?", "solution": str(i) * (200 if i % 7 == 3 else 1)} for i in range(NUMBER)]
    return write_jsonl(rows)


def stream(tokenizer: Any, file: str, window: int = 5, **keys: Any) -> StreamedEpochs:
    data_args = DataArguments(file_name=file, streaming=True, **keys)
    renderer = Renderer(tokenizer, TemplateChoice.of_settings(data_args, None, None))
    maker = SftMaker(data_args, renderer, LIMIT, ImageReader.of(data_args, None))
    return StreamedEpochs(maker, 7, "sft", window)


def test_an_epoch_gives_every_row_once_as_prepared_ones_are(tokenizer: Any, file: str) -> None:
    prepared = {row.row_id: row for row in SftDataset.build(DataArguments(file_name=file), tokenizer, LIMIT)}
    rows = stream(tokenizer, file)
    first, second = rows.next_batch(len(prepared)), rows.next_batch(len(prepared))
    for epoch in (first, second):
        assert {row.row_id: row for row in epoch} == prepared
    assert [row.row_id for row in first] != [row.row_id for row in second]
    assert rows.counts() == {"too_long": 2 * (NUMBER - len(prepared)), "bad": 0, "filtered": 0}
    numbers = [int(row.row_id.rpartition(":")[2]) for row in first]
    windows = [(number - 1) // 5 for number in numbers]
    assert windows == sorted(windows) and numbers != sorted(numbers)
    plain = stream(tokenizer, file, shuffle=False).next_batch(len(prepared))
    assert [row.row_id for row in plain] == list(prepared)


@pytest.mark.parametrize("drawn", [0, 5, 12, 20, 33])
def test_it_continues_where_it_was(tokenizer: Any, file: str, drawn: int) -> None:
    whole = stream(tokenizer, file)
    whole.next_batch(drawn)
    state = json.loads(json.dumps(whole.state_dict()))
    wanted = [row.row_id for row in whole.next_batch(25)]
    again = stream(tokenizer, file)
    again.load_state_dict(state)
    assert [row.row_id for row in again.next_batch(25)] == wanted
    other = stream(tokenizer, file, window=6)
    with pytest.raises(DataError, match="the checkpoint was drawing with size 5, this run with 6"):
        other.load_state_dict(state)
    Path(file).write_text(Path(file).read_text().replace("1", "2"))
    with pytest.raises(DataError, match="not the same data"):
        stream(tokenizer, file).load_state_dict(state)
    Path(file).write_text(json.dumps({"prompt": "How?", "solution": "1" * 200}))
    with pytest.raises(DataError, match="none of 1 demonstrations fits into sequence_length = 60"):
        stream(tokenizer, file).next_batch(1)


@pytest.mark.parametrize("kib", [12, 640])
def test_a_change_anywhere_in_a_file_is_seen(tmp_path: Path, kib: int) -> None:
    """Of a file beyond the blocks, one that reaches from a block to the next."""
    file, content = tmp_path / "rows.jsonl", bytearray(b"0123456789abcdef" * 64 * kib)
    file.write_bytes(content)
    hashed = [blocks_hash(file, blocks=16, size=1 << 10)]
    for place in (0, len(content) // 2, len(content) * 2 // 3, len(content) - 1):
        changed = bytearray(content)
        reach = 1 if kib <= 16 else len(content) // 15
        changed[place : place + reach] = b"x" * len(changed[place : place + reach])
        file.write_bytes(changed)
        hashed.append(blocks_hash(file, blocks=16, size=1 << 10))
    file.write_bytes(content + b"\n")
    hashed.append(blocks_hash(file, blocks=16, size=1 << 10))
    assert len(set(hashed)) == 6
