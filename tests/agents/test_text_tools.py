"""Tools around environments, called in the text of a response; questions of a data set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from roll.agents.built_in_tools import PythonTool, ToolSet
from roll.agents.tool_environment import ToolEnvironment, _calls, tool_specs
from roll.agents.tools import ToolBox, ToolError
from roll.environments.base import Environment
from roll.environments.checking import check_environment
from roll.environments.registry import EnvironmentOptionError, make_environment


@pytest.fixture
def questions(tmp_path: Path) -> str:
    file = tmp_path / "questions.jsonl"
    rows = [{"problem": f"What is {n} + {n} ?", "answer": str(2 * n), "prompt": f"{n}?"} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def played(environment: Environment, *actions: str, seed: int = 3) -> list[Any]:
    async def play() -> list[Any]:
        found: list[Any] = [await environment.reset(seed)]  # type: ignore[misc]
        for action in actions:
            found.append(await environment.step(action))  # type: ignore[misc]
        return found

    return asyncio.run(play())


@pytest.mark.parametrize(("name", "right"), [("roll_math", r"\boxed{%s}"), ("roll_qa", r"It is \boxed{ %s. }")])
def test_questions_of_rolls_files(questions: str, name: str, right: str) -> None:
    environment = make_environment(name, {"dataset_name": questions, "mode": "train", "split": "train"})
    text, _ = environment.reset(seed=5)  # type: ignore[misc]
    assert environment.reset(seed=5)[0] == text  # type: ignore[index]
    number = int(str(text).split()[2])
    assert environment.step(right % (2 * number))[1:4] == (1.0, True, False)  # type: ignore[index]
    environment.reset(seed=5)
    assert environment.step(r"\boxed{-1}")[1] == 0.0  # type: ignore[index]
    assert not check_environment(name, {"dataset_name": questions}, episodes=3).faults


def test_a_column_that_is_not_there(questions: str) -> None:
    environment = make_environment("roll_math", {"dataset_name": questions, "answer_key": "solution"})
    with pytest.raises(ValueError, match="no column 'solution'; it has problem, answer, prompt"):
        environment.reset(seed=1)
    with pytest.raises(EnvironmentOptionError, match="did you mean 'answer_key'"):
        make_environment("roll_math", {"dataset_name": questions, "answer_kye": "x"})


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("So <code>print(1)</code>", "print(1)"),
        ("<code>print(1)", "print(1)"),
        ("<python>\nx = 2\n</python> then", "x = 2"),
        ("```python\nprint(3)\n```", "print(3)"),
        ("print(1)", None),
    ],
)
def test_programs_in_a_text(text: str, program: str | None) -> None:
    box = ToolBox([PythonTool().tool()])
    assert [call.arguments["code"] for call in _calls(text, box)] == ([] if program is None else [program])


def test_the_options_of_rolls_files() -> None:
    given = {"timeout": 5, "sandbox_type": "none", "keep_error_last_line": False}
    found = tool_specs([("python_code", given), ("search", {"search_url": "http://x", "topk": 2})])
    assert found == [{"python": {"timeout": 5}}, {"search": {"url": "http://x", "top_k": 2}}]


class _Search(BaseHTTPRequestHandler):
    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        found = [{"document": {"contents": f"text {n}"}, "score": 1.0} for n in range(self.asked[-1]["topk"])]
        self.wfile.write(json.dumps({"result": [found]}).encode())

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def search_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Search)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()


def test_a_search_service(questions: str, search_url: str) -> None:
    tools = ToolSet(tool_specs([("search", {"search_url": search_url, "topk": 2})]))
    inner = make_environment("roll_qa", {"dataset_name": questions})
    _, searched, answered = played(
        ToolEnvironment(inner, tools, 0.1, 0.5, 3), "Let me see. <search> who was first ", "nobody"
    )
    assert _Search.asked[-1] == {"queries": ["who was first"], "topk": 2, "return_scores": True}
    assert searched[0] == "[1] text 0\n\n[2] text 1" and searched[1:4] == (0.1, False, False)
    assert answered[1:4] == (0.0, True, False)
    nowhere = ToolSet([{"search": {"url": "http://127.0.0.1:9/x", "timeout": 1}}])
    _, failed = played(ToolEnvironment(inner, nowhere, 0.0, 0.0, 3), "<search>x</search>")
    assert "Error" in failed[0] and failed[4]["metrics"]["failed_tool_calls"] == 1.0
    with pytest.raises(ToolError, match="either `path`"):
        ToolSet(["search"])
