"""``examples/data/convert.py`` on rows in the shapes that sets are published in."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from roll.datasets import DataError
from roll.datasets.reading import SourceRow, read_rows
from tests.examples.pages import ROOT

sys.path.insert(0, str(ROOT / "examples/data"))  # as the scripts there find one another
from code_sets import convert_code
from convert import main
from math_sets import convert_math
from preference_sets import convert_label, convert_pair, convert_ranking
from published import Convert, PrepareOptions

OPTIONS = PrepareOptions("t")


def written(folder: Path, rows: list[Any]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def converted(convert: Convert, row: dict[str, Any], options: PrepareOptions = OPTIONS) -> dict[str, Any]:
    return convert(SourceRow(Path("x.jsonl"), 3, row), "x-2", options)


@pytest.mark.parametrize(
    ("row", "answer", "more"),
    [
        (
            {"problem": "P?", "level": "Level 5", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."},
            r"\frac{1}{2}",
            {"difficulty": 5.0, "type": "Algebra"},
        ),
        ({"problem": "P?", "solution": r"\boxed{9}", "answer": "10", "level": 2}, "10", {"difficulty": 2}),
        ({"Problem": "P?", "Answer": 33, "Year": 2024}, "33", {"Year": 2024}),
        ({"question": "P?", "final_answer": ["7"], "level": "Level ?"}, "7", {"level": "Level ?"}),
    ],
)
def test_math(row: dict[str, Any], answer: str, more: dict[str, Any]) -> None:
    found = converted(convert_math, row, PrepareOptions("m", "Box it.", "Think."))
    assert (found["id"], found["tag"], found["ground_truth"]) == ("x-2", "m", answer)
    assert found["messages"] == [{"role": "system", "content": "Think."}, {"role": "user", "content": "P?\n\nBox it."}]
    assert more.items() <= found.items()


def test_math_of_dapo_keeps_its_conversation() -> None:
    prompt = [{"role": "user", "content": "Solve. P?"}]
    row = {"data_source": "math_dapo", "prompt": prompt, "reward_model": {"ground_truth": "34", "style": "rule"}}
    found = converted(convert_math, row, PrepareOptions("m", "Box it."))
    assert (found["messages"], found["prompt"], found["ground_truth"]) == (prompt, "Solve. P?", "34")
    assert found["data_source"] == "math_dapo"


@pytest.mark.parametrize(
    ("convert", "row", "message"),
    [
        (convert_math, {"answer": "1"}, r"x\.jsonl, row 3: expected one of the columns problem, .* found \['answer'\]"),
        (convert_math, {"problem": "?", "solution": "none"}, r"row 3: no answer: solution has none in a \\boxed"),
        (convert_math, {"problem": " ", "answer": "1"}, "problem must be a non-empty text"),
        (convert_code, {"question": "?"}, "no tests: expected one of test_list"),
        (
            convert_code,
            {"question": "?", "input_output": '{"inputs": ["1"], "outputs": []}'},
            "as many of one as of the other",
        ),
        (convert_code, {"question": "?", "input_output": "{"}, "input_output is not valid JSON"),
        (convert_code, {"question": "?", "public_test_cases": '[{"input": 1}]'}, "list of tests with input and output"),
        (convert_code, {"question": "?", "public_test_cases": "!"}, "public_test_cases cannot be unpacked"),
        (convert_pair, {"prompt": "?", "chosen": "a"}, "expected one of the columns rejected"),
        (convert_pair, {"prompt": "?", "chosen": "a", "rejected": "a"}, "the same response"),
        (convert_pair, {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"}, "different prompts"),
    ],
)
def test_rows_that_cannot_be_converted_say_why(convert: Convert, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        converted(convert, row)


def packed(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


PAIR = {"input": "1\n", "output": "2\n", "testtype": "stdin"}
CODE_ROWS: list[tuple[dict[str, Any], Any]] = [
    (
        {"text": "Add.", "code": "...", "task_id": 1, "test_list": ["assert f(1) == 2"], "test_setup_code": ""},
        ["assert f(1) == 2"],
    ),
    (
        {"prompt": "Add.", "test_imports": ["import math"], "test_list": ["assert f(1)"]},
        {"test_list": ["assert f(1)"], "test_setup_code": "import math"},
    ),
    (
        {"prompt": "def f(x):", "entry_point": "f", "test": "def check(candidate): assert candidate(1) == 2"},
        {"test": "def check(candidate): assert candidate(1) == 2", "entry_point": "f"},
    ),
    (
        {"question": "Add.", "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}), "difficulty": "EASY"},
        {"inputs": ["1\n"], "outputs": ["2\n"]},
    ),
    (
        {"question": "Add.", "input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [2]}},
        {"inputs": [[1]], "outputs": [2], "fn_name": "f"},
    ),
    (
        {"question_content": "Add.", "public_test_cases": json.dumps([PAIR]), "private_test_cases": packed([PAIR])},
        [{"input": "1\n", "output": "2\n"}] * 2,
    ),
    (
        {"question_content": "Add.", "public_test_cases": json.dumps([PAIR]), "metadata": '{"func_name": "f"}'},
        [{"input": "1\n", "output": "2\n", "fn_name": "f"}],
    ),
    (
        {"description": "Add.", "public_tests": {"input": ["1"], "output": ["2"]}, "private_tests": None},
        {"inputs": ["1"], "outputs": ["2"]},
    ),
    ({"prompt": "Add.", "ground_truth": '["assert f(1) == 2"]'}, ["assert f(1) == 2"]),
]


@pytest.mark.parametrize(("row", "cases"), CODE_ROWS)
def test_code(row: dict[str, Any], cases: Any) -> None:
    found = converted(convert_code, row)
    assert found["test_cases"] == cases
    assert not {"test_list", "input_output", "public_test_cases", "private_test_cases"} & found.keys()
    assert ("assert f(1)" in found["prompt"]) == ("test_list" in row)
    assert found.get("difficulty") == (1 if "difficulty" in row else None)


def test_starter_code_stands_in_the_prompt() -> None:
    row = {"question": "Add.", "starter_code": "class S:", "test_cases": [{"input": "1", "output": "2"}]}
    assert converted(convert_code, row, PrepareOptions("c", "Python!"))["prompt"] == (
        "Add.\n\nBegin with:\n```python\nclass S:\n```\n\nPython!"
    )


class Trap:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def test_packed_tests_run_no_code(tmp_path: Path) -> None:
    trap = base64.b64encode(zlib.compress(pickle.dumps(Trap(f"touch {tmp_path}/sprung")))).decode()
    with pytest.raises(DataError, match="cannot be unpacked: a pickle with STACK_GLOBAL"):
        converted(convert_code, {"question": "?", "private_test_cases": trap})
    assert not (tmp_path / "sprung").exists()


BOMBS = {
    "zeros": (zlib.compress(bytes(2**26)), "more than 1 MB of tests"),
    "a_place_far_away": (zlib.compress(b"\x80\x02X\x01\x00\x00\x00ar\xff\xff\xff\x7f."), "must be a list of tests"),
    "a_long_array": (zlib.compress(b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b"."), "cannot be unpacked"),
    "cut_off": (zlib.compress(b"x" * 99)[:-5], "it is cut off"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_packed_tests_fill_no_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, message = BOMBS[name]
    monkeypatch.setattr("code_sets.MAX_TESTS_MB", 1)
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        converted(convert_code, {"question": "?", "private_test_cases": base64.b64encode(data).decode()})
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "?"), ("assistant", "a"), ("assistant", "b"))
)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "chosen": "a", "rejected": "b"},
        {"prompt": "?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": "\n\nHuman: ?\n\nAssistant: a", "rejected": "\n\nHuman: ?\n\nAssistant: b"},
    ],
)
def test_preferences(row: dict[str, Any]) -> None:
    found = converted(convert_pair, row | {"score": 1})
    assert found == {"id": "x-2", "tag": "t", "messages": [USER], "chosen": "a", "rejected": "b", "score": 1}


def two(a: str, b: str) -> dict[str, Any]:
    return {"chosen": [USER, GOOD | {"content": a}], "rejected": [USER, BAD | {"content": b}]}


PUBLISHED: dict[str, tuple[dict[str, Any], float | None]] = {
    "UltraFeedback (H4)": ({"prompt": "?", **two("a", "b"), "score_chosen": 8.5, "score_rejected": 6}, 2.5),
    "UltraFeedback (trl-lib)": ({**two("a", "b"), "score_chosen": 8, "score_rejected": 6}, 2),
    "Argilla": ({"prompt": "?", **two("a", "b"), "chosen-rating": 5, "rejected-rating": 4.5}, 0.5),
    "Skywork-Reward": (two("a", "b"), None),
    "HelpSteer2": ({"prompt": "?", "response_1": "b", "response_2": "a", "preference_strength": 2}, 2),
    "HelpSteer3": ({"context": [USER], "response1": "a", "response2": "b", "overall_preference": -3}, 3),
    "SHP": ({"history": "?", "human_ref_A": "b", "human_ref_B": "a", "labels": 0, "score_ratio": 1.0001}, 1e-4),
    "Nectar": (
        {
            "prompt": "\n\nHuman: ?\n\nAssistant: ",
            "answers": [{"answer": "c", "rank": 2.0}, {"answer": "b", "rank": 3.0}, {"answer": "a", "rank": 1.0}],
        },
        None,
    ),
    "UltraFeedback's own": (
        {
            "instruction": "?",
            "completions": [{"response": "b", "overall_score": 3}, {"response": "a", "overall_score": 7.5}],
        },
        4.5,
    ),
    "LLaMA-Factory": (
        {
            "conversations": [{"from": "human", "value": "?"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        None,
    ),
    "comparison_gpt4": ({"instruction": "?", "input": "", "output": ["a", "b"]}, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_preferences(name: str) -> None:
    row, margin = PUBLISHED[name]
    found = converted(convert_pair, row)
    assert (found["messages"], found["chosen"], found["rejected"]) == ([USER], "a", "b")
    assert found.get("margin") == (None if margin is None else pytest.approx(margin, rel=1e-3))


def test_rankings_and_labels() -> None:
    nectar = converted(convert_ranking, PUBLISHED["Nectar"][0])
    assert (nectar["messages"], nectar["responses"], nectar["scores"]) == ([USER], ["a", "c", "b"], [-1, -2, -3])
    graded = converted(convert_ranking, {"prompt": "?", "response": "a", "helpfulness": 3, "verbosity": 2})
    assert (graded["responses"], graded["scores"], graded["verbosity"]) == (["a"], [3.0], 2)
    wanted = {"id": "x-2", "tag": "t", "messages": [USER], "completion": "a", "label": False}
    for row in (
        {"prompt": "?", "completion": "a", "label": False},
        {"prompt": [USER], "completion": [GOOD], "label": False},
        {"messages": [USER, GOOD], "kto_tag": False},
    ):
        assert converted(convert_label, row) == wanted
    with pytest.raises(DataError, match="label must be true or false"):
        converted(convert_label, {"prompt": "?", "completion": "a", "label": "good"})


def test_rows_without_a_preference_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    hh = "\n\nHuman: ?\n\nAssistant: a\n\nHuman: {}\n\nAssistant: {}"
    rows = [
        {"prompt": "?", "response_1": "a", "response_2": "b", "preference_strength": 0},
        {"prompt": "?", "chosen": "a", "rejected": "a"},
        {"prompt": "?", "chosen": "a", "rejected": " "},
        {"chosen": hh.format("x", "a"), "rejected": hh.format("x", "")},
        {"chosen": hh.format("x", "a"), "rejected": hh.format("y", "b")},
        {"chosen": hh.format("x", "a"), "rejected": hh.format("x", "b")},
    ]
    target = tmp_path / "pairs.jsonl"
    assert main(["preferences", "--input", written(tmp_path, rows), "--output", str(target)]) == 0
    (kept,) = [source.row for source in read_rows(str(target))]
    assert [message["content"] for message in kept["messages"]] == ["?", "a", "x"]
    assert "1 rows" in caplog.text and "5 left out (2 empty response" in caplog.text
    assert all(reason in caplog.text for reason in ("1 tie", "1 same response", "1 different prompts"))


def test_the_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = written(
        tmp_path, [{"problem": "P?", "answer": "1"}, {"problem": "Q?"}, "{", {"problem": "R?", "answer": "2"}]
    )
    target = tmp_path / "out" / "train.jsonl"
    command = ["math", "--input", source, "--output", str(target), "--tag", "aime", "--instruction", ""]
    assert main(command) == 2
    assert "row 2: expected one of the columns solution" in caplog.text and not target.exists()
    assert main([*command, "--on-bad-row", "skip"]) == 0
    rows = [source.row for source in read_rows(str(target))]
    assert [(row["id"], row["tag"], row["prompt"]) for row in rows] == [
        ("train-0", "aime", "P?"),
        ("train-2", "aime", "R?"),
    ]
    assert main(["labels", "--input", source, "--output", str(target), "--on-bad-row", "skip"]) == 2
    assert "none of 4 rows could be converted" in caplog.text
