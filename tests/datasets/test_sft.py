from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.roles import DataArguments
from roll.datasets import DataError, SftDataset
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.sft import read_demonstration
from tests.datasets.conftest import Write, rows_of

USER = {"role": "user", "content": "How many eggs?"}
PROMPT = "<|im_start|>user\nHow many eggs?<|im_end|>\n<|im_start|>assistant\n"


def build(
    tokenizer: Any, files: str, sequence_length: int = 1000, query_key: str | None = None, **names: str
) -> SftDataset:
    return SftDataset.build(DataArguments(file_name=files, **names), tokenizer, sequence_length, query_key=query_key)


def parts(tokenizer: Any, dataset: SftDataset) -> list[tuple[str, str]]:
    return [
        (tokenizer.decode(row.input_ids[: row.prompt_length]), tokenizer.decode(row.input_ids[row.prompt_length :]))
        for row in dataset
    ]


def test_the_loss_is_on_the_response_and_its_end(tokenizer: Any, write_jsonl: Write) -> None:
    (row,) = build(tokenizer, write_jsonl([{"id": "1", "tag": "t", "messages": [USER], "solution": "3*4=12"}]))
    assert tokenizer.decode(row.input_ids) == f"{PROMPT}3*4=12<|im_end|>"
    alone = tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert row.input_ids[: row.prompt_length] == alone, "those of generation"
    assert len(row.response_mask) == len(row.input_ids)
    learned = [token for token, wanted in zip(row.input_ids, row.response_mask, strict=True) if wanted]
    assert tokenizer.decode(learned) == "3*4=12<|im_end|>"
    assert (learned[-1], row.row_id, row.tag) == (tokenizer.eos_token_id, "1", "t")


def test_where_the_response_comes_from(tokenizer: Any, write_jsonl: Write) -> None:
    answer = {"role": "assistant", "content": "12"}
    forms: list[tuple[dict[str, object], dict[str, str]]] = [
        ({"messages": [USER], "solution": "12"}, {}),
        ({"messages": [USER, answer]}, {}),
        ({"prompt": "How many eggs?", "output": "12"}, {"response": "output"}),
        ({"ask": "How many eggs?", "solution": "12"}, {"prompt": "ask"}),
        ({"": "1", "prompt": "How many eggs?", "solution": "12"}, {}),  # pandas writes numbers of rows without a name
    ]
    for columns, names in forms:
        assert parts(tokenizer, build(tokenizer, write_jsonl([columns]), **names)) == [(PROMPT, "12<|im_end|>")]
    turns = [USER, answer, USER, {"role": "assistant", "content": "24"}]
    ((prompt, response),) = parts(tokenizer, build(tokenizer, write_jsonl([{"messages": turns}])))
    assert "12<|im_end|>" in prompt and response == "24<|im_end|>", "earlier answers belong to the prompt"


def test_further_input_follows_the_instruction(tokenizer: Any, write_jsonl: Write) -> None:
    rows = [{"prompt": "Add.", "input": "3 4", "solution": "7"}, {"prompt": "Go.", "input": "", "solution": "ok"}]
    with_input, without = parts(tokenizer, build(tokenizer, write_jsonl(rows), query_key="input"))
    talk = {"messages": [USER, {"role": "assistant", "content": "12"}], "input": "In a box?"}
    ((prompt, response),) = parts(tokenizer, build(tokenizer, write_jsonl([talk]), query_key="input"))
    assert "How many eggs?\n\nIn a box?<|im_end|>" in prompt and response == "12<|im_end|>"
    assert "user\nAdd.\n\n3 4<|im_end|>" in with_input[0]
    assert "user\nGo.<|im_end|>" in without[0]
    question = [{"type": "image"}, {"type": "text", "text": "How many eggs?"}]
    row = {"messages": [{"role": "user", "content": question}], "solution": "12", "input": "In a box?"}
    source = SourceRow(Path("rows.jsonl"), 1, row)
    messages, _ = read_demonstration(Columns.of(DataArguments(), source), source, "input")
    assert messages[0]["content"] == [*question, {"type": "text", "text": "\n\nIn a box?"}]


def test_the_system_message_is_in_a_column(tokenizer: Any, write_jsonl: Write) -> None:
    """Rows with one of their own keep it; ``system_prompt`` is for those where the column is empty."""
    own = {"role": "system", "content": "Mine."}
    answer = {"role": "assistant", "content": "12"}
    rows = [
        {"messages": [USER, answer], "rules": "Be brief."},
        {"messages": [own, USER, answer], "rules": "Be brief."},
        {"messages": [USER, answer], "rules": None},
    ]
    for train_on in ("last", "assistant"):
        data_args = DataArguments(file_name=write_jsonl(rows), system_prompt="Be kind.")
        found = SftDataset.build(data_args, tokenizer, 1000, system_key="rules", train_on=train_on)
        texts = [tokenizer.decode(row.input_ids) for row in found]
        heads = ["Be brief.", "Mine.", "Be kind."]
        assert [text.partition("<|im_end|>")[0] for text in texts] == [f"<|im_start|>system\n{head}" for head in heads]
        assert all(text.count("system\n") == 1 for text in texts)


def test_long_rows_are_left_out_and_counted(tokenizer: Any, write_jsonl: Write) -> None:
    rows = [{"messages": [USER], "solution": "1"}, {"messages": [USER], "solution": "12 " * 50}]
    dataset = build(tokenizer, write_jsonl(rows), sequence_length=60)
    assert (len(dataset), dataset.counts.too_long) == (1, {"sft": 1})
    with pytest.raises(DataError, match="none of 2 demonstrations fits into sequence_length = 2"):
        build(tokenizer, write_jsonl(rows), sequence_length=2)


@pytest.mark.parametrize(("row", "message"), rows_of("bad_rows", "demonstrations"))
def test_rows_without_a_response_say_so(tokenizer: Any, write_jsonl: Write, row: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(tokenizer, write_jsonl([row]))
