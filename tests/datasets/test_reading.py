import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.data import name_problem
from roll.datasets import DataError
from roll.datasets.reading import parse_json_lines, read_rows

ROWS = [{"id": "a", "prompt": 'one, "two"\nthree é', "n": "1"}, {"id": "b", "prompt": "vier", "n": "2"}]


def write_all_kinds(folder: Path) -> list[str]:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "lines.jsonl").write_text(lines)
    (folder / "lines.json").write_text(lines)
    (folder / "array.json").write_text(json.dumps(ROWS, indent=2))
    with gzip.open(folder / "packed.jsonl.gz", "wt") as file:
        file.write(lines)
    escaped = ROWS[0]["prompt"].replace('"', '""')
    (folder / "table.csv").write_text(f'id,prompt,n\na,"{escaped}",1\nb,vier,2\n')
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "table.parquet")
    with pyarrow.OSFile(str(folder / "file.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pyarrow.OSFile(str(folder / "stream.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    return sorted(path.name for path in folder.iterdir())


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    names = write_all_kinds(tmp_path)
    assert len(names) == 8
    for name in names:
        assert [source.row for source in read_rows(str(tmp_path / name))] == ROWS, name
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    rows = read_rows(str(tmp_path / "prompts.txt"))
    assert [(source.number, source.row) for source in rows] == [(1, {"text": "one"}), (3, {"text": "two"})]


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def schema(name: str, **properties: dict[str, object]) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WITH_CALLS = [
    {
        "id": "a",
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call("weather", city="Paris"), call("now")]},
            {"role": "tool", "content": [{"type": "text", "text": "sunny"}], "name": "weather"},
        ],
        "tools": [schema("weather", city={"type": "string"}, unit={"type": "string", "enum": ["C", "F"]})],
        "chosen": {"role": "assistant", "content": "Sunny."},
        "turns": [{"from": "human", "value": "Weather?"}],
        "ground_truth": {"answer": "sunny", "unit": None},
    },
    {
        "id": None,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "assistant", "content": None, "tool_calls": [call("add", a=1, b=[2])]},
        ],
        "tools": [schema("add", a={"type": "integer"}, b={"type": "array", "items": {"type": "integer"}})],
        "chosen": {"role": "assistant", "content": "3", "reasoning_content": "1 + 2"},
        "turns": [{"from": "gpt", "value": "3", "weight": 1}],
        "ground_truth": {"answer": None, "unit": "F"},
    },
]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_keys_that_a_table_fills_with_null_are_absent_again(tmp_path: Path, kind: str) -> None:
    """In messages, calls and schemas; ids, truths and an assistant's content may be null."""
    file = tmp_path / f"rows.{kind}"
    table = pyarrow.Table.from_pylist(WITH_CALLS)
    assert table.to_pylist() != WITH_CALLS
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file, row_group_size=1)
    else:
        with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    rows = read_rows(str(file))
    assert [source.row for source in rows] == WITH_CALLS
    assert [source.number for source in rows] == [1, 2]


def test_folders_patterns_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.jsonl").write_text('{"id": 2}\n')
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "notes.md").write_text("no data")

    def ids(*names: str) -> list[int]:
        return [source.row["id"] for source in read_rows(names)]

    assert ids(str(tmp_path)) == [1, 2]
    assert ids(str(tmp_path / "*.jsonl")) == [1, 2]
    assert ids(str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")) == [2, 1]
    monkeypatch.chdir(tmp_path)
    assert ids("b.jsonl") == [2]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_fields_of_a_table_end_at_the_mark_of_its_header(mark: str, tmp_path: Path) -> None:
    others = ",;\t".replace(mark, "")
    long = "word " * 40_000  # a field may be a whole document
    text = f'\ufeffprompt{mark}n\n"a{mark}{long}"{mark}{others}\n'
    (tmp_path / "table.csv").write_text(text, encoding="utf-8")
    assert [source.row for source in read_rows(str(tmp_path / "table.csv"))] == [
        {"prompt": f"a{mark}{long}", "n": others}
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"id": 1}\n{"id": 2,}\n', r"a\.jsonl, row 2: not valid JSON at column 10"),
        ("a.jsonl", '{"id": 1}\n\n[1]\n', r"a\.jsonl, row 3: expected a JSON object such as .*, found list"),
        ("a.json", '[{"id": 1},\n {"id": }]', r"a\.json, line 2: not valid JSON"),
        ("a.json", '[{"id": 1}, 2]', r"a\.json, row 2: expected a JSON object"),
        ("a.json", '[{"id": ' + "9" * 5000 + "}]", r"a\.json: cannot be read: Exceeds the limit"),
        ("a.json", "[" * 100_000, r"a\.json: cannot be read: maximum recursion"),
        ("a.jsonl", '{"id": 1}\n{"id": ' + "9" * 5000 + "}\n", r"a\.jsonl, row 2: cannot be read: Exceeds"),
        ("a.csv", "id,tag\n1,x\n2\n", r"a\.csv, row 3: expected 2 fields"),
        ("a.csv", "id,tag\n1,x,y\n", r"a\.csv, row 2: expected 2 fields"),
        ("a.parquet", "not parquet", r"a\.parquet: not a readable Parquet file"),
        ("a.arrow", "not arrow", r"a\.arrow: not a readable Arrow file"),
        ("a.jsonl", "", r"a\.jsonl: no rows in it"),
        ("a.xlsx", "x", r"a\.xlsx: unknown kind of file '\.xlsx'; expected one of \.json"),
        ("a.parquet.gz", "x", r"give the file without \.gz"),
        ("a.jsonl", '{"id": "\xff"}\n', r"a\.jsonl: cannot be read: .*utf-8"),
    ],
)
def test_unreadable_files_say_where_and_what(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=message):
        read_rows(str(tmp_path / name))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("no.jsonl", r"'no\.jsonl' does not exist \(looked for /.*no\.jsonl\)"),
        ([], "no file given"),
        ("empty", "the folder holds no data file"),
    ],
)
def test_missing_files_say_where_they_were_looked_for(
    tmp_path: Path, names: str | list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(DataError, match=message):
        read_rows(names)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), min_size=1, max_size=5), st.booleans())
@settings(max_examples=30)
def test_json_lines_give_back_what_was_written(rows: list[dict[str, object]], ascii_only: bool) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    assert [row for _, row in parse_json_lines(Path("x"), lines)] == rows


@given(st.text(alphabet="é\u2028\u0085x", min_size=1, max_size=9))
@settings(max_examples=30)
def test_unusual_line_ends_inside_texts_do_not_split_rows(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for name in ("a.jsonl", "a.json"):
        (folder / name).write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" + '{"prompt": "b"}\n')
        assert [source.row["prompt"] for source in read_rows(os.fspath(folder / name))] == [text, "b"]


def test_folders_of_datasets_save_to_disk(tmp_path: Path) -> None:
    """Shards in the order of ``state.json``; of several splits ``train``, or the one whose folder is named."""
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"question {i}"} for i in range(5)]
    one = datasets.Dataset.from_list(rows)
    one.save_to_disk(tmp_path / "one", num_shards=2)
    assert [row.row for row in read_rows(str(tmp_path / "one"))] == rows
    datasets.DatasetDict({"test": one, "train": one.select([1, 3])}).save_to_disk(tmp_path / "both")
    assert [row.row["prompt"] for row in read_rows(str(tmp_path / "both"))] == ["question 1", "question 3"]
    assert len(read_rows(str(tmp_path / "both" / "test"))) == 5
    datasets.DatasetDict({"test": one, "dev": one}).save_to_disk(tmp_path / "neither")
    with pytest.raises(DataError, match=r"holds the splits test, dev: name one, as in .*neither/test"):
        read_rows(str(tmp_path / "neither"))
    assert "holds the splits" in str(name_problem(str(tmp_path / "neither"), check_files=True))
    assert name_problem(str(tmp_path / "both"), check_files=True) is None


@pytest.mark.parametrize(
    ("ending", "text", "rows"),
    [
        ("jsonl", '{"g": 1}\n{"g": "1"}\n', [1, "1"]),
        ("jsonl", '{"g": "2024-01-02"}\n', ["2024-01-02"]),
        ("jsonl", '{"g": 123456789012345678901234567890}\n', [123456789012345678901234567890]),
        ("csv", "g\n007\nNA\n", ["007", "NA"]),
    ],
)
def test_values_are_those_of_the_file(tmp_path: Path, ending: str, text: str, rows: list[object]) -> None:
    """docs/design/data-preparation.md: ``datasets`` guesses one type for each column, which changes these values."""
    import datasets

    path = tmp_path / f"rows.{ending}"
    path.write_text(text)
    assert [source.row["g"] for source in read_rows(str(path))] == rows
    kind = "csv" if ending == "csv" else "json"
    guessed = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert list(guessed["g"]) != rows, "datasets keeps this value now: the record may be revisited"


@pytest.mark.parametrize(("part", "ids"), [("[:3]", "012"), ("[-2:]", "34"), ("[20%:60%]", "12"), ("", "01234")])
def test_a_part_of_a_split_of_the_hub(part: str, ids: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets`` takes a folder of the working directory for a data set of that name, so no network is needed."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "owner" / "data").mkdir(parents=True)
    rows = "".join(json.dumps({"id": str(number), "prompt": "one"}) + "\n" for number in range(5))
    (tmp_path / "owner" / "data" / "train.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for _ in range(2):  # the second time from the file of the first
        assert "".join(row.row["id"] for row in read_rows(f"hub:owner/data:train{part}")) == ids
    assert not list(tmp_path.rglob("*.parquet.*"))
    if part:
        return
    offline = r"^data_args.file_name: 'hub:owner/hens' cannot be loaded .*HF_HUB_OFFLINE is set.*name them"
    for name, words in (("hub:owner/hens", offline), ("hub:eggs", "is written hub:OWNER/NAME")):
        with pytest.raises(DataError, match=words):
            read_rows(name)
