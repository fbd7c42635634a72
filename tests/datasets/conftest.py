from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TINY_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny"
TINY_MODULES = ("prepare", "tiny_model", "word_problems")


@pytest.fixture(scope="session")
def tiny() -> Iterator[dict[str, ModuleType]]:
    """The modules of the tiny example, which is a folder of scripts and no package."""
    sys.path.insert(0, str(TINY_EXAMPLE))
    yield {name: importlib.import_module(name) for name in TINY_MODULES}
    sys.path.remove(str(TINY_EXAMPLE))
    for name in TINY_MODULES:
        # Folders that borrow this fixture each have one of their own; the first to end takes the modules away.
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def tokenizer(tiny: dict[str, ModuleType]) -> Any:
    problems = tiny["word_problems"].draw_problems(200, seed=0, validation=False)
    return tiny["tiny_model"].make_tokenizer(p.question for p in problems)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


Write = Callable[..., str]
"""``write_jsonl``: rows to the path of a file with them."""


def row(row_id: str, tag: str = "easy", text: str = "How many eggs?", **more: object) -> dict[str, object]:
    """A prompt in a conversation."""
    return {"id": row_id, "tag": tag, "messages": [{"role": "user", "content": text}], **more}


def rows_of(file: str, kind: str) -> list[list[Any]]:
    """Cases of a kind in ``FILE.jsonl``, without their kind."""
    lines = Path(__file__).with_name(f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    return [case[1:] for case in map(json.loads, lines) if case[0] == kind]
