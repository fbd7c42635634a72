"""Preparation of GSM8K. Set GSM8K_DIR to a folder with the published train.jsonl and test.jsonl to run it on them."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from roll.config.roles import DataArguments
from roll.datasets import PromptDataset
from roll.datasets.reading import read_rows
from roll.rewards import RewardSample, build_reward
from tests.datasets.conftest import tiny, tokenizer  # noqa: F401  fixtures
from tests.examples.pages import ROOT

sys.path.insert(0, str(ROOT / "examples/data"))
from convert import main, prepare_gsm8k

ROWS = [
    {"question": "Ann has 3 hens and gets 4.", "answer": "3+4 = <<3+4=7>>7\n#### 7"},
    {"question": "A house for $1,200 and a barn?", "answer": "1200+34 = 1,234\n#### 1,234"},
    {"question": "How warm is it’s shade?", "answer": "5-8 = -3\n#### -3"},
]


def write_split(folder: Path, split: str, ending: str, rows: list[dict[str, str]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if ending == ".jsonl":
        (folder / f"{split}.jsonl").write_text(lines)
    elif ending == ".jsonl.gz":
        with gzip.open(folder / f"{split}.jsonl.gz", "wt") as file:
            file.write(lines)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}{ending}")


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet", "-00000-of-00001.parquet"])
def test_every_published_form_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    write_split(tmp_path, "train", ending, ROWS)
    write_split(tmp_path, "test", ending, ROWS[:1])
    output = tmp_path / "out"
    assert main(["gsm8k", "--input", str(tmp_path), "--output", str(output), "--instruction", "Be brief."]) == 0
    train = [source.row for source in read_rows(str(output / "train.jsonl"))]
    assert [row["ground_truth"] for row in train] == ["7", "1234", "-3"]
    assert train[0] == {
        "id": "gsm8k-train-0",
        "tag": "gsm8k",
        "messages": [{"role": "user", "content": "Ann has 3 hens and gets 4. Be brief."}],
        "prompt": "Ann has 3 hens and gets 4. Be brief.",
        "ground_truth": "7",
        **ROWS[0],
    }
    assert len(read_rows(str(output / "validation.jsonl"))) == 1


def test_system_message_and_no_instruction(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_split(tmp_path, split, ".jsonl", ROWS)
    prepare_gsm8k(tmp_path, tmp_path / "out", instruction="", system="You count.")
    messages = read_rows(str(tmp_path / "out" / "train.jsonl"))[0].row["messages"]
    assert messages == [{"role": "system", "content": "You count."}, {"role": "user", "content": ROWS[0]["question"]}]


def test_what_is_wrong_with_the_input(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> int:
        caplog.clear()
        return main(["gsm8k", "--input", str(tmp_path), "--output", str(tmp_path / "out")])

    assert run() == 2
    assert "expected train.jsonl (or .jsonl.gz, .parquet" in caplog.text
    write_split(tmp_path, "train", ".jsonl", [ROWS[0], {"question": "?", "answer": "no number"}])
    assert run() == 2
    assert "row 2: the answer must end in '#### <number>', found 'no number'" in caplog.text
    write_split(tmp_path, "train", ".jsonl", [{"question": "?"}])
    assert run() == 2
    assert "row 1: column 'answer' expected, found only ['question']" in caplog.text
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif("GSM8K_DIR" not in os.environ, reason="GSM8K_DIR names no folder with the published files")
def test_the_whole_published_data_set(tmp_path: Path, tokenizer: object) -> None:  # noqa: F811
    counts = prepare_gsm8k(Path(os.environ["GSM8K_DIR"]), tmp_path)
    assert counts == {"train": 7473, "validation": 1319}
    rule = build_reward("gsm8k_rule")
    for name, count in counts.items():
        data_args = DataArguments(file_name=str(tmp_path / f"{name}.jsonl"))
        dataset = PromptDataset.build(data_args, tokenizer, 4096, {"gsm8k_rule": ["gsm8k"]})  # type: ignore[arg-type]
        assert len(dataset) == count
        right = rule([RewardSample(p.prompt_text, p.row["answer"], p.ground_truth) for p in dataset])
        assert {result.score for result in right} == {1.0}
        wrong = rule([RewardSample(p.prompt_text, p.row["answer"] + "1", p.ground_truth) for p in dataset])
        assert {result.score for result in wrong} == {0.0}
