"""Programming problems with tests: MBPP, HumanEval, APPS, TACO, CodeContests, LiveCodeBench and their like.

The tests of every set go into the column ``test_cases``, in a shape that the reward ``code_sandbox`` reads.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

from published import PrepareOptions, difficulty, json_of, others, prompt_columns, text_of

from roll.datasets.reading import Row, SourceRow
from roll.datasets.types import DataError

CODE_TAG = "code"
CODE_INSTRUCTION = "Write the program in Python, in one fenced code block (```python ... ```)."

PROBLEMS = ("question_content", "question", "text", "description", "problem", "prompt", "content")
TESTS = ("test_list", "test_setup_code", "test_imports", "challenge_test_list", "test", "input_output")
TEST_PARTS = ("public_test_cases", "private_test_cases", "public_tests", "private_tests", "generated_tests")
USED = ("id", "tag", "messages", "prompt", "test_cases", "ground_truth", "difficulty", *TESTS, *TEST_PARTS)
MAX_TESTS_MB = 512
"""Of one problem, unpacked: several times the largest of LiveCodeBench's."""
_AROUND_A_TEXT = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
LEVELS = ("introductory", "easy", "interview", "medium", "medium_hard", "hard", "competition", "very_hard")
"""Words for difficulty in these sets, from easy to hard."""


def convert_code(source: SourceRow, row_id: str, options: PrepareOptions) -> Row:
    """``id, tag, messages, prompt, test_cases``, ``difficulty`` where the row has one, and all other columns but the
    tests' own.

    Raises:
        DataError: no problem or no tests.
    """
    cases, shown = read_tests(source)
    prompt = text_of(source, PROBLEMS)
    starter = source.row.get("starter_code")
    if shown:
        tests = "\n".join(shown)
        prompt = f"{prompt}\n\nIt must pass these tests:\n```python\n{tests}\n```"
    if isinstance(starter, str) and starter.strip():
        prompt = f"{prompt}\n\nBegin with:\n```python\n{starter}\n```"
    head = {"id": row_id, "tag": options.tag, **prompt_columns(prompt, options), "test_cases": cases}
    return {**head, **difficulty(source, LEVELS), **others(source, USED)}


def read_tests(source: SourceRow) -> tuple[Any, list[str]]:
    """The tests, and those that the prompt shows (which tell the name of the function).

    Raises:
        DataError: none of the known shapes.
    """
    row = source.row
    if row.get("test_list"):
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
        tests = [str(test) for test in (*row["test_list"], *(row.get("challenge_test_list") or ()))]
        shown = [str(test) for test in row["test_list"]]
        return ({"test_list": tests, "test_setup_code": setup} if setup else tests), shown
    if row.get("test") and row.get("entry_point"):
        return {"test": row["test"], "entry_point": row["entry_point"]}, []
    if row.get("input_output"):
        return checked_pairs(source, json_of(source, "input_output"), "input_output"), []
    if row.get("public_test_cases") or row.get("private_test_cases"):
        return livecodebench_tests(source), []
    if row.get("public_tests") or row.get("private_tests"):
        parts = [row.get(name) or {} for name in ("public_tests", "private_tests", "generated_tests")]
        inputs = [text for part in parts for text in part.get("input", ())]
        outputs = [text for part in parts for text in part.get("output", ())]
        return checked_pairs(source, {"inputs": inputs, "outputs": outputs}, "public_tests and private_tests"), []
    for column in ("test_cases", "ground_truth"):
        if row.get(column):
            return json_of(source, column) if str(row[column])[:1] in "[{" else row[column], []
    known = "test_list, test with entry_point, input_output, public_test_cases, public_tests, test_cases"
    raise DataError(f"{source.place}: no tests: expected one of {known}; found {sorted(row)}")


def checked_pairs(source: SourceRow, found: Any, column: str) -> Row:
    """``inputs`` and ``outputs`` of equal length, with ``fn_name`` where functions are called.

    Raises:
        DataError: they are not.
    """
    inputs, outputs = (found.get(name) if isinstance(found, dict) else None for name in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise DataError(f"{source.place}: {column} must hold inputs and outputs, as many of one as of the other")
    name = {"fn_name": found["fn_name"]} if found.get("fn_name") else {}
    return {"inputs": inputs, "outputs": outputs, **name}


def livecodebench_tests(source: SourceRow) -> Any:
    """Public and private tests as ``[{input, output}]``, with the function's name in each where one is called."""
    tests: list[Row] = []
    for column in ("public_test_cases", "private_test_cases"):
        if source.row.get(column):
            tests += decoded(source, column)
    metadata = json_of(source, "metadata") if source.row.get("metadata") else {}
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    if not tests:
        raise DataError(f"{source.place}: public_test_cases and private_test_cases are empty")
    called = {"fn_name": name} if name else {}
    return [{"input": test["input"], "output": test["output"], **called} for test in tests]


def decoded(source: SourceRow, column: str) -> list[Row]:
    """A list of tests as JSON, or packed: base64 of zlib of a pickled JSON text."""
    value = source.row[column]
    if isinstance(value, str) and value.lstrip()[:1] != "[":
        try:
            value = pickled_text(decompressed(base64.b64decode(value)))
        except (binascii.Error, zlib.error, ValueError) as error:
            raise DataError(f"{source.place}: {column} cannot be unpacked: {error}") from error
    try:
        tests = json.loads(value) if isinstance(value, str) else value
        return [{"input": test["input"], "output": test["output"]} for test in tests]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{source.place}: {column} must be a list of tests with input and output") from error


def decompressed(data: bytes) -> bytes:
    """
    Raises:
        ValueError: more than ``MAX_TESTS_MB``, before that is in memory.
        zlib.error: it is no zlib.
    """
    stream = zlib.decompressobj()
    found = stream.decompress(data, MAX_TESTS_MB * 2**20)
    if not stream.eof:
        at_limit = len(found) == MAX_TESTS_MB * 2**20
        raise ValueError(f"more than {MAX_TESTS_MB} MB of tests" if at_limit else "it is cut off")
    return found


def pickled_text(data: bytes) -> str:
    """The text that a pickle holds. Nothing is unpickled: a downloaded file must neither run code nor fill the memory.

    Raises:
        ValueError: it holds something else.
    """
    texts: list[str] = []
    for code, argument, _ in pickletools.genops(data):
        if code.name.endswith("UNICODE") or code.name == "BINUNICODE8":
            texts.append(str(argument))
        elif code.name not in _AROUND_A_TEXT:
            raise ValueError(f"a pickle with {code.name}, which is more than a text")
    if len(texts) != 1:
        raise ValueError(f"a pickle of {len(texts)} texts in place of one")
    return texts[0]
