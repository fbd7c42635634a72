"""Prepared rows on disk: the same rows as without, found again, and never taken for others; and rows prepared as they
are drawn: all of them, once an epoch, continued anywhere."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from roll.config.roles import DataArguments
from roll.datasets import DataError, DomainSampler, PromptDataset, SftDataset, preparation
from roll.datasets.images import ImageReader
from roll.datasets.making import BYTES_PER_PROCESS, num_processes
from roll.datasets.preparation import StreamedEpochs, blocks_hash
from roll.datasets.sft import SftMaker
from roll.datasets.store import MARK, from_json, to_json
from roll.datasets.templates import Renderer, TemplateChoice
from tests.datasets.conftest import Write


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"id": str(i), "tag": "t", "prompt": f"{i} eggs é?", "ground_truth": [str(i)], "solution": "x"}
        for i in range(count)
    ]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def build(tokenizer: Any) -> Callable[..., PromptDataset]:
    def build(files: Any, prompt_length: int = 100, tags: tuple[str, ...] = ("t",), **options: Any) -> PromptDataset:
        data_args = DataArguments(file_name=files, **{"use_cache": True} | options)
        return PromptDataset.build(data_args, tokenizer, prompt_length, {"d": list(tags)})

    return build


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "datasets").iterdir())


def test_cached_rows_equal_prepared_ones(
    build: Any, write_jsonl: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = write_jsonl(rows(1100))  # two chunks
    plain = build(files, use_cache=False)
    assert not (tmp_path / "cache").exists()
    cold, (entry,) = build(files), entries(tmp_path)
    with caplog.at_level(logging.INFO, logger="roll.datasets"):
        warm = build(files)
    assert f"read from {entry}" in caplog.text
    assert list(plain) == list(cold) == list(warm)
    assert plain.counts == cold.counts == warm.counts
    assert warm[1090] == plain[1090] and warm[-3:] == plain[-3:]
    assert DomainSampler(warm.by_domain()).next_batch(9) == DomainSampler(plain.by_domain()).next_batch(9)
    assert entries(tmp_path) == [entry]
    (entry / "rows.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=rf"{entry}: these prepared rows cannot be read .* delete the folder"):
        build(files)


def test_small_files_are_not_worth_a_cache_and_ids_name_the_present_folders(
    build: Any, write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same contents in other folders have other ids, and an entry of their own."""
    rounds = [(4 * 2**20, None, 0), (1, False, 0), (1, None, 1), (1, None, 2)]
    for number, (smallest, use_cache, entries_then) in enumerate(rounds):
        monkeypatch.setattr(preparation, "SMALLEST", smallest)
        names = [f"{number}a/rows.jsonl", f"{number}b/rows.json"]
        for name in names:
            (tmp_path / name).parent.mkdir()
        found = build([write_jsonl(rows(1), name) for name in names], use_cache=use_cache)
        assert [prompt.prompt_id for prompt in found] == [f"{name}/0" for name in names]
        assert len(list((tmp_path / "cache").rglob("rows.arrow"))) == entries_then


def test_another_content_setting_or_format_is_another_entry(
    build: Any, write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}")
    files = write_jsonl(rows(3))

    def texts(**options: Any) -> list[str]:
        return [prompt.prompt_text for prompt in build(files, **options)]

    texts()
    texts(shuffle=False)  # changes no row
    assert len(entries(tmp_path)) == 1
    texts(system_prompt="s")
    build(files, 90)
    build(files, 100, ("t", "u"))
    assert texts(template=str(template))[0] == "0 eggs é?"
    assert len(entries(tmp_path)) == 5
    template.write_text("Q: {{ messages[0].content }}")
    assert texts(template=str(template))[0] == "Q: 0 eggs é?"
    write_jsonl([{**row, "prompt": "2 hens"} for row in rows(3)])
    assert "2 hens" in texts()[0]
    monkeypatch.setattr(preparation, "FORMAT", preparation.FORMAT - 1)
    texts()
    assert len(entries(tmp_path)) == 8


def test_a_failed_preparation_leaves_nothing_and_skipped_rows_do_not_pass_for_good_ones(
    build: Any, write_jsonl: Write, tmp_path: Path
) -> None:
    files = write_jsonl([*rows(3), "{"])
    for _ in range(2):
        with pytest.raises(DataError, match="row 4: not valid JSON"):
            build(files)
    assert entries(tmp_path) == []
    assert build(files, on_bad_row="skip").counts.bad == build(files, on_bad_row="skip").counts.bad == 1
    with pytest.raises(DataError, match="row 4: not valid JSON"):
        build(files)


def test_values_that_json_lacks_keep_their_type(build: Any, tmp_path: Path) -> None:
    values = {"when": datetime.datetime(2024, 1, 2, 3, 4, 5), "day": datetime.date(2024, 1, 2), "image": b"\x00\xff"}
    values |= {"price": decimal.Decimal("1.10"), "nested": {"deep": ["1", None, "é"]}}
    table = pyarrow.Table.from_pylist([{"prompt": "?", "tag": "t", **values}])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    (prompt,) = build(str(tmp_path / "x.parquet"))
    assert {name: prompt.row[name] for name in values} == values
    assert from_json(to_json({"a": 2**70, "b": {MARK: "plain", "c": 1}})) == {"a": 2**70, "b": {MARK: "plain", "c": 1}}
    assert json.loads(to_json({"é": 1})) == {"é": 1}
    with pytest.raises(TypeError, match="holds a set"):
        to_json({1})


@pytest.mark.long
def test_several_processes_make_the_same_rows(
    build: Any, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Order, counts, reports of bad rows and the cache entry are those of a single process."""
    monkeypatch.setattr("roll.datasets.making.BYTES_PER_PROCESS", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr("roll.datasets.preparation.CHUNK", 4)
    given: list[Any] = rows(30)
    given[3] |= {"prompt": "long " * 40}
    given[17] |= {"tag": "unknown"}
    files = write_jsonl(given)
    options: dict[str, Any] = {"on_bad_row": "skip", "use_cache": False}
    alone, of_one = build(files, 30, **options), list(caplog.messages)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="roll.datasets.making"):
        together = build(files, 30, **options, preprocessing_num_workers=2)
    assert caplog.messages[0] == "rows are prepared by 2 processes"
    assert caplog.messages[1:] == of_one
    assert any("row 18" in message for message in of_one)
    assert list(together) == list(alone)
    assert together.counts == alone.counts
    assert (together.counts.bad, sum(together.counts.too_long.values())) == (1, 1)


def test_processes_are_as_many_as_there_are_cores_and_work_for(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.truncate(3 * BYTES_PER_PROCESS)
    many = DataArguments(preprocessing_num_workers=1000)
    assert num_processes(many, [path] * 1000) == len(os.sched_getaffinity(0))
    assert num_processes(many, [path]) == min(3, len(os.sched_getaffinity(0)))
    assert num_processes(DataArguments(), [path] * 1000) == 1
    path.write_text("{}")
    assert num_processes(many, [path]) == 1


def test_memory_is_that_of_a_chunk_and_not_of_the_set(
    build: Any, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MiB of rows pass through; what Python and Arrow hold at a time is a fraction of it."""
    monkeypatch.setattr("roll.datasets.preparation.CHUNK", 64)
    files = write_jsonl([{**row, "context": "x" * 8192} for row in rows(1000)])
    build(write_jsonl(rows(2), "small.jsonl"))  # imports are not what is measured
    pool = pyarrow.default_memory_pool()
    tracemalloc.start()
    before = pool.bytes_allocated()
    dataset = build(files)
    python_peak, arrow = tracemalloc.get_traced_memory()[1], pool.bytes_allocated() - before
    tracemalloc.stop()
    assert len(dataset) == 1000 and len(dataset[999].row["context"]) == 8192
    assert python_peak < 3 * 2**20
    assert arrow < 2**20


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
