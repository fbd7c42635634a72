"""Built-in tools: Python in the sandbox, search over a local index; and the tools that a configuration names."""

from __future__ import annotations

import asyncio
import functools
import heapq
import inspect
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from roll.agents.tools import McpServer, Tool, ToolBox, ToolError, ToolResult, tool_of
from roll.config.objects import imported
from roll.config.reading.errors import did_you_mean
from roll.rewards.sandbox.client import Sandbox, SandboxError, Settings
from roll.rewards.sandbox.judging import memory_file, os_null, read_file
from roll.rewards.sandbox.protections import MEBIBYTE, PROMISED, PROTECTIONS, Limits, MissingProtection


class PythonTool:
    """Runs Python programs in the sandbox of the code reward; every call is a process of its own.

    Args:
        timeout: seconds of a program.
        memory_mb: address space of a program.
        parallel: programs at a time, over all episodes.
        require: protections without which nothing runs, as of the reward ``code_sandbox``.

    Raises:
        ToolError: a protection that does not exist.
    """

    def __init__(
        self, timeout: float = 5.0, memory_mb: int = 512, parallel: int = 4, require: Sequence[str] = PROMISED
    ) -> None:
        unknown = [name for name in require if name not in PROTECTIONS]
        if unknown:
            raise ToolError(f"python: require names no protection {unknown[0]!r}; there are {', '.join(PROTECTIONS)}")
        self._limits = Limits(wall=timeout, memory=memory_mb * MEBIBYTE, file_size=MEBIBYTE)
        self._settings = Settings(require=tuple(require))
        self._sandbox = Sandbox(self._settings)
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="python-tool")

    def tool(self) -> Tool:
        code = {"type": "string", "description": "The program. What it prints is the result."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        return Tool("python", "Run a Python program and see what it prints.", parameters, self)

    def check_host(self) -> None:
        """Raise ``ToolError`` where this host lacks a protection that ``require`` names."""
        try:
            with closing(Sandbox(self._settings)) as sandbox:
                sandbox.start()
        except (MissingProtection, SandboxError) as error:
            raise ToolError(f"python: {error}") from error

    async def __call__(self, code: str) -> ToolResult:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, code)

    def _run(self, code: str) -> ToolResult:
        try:
            with (
                memory_file(code.encode("utf-8", "replace")) as source,
                memory_file() as output,
                memory_file() as errors,
            ):
                process = self._sandbox.spawn("script", [os_null(), output, errors, source], self._limits)
                ended = process.wait()
                printed = [read_file(one, self._limits.file_size) for one in (output, errors)]
        except (MissingProtection, SandboxError) as error:
            raise ToolError(f"python: {error}") from error
        text = "".join("[too much output]" if one is None else one.decode("utf-8", "replace") for one in printed)
        if ended.timed_out:
            return ToolResult(f"{text}\nError: the program took more than {self._limits.wall:g} s.".lstrip(), True)
        if ended.code != 0:
            return ToolResult(text or f"Error: exit status {ended.code}.", True)
        return ToolResult(text or "The program has printed nothing.")

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._sandbox.close()


_K1, _B = 1.5, 0.75


class SearchIndex:
    """Okapi BM25 over texts (Robertson and Zaragoza 2009, with Lucene's inverse document frequency, which is positive).

    score(q, d) = sum over the terms of q of ``idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * |d| / mean |d|))``
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = []
        for number, text in enumerate(texts):
            counts = Counter(re.findall(r"\w+", text.lower()))
            lengths.append(sum(counts.values()))
            for term, count in counts.items():
                self._postings[term].append((number, count))
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]

    def best(self, query: str, count: int) -> list[int]:
        """Indices of the texts with the highest scores above 0, best first; ties in the order of the texts."""
        scores: dict[int, float] = defaultdict(float)
        for term in re.findall(r"\w+", query.lower()):
            found = self._postings.get(term, ())
            idf = math.log(1 + (len(self._norms) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                scores[number] += idf * times * (_K1 + 1) / (times + self._norms[number])
        return heapq.nsmallest(count, scores, key=lambda number: (-scores[number], number))


def search_tool(path: str, top_k: int = 3, title_key: str = "title", text_key: str = "text") -> Tool:
    """The tool ``search`` over the rows of a JSONL file. Raises ``ToolError``: the file cannot be read, or a row has no
    text."""
    rows, index = _read_index(str(Path(path).resolve()), title_key, text_key)

    async def search(query: str) -> str:
        found = [rows[number] for number in index.best(query, top_k)]
        return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(found, 1)) or "Nothing was found."

    words = {"type": "string", "description": "What to look for."}
    parameters = {"type": "object", "properties": {"query": words}, "required": ["query"]}
    return Tool("search", f"Search a collection of {len(rows)} texts by words.", parameters, search)


@functools.cache
def _read_index(path: str, title_key: str, text_key: str) -> tuple[list[str], SearchIndex]:
    """The texts and their index, read once per process."""
    texts = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get(text_key), str):
                    rule = f"the row has no text {text_key!r}; text_key names the column"
                    raise ToolError(f"search: {path}:{number}: {rule}")
                texts.append(f"{row[title_key]}\n{row[text_key]}" if row.get(title_key) else row[text_key])
    except ToolError:
        raise
    except (OSError, ValueError) as error:
        raise ToolError(f"search: {path}: {error}") from error
    return texts, SearchIndex(texts)


# Name in a configuration to the class or function whose arguments are its options.
KINDS: dict[str, Callable[..., Any]] = {"python": PythonTool, "search": search_tool, "mcp": McpServer}


class ToolSet:
    """The tools that a configuration names, opened at first use and shared by all episodes.

    Args:
        specs: each a name (``python``), the dotted path of a user's function, or a mapping of one of ``python``,
            ``search``, ``mcp``, ``function`` to its options.
        timeout: seconds of a call.
        max_result: characters of a result.

    Raises:
        ToolError: a tool that does not exist, or an option that it does not have.
    """

    def __init__(self, specs: Sequence[Any], timeout: float = 30.0, max_result: int = 20_000) -> None:
        self._timeout, self._max_result = timeout, max_result
        self._tools: list[Tool] = []
        self._programs: list[PythonTool] = []
        self._servers: list[McpServer] = []
        for spec in specs:
            if isinstance(spec, str):
                spec = {spec: {}} if spec in KINDS else {"function": spec}
            ((kind, options),) = spec.items() if isinstance(spec, Mapping) and len(spec) == 1 else [("", None)]
            if kind == "function":
                self._tools.append(tool_of(load_function(options, "function")))
                continue
            if kind not in KINDS or not isinstance(options, Mapping | None):
                names = ", ".join((*KINDS, "function"))
                raise ToolError(f"{spec!r} must be the dotted path of a function, or one of {names} with its options")
            options = dict(options or {})
            parameters = inspect.signature(KINDS[kind]).parameters
            for name in options:
                if name not in parameters:
                    hint = did_you_mean(name, parameters, "; did you mean {!r}?")
                    raise ToolError(f"{kind} has no option {name!r}{hint} (it has {', '.join(parameters)})")
            missing = [one.name for one in parameters.values() if one.default is one.empty and one.name not in options]
            if missing:
                raise ToolError(f"{kind} needs the option {missing[0]!r}")
            if kind == "mcp":
                self._servers.append(McpServer(**options))
            elif kind == "python":
                self._programs.append(PythonTool(**options))
                self._tools.append(self._programs[-1].tool())
            else:
                self._tools.append(search_tool(**options))
        self._opening: asyncio.Lock | None = None
        self._box: ToolBox | None = None
        ToolBox(self._tools)  # refuses two tools with one name

    def check_host(self) -> None:
        """Raise ``ToolError`` where this host does not give what a tool needs."""
        for program in self._programs:
            program.check_host()

    async def box(self) -> ToolBox:
        """All tools; ``ToolError`` where a server does not start, or two tools have one name."""
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._box is None:
                tools = list(self._tools)
                for server in self._servers:
                    tools += await server.tools()
                self._box = ToolBox(tools, self._timeout, self._max_result)
            return self._box

    async def close(self) -> None:
        for server in self._servers:
            await server.close()
        for program in self._programs:
            await program.close()
        self._box = None


def load_function(path: object, key: str) -> Callable[..., Any]:
    """Import the function or class at a dotted path. Raises ``ToolError``: there is none; the message begins with
    ``key``."""
    try:
        found = imported(str(path))
    except ImportError as error:
        raise ToolError(f"{key}: {path!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ToolError(f"{key}: {path!r} is no dotted path of a function")
    function: Callable[..., Any] = found
    return function
