"""Tools that a policy calls: functions and MCP servers, with checked arguments, deadlines and results as text."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from roll.agents.call_formats import ToolCall
from roll.agents.chat_ids import Message
from roll.agents.programs import program_environment
from roll.environments.off_loop import call_off_loop

_CONNECTION_CLOSED = -32000  # MCP's error code for a closed connection


class ToolError(ValueError):
    """Tools that cannot be offered: equal names, a function without type hints, a server that does not answer."""


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    # Called with the arguments as keywords; plain functions run in a thread, coroutines on the event loop.
    function: Callable[..., Any]
    is_checked: bool = False  # the function checks its arguments itself

    @property
    def schema(self) -> Message:
        """The form that chat templates and the OpenAI API take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolResult:
    text: str
    failed: bool = False  # the call could not be made, raised, or took too long; `text` says which


def tool_of(function: Callable[..., Any]) -> Tool:
    """Build the tool of a function, with a schema from its type hints and its docstring in Google's style;
    ``ToolError`` for a function without a docstring, or an argument without a type hint or a description."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)["function"]
    except (DocstringParsingException, TypeHintParsingException) as error:
        name = getattr(function, "__qualname__", repr(function))
        code = getattr(inspect.unwrap(function), "__code__", None)  # None: not written in Python
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        rule = "a tool has type hints, and a docstring in Google's style that describes each argument"
        raise ToolError(f"tool {name}{place}: {error}; {rule}") from error
    parameters = schema.get("parameters", {"type": "object", "properties": {}})
    return Tool(schema["name"], schema["description"], parameters, function)


class ToolBox:
    """The tools of a task, none of the same name (else ``ToolError``). ``timeout``: seconds of one call;
    ``max_result``: characters of a result; longer ones lose their middle."""

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
        """Make one call; errors become results that the policy reads. ``ToolError`` where a server is lost for good."""
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


@dataclass(eq=False)
class _Run:
    """A run of an MCP server: started and ended in the same task, as MCP's client requires."""

    client: Any = None
    tools: list[Any] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        self.leave.set()
        if self.task is not None:
            await asyncio.wait([self.task])


class McpServer:
    """The tools of an MCP server, started as a child process or reached over HTTP.

    Many episodes share it: it is started at first use, and restarted when lost.

    Args:
        command: program and arguments of a server that speaks over standard input and output.
        url: address of a server that speaks streamable HTTP.
        names: the tools to offer; empty: all.
        env: environment of the child process, in addition to ``PATH`` and the like of this process.

    Raises:
        ToolError: neither or both of ``command`` and ``url``.
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
        self._lock = asyncio.Lock()
        self._run: _Run | None = None
        self._closed = False
        self.starts = 0

    async def tools(self) -> list[Tool]:
        """The tools that are offered; ``ToolError`` where the server does not start, or lacks a name."""
        return [
            Tool(one.name, one.description or "", one.input_schema, partial(self.call_tool, one.name), is_checked=True)
            for one in (await self._open()).tools
            if not self._names or one.name in self._names
        ]

    async def call_tool(self, name: str, /, **arguments: object) -> ToolResult:
        """Make a call; where the connection is lost, restart the server (else ``ToolError``) and repeat it."""
        from mcp.shared.exceptions import MCPError

        run = await self._open()
        try:
            answer = await run.client.call_tool(name, dict(arguments))
        except Exception as error:
            if isinstance(error, MCPError) and error.code != _CONNECTION_CLOSED:  # an error of the call itself
                raise
            async with self._lock:
                # Several calls see the same loss; the first of them restarts the server for all.
                if self._run is run:
                    self._run = None
                    await run.close()
            answer = await (await self._open()).client.call_tool(name, dict(arguments))
        texts = [block.text if block.type == "text" else f"[{block.type}]" for block in answer.content]
        return ToolResult("\n".join(texts), bool(answer.is_error))

    async def close(self) -> None:
        """End the server for good."""
        async with self._lock:
            self._closed = True
            if self._run is not None:
                await self._run.close()
                self._run = None

    async def _open(self) -> _Run:
        async with self._lock:
            if self._closed:
                raise ToolError("the MCP server has been closed")
            if self._run is None:
                run, opened = _Run(), asyncio.get_running_loop().create_future()
                run.task = asyncio.create_task(self._hold(run, opened))
                try:
                    await opened
                except asyncio.CancelledError:
                    run.task.cancel()
                    await asyncio.wait([run.task])
                    raise
                self._run = run
                self.starts += 1
            return self._run

    async def _hold(self, run: _Run, opened: asyncio.Future[None]) -> None:
        """Start or reach the server, which ``opened`` reports, and hold the connection until it is to be left."""
        title = f"MCP server {self._url or ' '.join(self._command)}"
        # Errors at the end of a lost server add nothing.
        with contextlib.suppress(Exception):
            async with contextlib.AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(self._start_timeout):
                        run.client = await self._connect(stack)
                        page = await run.client.list_tools()
                        run.tools = list(page.tools)
                        while page.next_cursor is not None:
                            page = await run.client.list_tools(cursor=page.next_cursor)
                            run.tools += page.tools
                    there = [tool.name for tool in run.tools]
                    missing = sorted(set(self._names) - set(there))
                    if missing:
                        raise ToolError(f"{title} has no tools {', '.join(missing)}; it has {', '.join(there)}")
                except ToolError as error:
                    opened.set_exception(error)
                except TimeoutError:
                    opened.set_exception(ToolError(f"{title} did not answer within {self._start_timeout:g} s"))
                except Exception as error:
                    # MCP's client runs in task groups: the reason is the innermost exception.
                    reason: BaseException = error
                    while isinstance(reason, BaseExceptionGroup):
                        reason = reason.exceptions[0]
                    opened.set_exception(ToolError(f"{title} cannot be used: {type(reason).__name__}: {reason}"))
                else:
                    opened.set_result(None)
                    await run.leave.wait()

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import get_default_environment

        if self._url is not None:
            return await stack.enter_async_context(Client(self._url))
        environment = get_default_environment() | program_environment(self._env)
        program = StdioServerParameters(command=self._command[0], args=self._command[1:], env=environment)
        return await stack.enter_async_context(Client(program))


def _argument_problem(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """The most relevant violation of the tool's schema."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(tool.parameters)
    error = jsonschema.exceptions.best_match(validator.iter_errors(dict(arguments)))
    if error is not None:
        where = ".".join(map(str, error.absolute_path))
        return f"{tool.name}{'.' + where if where else ''}: {error.message}"
    # JSON schemas allow unknown names unless they say otherwise; the function would raise a TypeError for them.
    unknown = set(arguments) - set(tool.parameters.get("properties", {}))
    if unknown and tool.parameters.get("additionalProperties") is not True and not tool.is_checked:
        return f"{tool.name} has no argument {', '.join(sorted(unknown))}"
    return None
