from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roll.config.roles import DataArguments
from roll.datasets import DataError
from roll.datasets.preferences import JudgedColumns, JudgedDataset

Write = Callable[..., str]
USER = {"role": "user", "content": "How many eggs?"}
PROMPT = "<|im_start|>user\nHow many eggs?<|im_end|>\n<|im_start|>assistant\n"


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def build(tokenizer: Any, files: str, limit: int = 1000, columns: JudgedColumns | None = None, **names: Any) -> Any:
    data = DataArguments(file_name=files, **names)
    return JudgedDataset.build(data, tokenizer, limit, columns or JudgedColumns(), "pairs")


def texts(tokenizer: Any, dataset: JudgedDataset) -> list[tuple[str, str, str]]:
    parts = ((row.prompt_ids, *row.responses) for row in dataset)
    return [tuple(tokenizer.decode(part) for part in three) for three in parts]  # type: ignore[misc]


SHAPES: dict[str, dict[str, Any]] = {
    "roll": {"instruction": "How many eggs?", "chosen": "12", "rejected": "21"},
    "text prompt": {"prompt": "How many eggs?", "chosen": "12", "rejected": "21"},
    "conversations": {"chosen": [USER, answer("12")], "rejected": [USER, answer("21")]},
    "ultrafeedback": {
        "prompt": "How many eggs?",
        "chosen": [USER, answer("12")],
        "rejected": [USER, answer("21")],
        "score_chosen": 8.5,
    },
    "prompt messages": {"prompt": [USER], "chosen": [answer("12")], "rejected": [answer("21")]},
    "objects": {"messages": [USER], "chosen": answer("12"), "rejected": answer("21")},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_rows(tokenizer: Any, write_jsonl: Write, shape: str) -> None:
    dataset = build(tokenizer, write_jsonl([SHAPES[shape]]))
    assert texts(tokenizer, dataset) == [(PROMPT, "12<|im_end|>", "21<|im_end|>")]
    assert dataset[0].sides[0] == dataset[0].prompt_ids + dataset[0].responses[0]


def test_columns_of_other_names(tokenizer: Any, write_jsonl: Write) -> None:
    file = write_jsonl([{"ask": "How many eggs?", "good": "12", "bad": "21", "gap": 2.5}])
    dataset = build(tokenizer, file, columns=JudgedColumns("good", "bad", "gap"), prompt="ask")
    assert texts(tokenizer, dataset) == [(PROMPT, "12<|im_end|>", "21<|im_end|>")]
    assert dataset[0].margin == 2.5


def test_pairs_with_a_longer_side_are_left_out_and_counted(tokenizer: Any, write_jsonl: Write) -> None:
    short, long = SHAPES["roll"], SHAPES["roll"] | {"rejected": "21 " * 40}
    limit = len(tokenizer(PROMPT)["input_ids"]) + 10
    dataset = build(tokenizer, write_jsonl([long, short]), limit)
    assert len(dataset) == 1 and dataset.counts.too_long == {"preferences": 1}
    with pytest.raises(DataError, match="none of 1 pairs fits into sequence_length"):
        build(tokenizer, write_jsonl([long]), limit)


def test_a_long_prompt_is_cut_and_its_responses_are_not(tokenizer: Any, write_jsonl: Write) -> None:
    long = SHAPES["roll"] | {"instruction": "very " * 40 + "How many eggs?", "rejected": "21 or so"}
    file = write_jsonl([long, SHAPES["roll"]])
    cut = build(tokenizer, file, 30, filter_overlong_prompts=False, truncation="left")
    assert len(cut) == 2 and cut.counts.truncated == {"preferences": 1}
    prompt, chosen, rejected = texts(tokenizer, cut)[0]
    assert prompt.startswith("<|im_start|>user\n") and prompt.endswith(PROMPT[-25:]), "the template stays whole"
    assert (chosen, rejected) == ("12<|im_end|>", "21 or so<|im_end|>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "a", "chosen": "b", "rejected": "b"}, "are the same text"),
        ({"instruction": "a", "chosen": "", "rejected": "b"}, "chosen must be a non-empty text"),
        ({"instruction": "a", "chosen": "b"}, "column 'rejected' expected"),
        ({"chosen": "b", "rejected": "c"}, "no prompt"),
        (
            {"chosen": [USER, answer("12")], "rejected": [{"role": "user", "content": "x"}, answer("1")]},
            "differ before their last messages",
        ),
        ({"prompt": "a", "chosen": [USER], "rejected": "c"}, "ends with a message of user"),
    ],
)
def test_rows_that_are_no_pair(tokenizer: Any, write_jsonl: Write, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(tokenizer, write_jsonl([row]))
    assert len(build(tokenizer, write_jsonl([row, SHAPES["roll"]]), on_bad_row="skip", prompt=_prompt(row))) == 1


def _prompt(row: dict[str, Any]) -> str | None:
    """The first row decides on the columns."""
    return "instruction" if "instruction" not in row else None
