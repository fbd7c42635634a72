"""An agent that repairs small repositories, ``agent: examples.agentic_demo.repository_agent.RepositoryAgent``.

The policy reads and writes files by tools and runs programs in the sandbox; tests are the reward.

A task is a row with ``issue``, ``files`` (path to text) or ``folder``, ``tests`` (a text of asserts, shown to the
policy and run at its wish), ``hidden_tests`` (the same, for the verdict alone) and ``imports`` (what both begin
with). Files live in memory: an episode never touches the row's folder, and all that the policy writes runs in the
code sandbox, which gets a copy of the files each time.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from roll.agents.agent_options import ToolAgentOptions
from roll.agents.built_in_tools import PythonTool, ToolSet
from roll.agents.episode import Episode, EpisodeOver, Model, Task
from roll.agents.tool_agent import ToolAgent
from roll.agents.tools import Tool, ToolBox, ToolError, ToolResult
from roll.rewards.base import GuardedReward, RewardSample
from roll.rewards.registry import build_reward

TEMPLATE = """{issue}

Files: {file_names}

These tests must pass:
{tests}

Read and write the files with the tools, run the tests, and say that you are done."""
_UNPACK = """import base64 as _b, json as _j, os as _o, sys as _s
for _path, _text in _j.loads(_b.b64decode({packed!r})).items():
    _o.makedirs(_o.path.dirname(_path) or ".", exist_ok=True)
    with open(_path, "w") as _file:
        _file.write(_text)
_s.path.insert(0, _o.getcwd())
"""


@dataclass
class Repository:
    """The files of an episode by path."""

    files: dict[str, str]
    most_bytes: int = 1 << 18

    def program(self, code: str) -> str:
        """``code`` after lines that write the files into its working folder."""
        packed = base64.b64encode(json.dumps(self.files).encode()).decode()
        return _UNPACK.format(packed=packed) + code

    def read(self, path: str) -> ToolResult:
        """The text of a file."""
        name = _name(path)
        if name not in self.files:
            return ToolResult(f"Error: no file {path!r}; there are {', '.join(sorted(self.files))}.", True)
        return ToolResult(self.files[name])

    def write(self, path: str, content: str) -> ToolResult:
        """Create or replace a file."""
        name = _name(path)
        if name is None:
            return ToolResult(f"Error: {path!r} is no path inside the repository.", True)
        size = sum(len(text.encode()) for other, text in self.files.items() if other != name)
        if size + len(content.encode()) > self.most_bytes:
            return ToolResult(f"Error: the repository may hold {self.most_bytes} bytes.", True)
        self.files[name] = content
        return ToolResult(f"{name}: {len(content)} characters written.")


def _name(path: str) -> str | None:
    """The normalised path; None: it leads out of the repository."""
    pure = PurePosixPath(path)
    return None if pure.is_absolute() or ".." in pure.parts or not pure.parts else str(pure)


def files_of(row: Mapping[str, Any]) -> dict[str, str]:
    """The files of a task: its column ``files``, or the texts of its ``folder``.

    Raises:
        ValueError: there are none, or a path that leads out of the repository.
    """
    files = row.get("files")
    if files is None and row.get("folder"):
        folder = Path(str(row["folder"]))
        paths = sorted(one for one in folder.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
        files = {one.relative_to(folder).as_posix(): one.read_text("utf-8") for one in paths}
    if isinstance(files, str):
        files = json.loads(files)
    if not isinstance(files, Mapping) or not files:
        raise ValueError(f"the row has neither files (path to text) nor a folder with files: {', '.join(row)}")
    for path in files:
        if _name(path) is None:
            raise ValueError(f"files: {path!r} leads out of the repository")
    return {str(_name(path)): str(text) for path, text in files.items()}


class NoVerdict:
    """Verifier of an agent that scores its episodes itself."""

    async def __call__(self, task: Task, model: Model, episode: Episode, folder: str | None = None) -> float:
        return 0.0

    def close(self) -> None:
        """Nothing to release."""


class RepositoryAgent(ToolAgent):
    """Lets the policy work on a repository until a response calls no tool or a limit ends the episode; the reward is
    the tests' verdict in both cases.

    Args:
        partial: the reward is the share of tests that pass; false: 1 where all do, else 0.
        timeout: seconds of a program, and of a test.
        memory_mb: address space of a program.
        parallel: programs at a time, over all episodes.
        max_result: characters of a tool's result; longer ones lose their middle.
        require: protections of the sandbox without which nothing runs; None: those of the reward ``code_sandbox``.
        template: of the first message, with ``{issue}``, ``{file_names}``, ``{tests}`` and every other column.

    Raises:
        ToolError: this host does not give the protections that ``require`` names.
    """

    def __init__(
        self,
        partial: bool = False,
        timeout: float = 10.0,
        memory_mb: int = 512,
        parallel: int = 4,
        max_result: int = 10_000,
        require: Sequence[str] | None = None,
        template: str = TEMPLATE,
    ) -> None:
        super().__init__(ToolSet([]), NoVerdict(), ToolAgentOptions(), None, template)
        self._partial, self._limits = partial, (timeout + 30, max_result)
        required = {} if require is None else {"require": tuple(require)}
        self._python = PythonTool(timeout, memory_mb, parallel, **required)
        self._python.check_host()
        judged = {"timeout": timeout * 3, "case_timeout": timeout, "memory_mb": memory_mb}
        self._judge = GuardedReward("code_sandbox", build_reward("code_sandbox", judged | required))
        self._threads = ThreadPoolExecutor(int(getattr(self._judge, "concurrent_calls", 1)), thread_name_prefix="tests")

    async def run(self, task: Task, model: Model, episode: Episode) -> float:
        """Work until it is done; returns the share of tests that pass, or with ``partial: false`` whether all do.

        Raises:
            EpisodeOver: a limit, after the reward has been added; or a lost sandbox.
        """
        row, repository = dict(task.row), Repository(files_of(task.row))
        row["file_names"] = ", ".join(sorted(repository.files))
        ended: EpisodeOver | None = None
        episode.success = False
        try:
            await self._use_tools(replace(task, row=row), model, episode, self._box(repository, row))
        except EpisodeOver as over:
            ended = over
        except ToolError as error:
            raise episode.fault(str(error)) from error
        score = await self._verdict(row, repository, episode) if episode.calls else 0.0
        episode.success = score >= 1
        if ended is not None:
            model.reward(score)
            raise ended
        return score

    def _box(self, repository: Repository, row: Mapping[str, Any]) -> ToolBox:
        text, path = {"type": "string"}, {"type": "string", "description": "Path inside the repository."}
        imports, tests = str(row.get("imports", "")), str(row.get("tests", ""))

        def list_files() -> str:
            return "\n".join(f"{name} ({len(repository.files[name])})" for name in sorted(repository.files))

        async def run(code: str) -> ToolResult:
            return await self._python(repository.program(code))

        async def run_tests() -> ToolResult:
            return await self._python(repository.program(f"{imports}\n{tests}\nprint('All tests pass.')"))

        def tool(name: str, description: str, function: Any, **properties: Any) -> Tool:
            schema = {"type": "object", "properties": properties, "required": list(properties)}
            return Tool(name, description, schema, function)

        tools = [
            tool("list_files", "The files with their lengths.", list_files),
            tool("read_file", "The text of a file.", repository.read, path=path),
            tool("write_file", "Make or replace a file.", repository.write, path=path, content=text),
            tool("run", "Run a Python program in the repository and see what it prints.", run, code=text),
            tool("run_tests", "Run the tests.", run_tests),
        ]
        return ToolBox(tools, *self._limits)

    async def _verdict(self, row: Mapping[str, Any], repository: Repository, episode: Episode) -> float:
        """Verdict of the tests, each assert a case; by the code reward, whose verdict no program can forge."""
        tests = [line for name in ("tests", "hidden_tests") for line in str(row.get(name, "")).splitlines()]
        cases = [line for line in tests if line.strip()]
        program = repository.program(str(row.get("imports", "")))
        sample = RewardSample("", program, cases, "stop", {**row, "test_cases": cases}, 0)
        loop = asyncio.get_running_loop()
        (result,) = await loop.run_in_executor(self._threads, self._judge, [sample])
        if result.error is not None or result.score is None:
            raise episode.fault(f"tests: {result.error}")
        episode.metrics["tests_passed"] = result.score
        return result.score if self._partial else float(result.score >= 1)

    async def close(self) -> None:
        """End the sandboxes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._judge.close()
        await self._python.close()
