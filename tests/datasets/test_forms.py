"""Published files as they lie: each is read into the package's columns, by its first row or by ``data_args``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config.data import DataArguments
from roll.datasets.columns import Columns
from roll.datasets.forms import form_of, last_boxed, read_ground_truth
from roll.datasets.reading import SourceRow
from roll.datasets.sft import read_demonstration, read_dialogue
from roll.datasets.types import DataError
from tests.datasets.conftest import rows_of

QUESTION = [{"role": "user", "content": "2 + 3?"}]


def read(row: dict[str, Any], **data_args: Any) -> tuple[Columns, SourceRow]:
    source, arguments = SourceRow(Path("data.jsonl"), 1, row), DataArguments(**data_args)
    converted = form_of(arguments, source)(source)
    return Columns.of(arguments, converted), converted


@pytest.mark.parametrize(("name", "row", "truth"), rows_of("published_rows", "prompts"))
def test_prompts_and_ground_truths(name: str, row: dict[str, Any], truth: Any) -> None:
    columns, source = read(row)
    assert columns.read_messages(source) == QUESTION
    assert read_ground_truth(source.row) == truth


def test_entries_of_a_column_have_dotted_names() -> None:
    section = {"question": "2 + 3?", "answer": {"text": "It is 5"}}
    names = {"prompt": "extra_info.question", "response": "extra_info.answer.text"}
    for written in (section, json.dumps(section)):
        columns, source = read({"prompt": "another", "extra_info": written}, **names)
        assert read_demonstration(columns, source) == (QUESTION, "It is 5")
    with pytest.raises(DataError, match=r"extra_info\.query names an entry 'query', found question, answer"):
        read({"extra_info": section}, prompt="extra_info.query")
    assert read({"extra_info.question": "2 + 3?"}, prompt="extra_info.question")[0].prompt == "extra_info.question"


@pytest.mark.parametrize(("name", "row"), rows_of("published_rows", "demonstrations"))
def test_demonstrations(name: str, row: dict[str, Any]) -> None:
    assert read_demonstration(*read(row)) == (QUESTION, "It is 5")


def test_alpaca_has_a_system_message_a_history_and_an_input() -> None:
    row = {"instruction": "And twice that?", "input": "in words", "output": "ten", "system": "Be short."}
    row["history"] = [["2 + 3?", "5"]]
    messages, response = read_demonstration(*read(row))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert (messages[-1]["content"], response) == ("And twice that?\nin words", "ten")


def test_every_turn_of_sharegpt() -> None:
    turns = [("system", "Add."), ("human", "2 + 3?"), ("gpt", "5"), ("human", "+ 1?"), ("gpt", "6")]
    columns, source = read({"conversations": [{"from": speaker, "value": text} for speaker, text in turns]})
    messages, _ = read_dialogue(columns, source)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    with pytest.raises(DataError, match="row 1: a turn is from 'narrator'; expected one of human, user, gpt"):
        read({"conversations": [{"from": "narrator", "value": "Once"}]})


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"instruction": "2 + 3?", "output": "5"}, {"output": "5"}),
        ({"conversations": [{"from": "human", "value": "2 + 3?"}]}, {"conversation": []}),
        ({"question": "2 + 3?", "answer": "5"}, {"question": None, "answer": "5"}),
        ({"instruction": "2 + 3?", "output": "5"}, {"instruction": "And?", "history": [["2 + 3?"]], "output": "5"}),
    ],
)
def test_a_later_row_of_another_form_is_named(first: dict[str, Any], later: dict[str, Any]) -> None:
    form = form_of(DataArguments(), SourceRow(Path("data.jsonl"), 1, first))
    with pytest.raises(DataError, match=r"data\.jsonl, row 2: "):
        form(SourceRow(Path("data.jsonl"), 2, later))


def test_a_named_column_and_a_pattern() -> None:
    row = {"question": "2 + 3?", "result": "Answer: 4. Answer: 5.", "answer": "6"}
    assert read_ground_truth(read(row, ground_truth="result")[1].row) == "Answer: 4. Answer: 5."
    pattern = {"column": "result", "pattern": r"Answer: (\d+)"}
    assert read_ground_truth(read(row, ground_truth=pattern)[1].row) == "5"
    with pytest.raises(DataError, match=r"names the column 'reslt', found only answer, question, result"):
        read(row, ground_truth="reslt")
    with pytest.raises(
        DataError, match=r"pattern 'Result: \(\.\*\)' finds nothing in result: 'Answer: 4\. Answer: 5\.'"
    ):
        read(row, ground_truth={"column": "result", "pattern": "Result: (.*)"})


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\fbox{3}", "3"),
        (r"\boxed 5.", "5"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{}", ""),
        (r"\boxed{1}, in \boxed{}", "1"),
        ("boxed{1}", None),
        (r"\boxed", None),
    ],
)
def test_boxes(text: str, content: str | None) -> None:
    assert last_boxed(text) == content
