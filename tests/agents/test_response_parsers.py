"""The table of docs/design/response-parsers.md: our reader is right in every case; the page says what vLLM's read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.parser_table import CASES, FAMILIES, Case, ours, page, verdict

PAGE = Path(__file__).parents[2] / "docs/design/response-parsers.md"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_our_reader_is_right(case: Case) -> None:
    read = {name: verdict(case, family, [ours]) for name, family in FAMILIES.items()}
    # A JSON text that names no tool is an answer for Llama 3, whose calls have no mark.
    wrong = {"llama3_json"} if case.title == "unknown tool" else set()
    assert {name for name, found in read.items() if found == "neither"} == wrong


def test_the_page_is_up_to_date() -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("openai_harmony")
    assert PAGE.read_text("utf-8") == page(), "python -m tests.agents.parser_table writes the page"
