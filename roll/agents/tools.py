"""Tools that a policy calls: functions and MCP servers, with checked arguments, deadlines and results as text."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.agents.call_formats import ToolCall
from roll.agents.chat_ids import Message
from roll.agents.programs import program_environment
from roll.environments.off_loop import call_off_loop

_CONNECTION_CLOSED = -32000
"""MCP's error code for a closed connection."""


class ToolError(ValueError):
    """Tools that cannot be offered: equal names, a function without type hints, a server that does not answer."""


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""
    function: Callable[..., Any]
    """Called with the arguments as keywords; plain functions run in a thread, coroutines on the event loop."""

    @property
    def schema(self) -> Message:
        """The form that chat templates and the OpenAI API take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolResult:
    """Result of a call."""

    text: str
    failed: bool = False
    """The call could not be made, raised, or took too long; ``text`` says which."""


def tool_of(function: Callable[..., Any]) -> Tool:
    """Build the tool of a function, with a schema from its type hints and its docstring in Google's style.

    Raises:
        ToolError: an argument without a type hint or a description.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)["function"]
    except (DocstringParsingException, TypeHintParsingException) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ToolError(f"tool {name}: {error}") from error
    parameters = schema.get("parameters", {"type": "object", "properties": {}})
    return Tool(schema["name"], schema["description"], parameters, function)


class ToolBox:
    """The tools of a task.

    Args:
        timeout: seconds of one call.
        max_result: characters of a result; longer ones lose their middle.

    Raises:
        ToolError: two tools of one name.
    """

    def __init__(self, tools: Sequence[Tool], timeout: float = 30.0, max_result: int = 20_000) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            names = sorted(name for name in self._tools if sum(tool.name == name for tool in tools) > 1)
            raise ToolError(f"several tools are called {', '.join(names)}; give each a name of its own")
        self._timeout, self._max_result = timeout, max_result

    @property
    def schemas(self) -> list[Message]:
        return [tool.schema for tool in self._tools.values()]

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Make the calls of one response concurrently; results in their order."""
        return list(await asyncio.gather(*map(self.call, calls)))

    async def call(self, call: ToolCall) -> ToolResult:
        """Make one call; errors become results that the policy reads.

        Raises:
            ToolError: a server is lost and cannot be restarted.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(f"Error: no tool {call.name!r}; there are {', '.join(self._tools) or 'none'}.", True)
        problem = _argument_problem(tool, call.arguments)
        if problem is not None:
            return ToolResult(f"Error: {problem}", True)
        try:
            value = await asyncio.wait_for(call_off_loop(tool.function, **call.arguments), self._timeout)
        except TimeoutError:
            return ToolResult(f"Error: {call.name} took more than {self._timeout:g} s.", True)
        except ToolError:
            raise
        except Exception as error:
            return ToolResult(f"Error: {type(error).__name__}: {error}"[: self._max_result], True)
        if not isinstance(value, ToolResult):
            value = ToolResult(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
        text, half = value.text, self._max_result // 2
        if len(text) > self._max_result:
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
        return replace(value, text=text)


def tool_messages(calls: Sequence[ToolCall], identities: Sequence[str], results: Sequence[ToolResult]) -> list[Message]:
    """The messages that answer the calls of one response, all together: templates render them as one turn."""
    return [
        {"role": "tool", "tool_call_id": identity, "name": call.name, "content": result.text}
        for call, identity, result in zip(calls, identities, results, strict=True)
    ]


class McpServer:
    """The tools of an MCP server, started as a child process or reached over HTTP.

    ``async with McpServer(...) as tools`` gives the list of its tools; calls of many episodes share the session.

    Args:
        command: program and arguments of a server that speaks over standard input and output.
        url: address of a server that speaks streamable HTTP.
        names: the tools to offer; empty: all.
        env: environment of the child process, in addition to ``PATH`` and the like of this process.

    Raises:
        ToolError: neither or both of ``command`` and ``url``; on entry, a server that does not start, or lacks a name.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        url: str | None = None,
        names: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        if bool(command) == bool(url):
            raise ToolError("an MCP server has either `command` (a program and its arguments) or `url`")
        self._command, self._url, self._names = list(command), url, list(names)
        self._env, self._start_timeout = dict(env or {}), start_timeout
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = None

    @property
    def _title(self) -> str:
        return f"MCP server {self._url or ' '.join(self._command)}"

    async def __aenter__(self) -> list[Tool]:
        try:
            listed = await self._list_tools()
        except BaseException:  # cancellation included
            await self._stack.aclose()
            raise
        return [
            Tool(tool.name, tool.description or "", tool.input_schema, _McpCall(self, tool.name))
            for tool in listed
            if not self._names or tool.name in self._names
        ]

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool of the running server."""
        answer = await self._client.call_tool(name, dict(arguments))
        texts = [block.text if block.type == "text" else f"[{block.type}]" for block in answer.content]
        return ToolResult("\n".join(texts), bool(answer.is_error))

    async def _list_tools(self) -> list[Any]:
        """Start or reach the server."""
        try:
            async with asyncio.timeout(self._start_timeout):
                self._client = await self._connect()
                page = await self._client.list_tools()
                listed = list(page.tools)
                while page.next_cursor is not None:
                    page = await self._client.list_tools(cursor=page.next_cursor)
                    listed += page.tools
        except TimeoutError:
            raise ToolError(f"{self._title} did not answer within {self._start_timeout:g} s") from None
        except Exception as error:
            # MCP's client runs in task groups: the reason is the innermost exception.
            reason: BaseException = error
            while isinstance(reason, BaseExceptionGroup):
                reason = reason.exceptions[0]
            raise ToolError(f"{self._title} cannot be used: {type(reason).__name__}: {reason}") from error
        missing = set(self._names) - {tool.name for tool in listed}
        if missing:
            there = ", ".join(tool.name for tool in listed)
            raise ToolError(f"{self._title} has no tools {', '.join(sorted(missing))}; it has {there}")
        return listed

    async def _connect(self) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import get_default_environment

        if self._url is not None:
            return await self._stack.enter_async_context(Client(self._url))
        environment = get_default_environment() | program_environment(self._env)
        program = StdioServerParameters(command=self._command[0], args=self._command[1:], env=environment)
        return await self._stack.enter_async_context(Client(program))


class HeldMcpServer:
    """An MCP server that many episodes share: started at first use, in a task of its own, and restarted when lost.

    Args:
        make: returns a new :class:`McpServer` for every start.
    """

    def __init__(self, make: Callable[[], McpServer]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._session: _McpSession | None = None
        self._closed = False
        self.starts = 0

    async def tools(self) -> list[Tool]:
        """
        Raises:
            ToolError: the server does not start.
        """
        return [replace(tool, function=_McpCall(self, tool.name)) for tool in (await self._open()).tools]

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Make a call; where the connection is lost, restart the server and repeat it.

        Raises:
            ToolError: the server cannot be restarted.
        """
        from mcp.shared.exceptions import MCPError

        session = await self._open()
        try:
            return await session.server.call_tool(name, arguments)
        except Exception as error:
            if isinstance(error, MCPError) and error.code != _CONNECTION_CLOSED:  # an error of the call itself
                raise
        async with self._lock:
            # Several calls see the same loss; the first of them restarts the server for all.
            if self._session is session:
                self._session = None
                await session.close()
        return await (await self._open()).server.call_tool(name, arguments)

    async def close(self) -> None:
        """End the server for good."""
        async with self._lock:
            self._closed = True
            if self._session is not None:
                await self._session.close()
                self._session = None

    async def _open(self) -> _McpSession:
        async with self._lock:
            if self._closed:
                raise ToolError("the MCP server has been closed")
            if self._session is None:
                session = _McpSession(self._make())
                await session.start()
                self._session = session
                self.starts += 1
            return self._session


class _McpSession:
    """One run of a server: started and ended in the same task, as MCP's client requires."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.tools: list[Tool] = []
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened))
        try:
            await opened
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise

    async def close(self) -> None:
        self._leave.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _hold(self, opened: asyncio.Future[None]) -> None:
        try:
            async with self.server as self.tools:
                opened.set_result(None)
                await self._leave.wait()
        except Exception as error:
            # Errors at the end of a lost server add nothing.
            if not opened.done():
                opened.set_exception(error)


@dataclass(frozen=True)
class _McpCall:
    """The function of a server's tool; the server checks the arguments itself."""

    server: McpServer | HeldMcpServer
    name: str

    async def __call__(self, /, **arguments: object) -> ToolResult:
        return await self.server.call_tool(self.name, arguments)


@functools.lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    """The validator of a JSON schema, given as text."""
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(schema))


def _argument_problem(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """The most relevant violation of the tool's schema."""
    import jsonschema

    validator = _validator(json.dumps(tool.parameters))
    error = jsonschema.exceptions.best_match(validator.iter_errors(dict(arguments)))
    if error is not None:
        where = ".".join(map(str, error.absolute_path))
        return f"{tool.name}{'.' + where if where else ''}: {error.message}"
    # JSON schemas allow unknown names unless they say otherwise; the function would raise a TypeError for them.
    unknown = set(arguments) - set(tool.parameters.get("properties", {}))
    if unknown and tool.parameters.get("additionalProperties") is not True and not isinstance(tool.function, _McpCall):
        return f"{tool.name} has no argument {', '.join(sorted(unknown))}"
    return None
