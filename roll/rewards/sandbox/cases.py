"""Reads the test cases of a program from a data row, in the formats of common data sets.

=====================  ==================================================================================
shape                  columns (or keys of a JSON ``ground_truth`` or ``test_cases``)
=====================  ==================================================================================
asserts                a list of texts; ``test_list`` with ``test_setup_code`` or ``test_imports``;
                       ``[{"assert_code": ...}]``; what they define and do not call is called: functions ``test...``,
                       classes of unittest, ``check(candidate)`` with ``entry_point``
check function         ``test`` and ``entry_point``: the test defines ``check(candidate)``
input and output       ``{"inputs": [...], "outputs": [...]}``; ``[{"input" or "stdin": ..., "output" or
                       "expected_stdout": ...}]``
calls                  the same with ``fn_name``; inputs are lists of arguments, or texts with one JSON value per line
pytest                 ``{"pytest": text}``; ``case_type: pytest`` with ``[{"assert_code": text}]``
=====================  ==================================================================================
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from roll.rewards.base import read_json
from roll.rewards.sandbox.snippets import CaseError, Method, check_pytest_file, prepared

Kind = Literal["io", "calls", "tests", "pytest"]
_INPUT_KEYS, _OUTPUT_KEYS = ("stdin", "input"), ("expected_stdout", "output", "stdout")
_SETUP_KEYS = ("test_setup_code", "test_imports", "setup")


@dataclass(frozen=True, slots=True)
class Cases:
    kind: Kind
    texts: list[str] = field(default_factory=list)  # `tests`: one source per case. `pytest`: the text of the file.
    setup: str = ""
    entry_point: str = ""  # argument of a test's `check(candidate)`
    streams: list[tuple[str, str]] = field(default_factory=list)  # `io`: input and expected output of each case
    fn_name: str = ""
    calls: list[dict[str, list[Any]]] = field(default_factory=list)
    """``arguments``, and ``accepted``: each of these results is right; a data set's notation may be ambiguous."""
    methods: list[Method | None] = field(default_factory=list)
    """``tests``: for each source the method of unittest's that runs after it."""

    @property
    def count(self) -> int:
        """Number of cases; 1 for a pytest file, whose tests are known only when it runs."""
        return len(self.streams or self.calls or self.texts)


def read_cases(ground_truth: object, row: Mapping[str, Any]) -> Cases:
    """The cases of a row: its column ``test_cases``, else ``ground_truth``, else its columns themselves.

    What tests only define is called. Raises ``CaseError``: there are none, they have no known shape, test nothing, or
    cannot work.
    """
    given = row.get("test_cases") or ground_truth
    source = read_json(given) if given else row
    if given and not isinstance(source, (Mapping, list)):
        source = [source]
    try:
        cases = _read(source, {**row, **source} if isinstance(source, Mapping) else dict(row))
    except CaseError:
        raise
    except (KeyError, TypeError, ValueError, SyntaxError, AttributeError) as error:
        raise CaseError(f"test cases of an unknown shape: {type(error).__name__}: {error}") from error
    if not cases.count:
        raise CaseError("the row has no test cases")
    if cases.kind == "pytest":
        check_pytest_file(cases.texts[0])
    if cases.kind != "tests":
        return cases
    tests = prepared(tuple(cases.texts), cases.setup, cases.entry_point)
    if isinstance(tests, str):
        return Cases("pytest", [tests], entry_point=cases.entry_point)
    return replace(cases, texts=[text for text, _ in tests], methods=[method for _, method in tests])


def _read(source: object, columns: Mapping[str, Any]) -> Cases:
    if not isinstance(source, list):
        if "pytest" in columns:
            return Cases("pytest", [str(columns["pytest"])])
        if "inputs" in columns:
            pairs = zip(read_json(columns["inputs"]), read_json(columns["outputs"]), strict=True)
            return _from_pairs(list(pairs), columns, True)
        if "test_list" in columns:
            return tests_of(list(map(str, read_json(columns["test_list"]))), columns)
        if "test" in columns:
            return tests_of([str(columns["test"])], columns)
        known = "test_cases, ground_truth, test_list, test and entry_point, inputs and outputs, pytest"
        raise CaseError(f"the row has none of: {known}")
    if all(isinstance(item, str) for item in source):
        sources = list(source)
    elif all(isinstance(item, Mapping) and "assert_code" in item for item in source):
        sources = [str(item["assert_code"]) for item in source]
    else:
        name = fn_name_of(columns) or next((fn_name_of(item) for item in source if fn_name_of(item)), "")
        pairs_of = [(first(item, _INPUT_KEYS), first(item, _OUTPUT_KEYS)) for item in source]
        return _from_pairs(pairs_of, {**columns, "fn_name": name}, False)
    if columns.get("case_type") == "pytest":
        return Cases("pytest", ["\n\n".join(sources)])
    named = next((item["entry_point"] for item in source if isinstance(item, Mapping) and item.get("entry_point")), "")
    return tests_of(sources, {"entry_point": named, **columns})


def tests_of(sources: list[str], columns: Mapping[str, Any]) -> Cases:
    entry_point = str(columns.get("entry_point") or fn_name_of(columns))
    parts = [columns.get(key) for key in _SETUP_KEYS]
    setup = "\n".join("\n".join(part) if isinstance(part, list) else str(part) for part in parts if part)
    return Cases("tests", sources, setup, entry_point)


def _from_pairs(pairs: Sequence[tuple[Any, Any]], columns: Mapping[str, Any], wrapped: bool) -> Cases:
    """Cases of pairs: input and output, or with ``fn_name`` the arguments of a call (a list, or a text with one JSON
    value per line) and its result (or a text that holds it as JSON). ``wrapped``: a list of one element may also mean
    that element, as in TACO and APPS."""
    name, calls = fn_name_of(columns), []
    if not name:
        # A list of lines is joined.
        texts = [["\n".join(map(str, one)) if isinstance(one, list) else str(one) for one in pair] for pair in pairs]
        return Cases("io", streams=[(given, wanted) for given, wanted in texts])
    for given, wanted in pairs:
        arguments = [literal(line) for line in given.strip().splitlines()] if isinstance(given, str) else list(given)
        expected = literal(wanted) if isinstance(given, str) and isinstance(wanted, str) else wanted
        inside = expected if wrapped and isinstance(expected, list) and len(expected) == 1 else []
        calls.append({"arguments": arguments, "accepted": [expected, *inside]})
    return Cases("calls", fn_name=name, calls=calls)


def literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


def fn_name_of(columns: Mapping[str, Any]) -> str:
    metadata = read_json(columns.get("metadata"))
    inner = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return str(columns.get("fn_name") or columns.get("func_name") or inner or "")


def first(item: Mapping[str, Any], keys: Sequence[str]) -> Any:
    for key in keys:
        if key in item:
            return item[key]
    raise KeyError(f"a case needs {' or '.join(keys)}")
