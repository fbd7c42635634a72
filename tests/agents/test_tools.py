"""Tools: schemas from functions, checked arguments, deadlines, errors as results, a real MCP server both ways."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from roll.agents.built_in_tools import ToolSet
from roll.agents.tool_calls import ToolCall
from roll.agents.tools import McpServer, ToolBox, ToolError, ToolResult, tool_messages, tool_of

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "x" * 100


at_once = threading.Barrier(4)


def blocking() -> str:
    """Block a thread until three others are here."""
    at_once.wait(timeout=60)
    return "done"


def broken() -> str:
    """Raise."""
    raise RuntimeError("no")


@pytest.mark.asyncio
async def test_functions_as_tools() -> None:
    box = ToolBox([tool_of(add), tool_of(slow), tool_of(broken)], timeout=0.5, max_result=20)
    parameters = box.schemas[0]["function"]["parameters"]
    assert parameters["required"] == ["a"] and set(parameters["properties"]) == {"a", "b"}
    given = [{"a": 1, "b": 2}, {"a": 1}, {"a": "one"}, {}, {"a": 1, "c": 2}, {"seconds": 0}, {"seconds": 5}, {}, {}]
    names = ["add"] * 5 + ["slow"] * 2 + ["broken", "nothing"]
    calls = [ToolCall(name, arguments) for name, arguments in zip(names, given, strict=True)]
    results = await box.call_all(calls)
    assert [result.failed for result in results] == [False, False, True, True, True, False, True, True, True]
    assert [result.text for result in results[:2]] == ["3", "2"]
    assert results[5].text == "x" * 10 + "\n[80 characters left out]\n" + "x" * 10
    assert "took more than 0.5 s" in results[6].text
    assert results[7].text == "Error: RuntimeError:"[:20]
    assert "no tool 'nothing'" in results[8].text
    messages = tool_messages(calls[:2], ["c1", "c2"], results[:2])
    assert messages[1] == {"role": "tool", "tool_call_id": "c2", "name": "add", "content": "2"}


def named(function: str, self: str) -> str:
    """Take arguments with names that callers of functions use.

    Args:
        function: The first.
        self: The second.
    """
    return f"{function} of {self}"


@pytest.mark.asyncio
async def test_arguments_of_any_name_threads_and_what_cannot_be_a_tool() -> None:
    """Functions that block are called in threads."""
    box = ToolBox([tool_of(named), tool_of(blocking)])
    assert await box.call(ToolCall("named", {"function": "f", "self": "s"})) == ToolResult("f of s")
    assert [result.text for result in await box.call_all([ToolCall("blocking", {})] * 4)] == ["done"] * 4

    def bare(x):  # type: ignore[no-untyped-def]
        return x

    place = re.escape(f"{__file__}:{bare.__code__.co_firstlineno}")
    with pytest.raises(ToolError, match=rf"tool .*bare \({place}\): .*docstring"):
        tool_of(bare)


@pytest.fixture(scope="module")
def http_server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.mark.long_rows("stdio")
@pytest.mark.parametrize("way", ["stdio", "http"])
@pytest.mark.asyncio
async def test_mcp_server(way: str, http_server: str) -> None:
    server = McpServer(SERVER) if way == "stdio" else McpServer(url=http_server)
    tools = await server.tools()
    assert [tool.name for tool in tools] == ["add", "fail", "wait"]
    box = ToolBox(tools, timeout=60.0)
    many = await box.call_all([ToolCall("add", {"a": i, "b": 1}) for i in range(50)])
    assert [result.text for result in many] == [str(i + 1) for i in range(50)]
    failed, wrong = await box.call_all([ToolCall("fail", {}), ToolCall("add", {"a": "x", "b": 1})])
    late = await ToolBox(tools, timeout=1.0).call(ToolCall("wait", {"seconds": 3}))
    assert failed.failed and "fail" in failed.text
    assert wrong.failed and late.failed and "1 s" in late.text
    assert (await box.call(ToolCall("add", {"a": 2, "b": 2}))) == ToolResult("4")
    await server.close()


@pytest.mark.long
@pytest.mark.asyncio
async def test_mcp_servers_that_cannot_be_used(http_server: str) -> None:
    sleeping = McpServer([sys.executable, "-c", "import time; time.sleep(60)"], start_timeout=1.0)
    for server, problem in (
        (McpServer(["/no/such/program"]), "cannot be used"),
        (sleeping, "did not answer within 1 s"),
        (McpServer(url=http_server, names=["subtract"]), "has no tools subtract; it has add"),
    ):
        with pytest.raises(ToolError, match=problem):
            await server.tools()


class Starting(McpServer):
    """A server that starts after a minute."""

    def __init__(self) -> None:
        super().__init__(url="http://127.0.0.1:9/mcp")
        self.ended = False

    async def _connect(self, stack: AsyncExitStack) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            self.ended = True


@pytest.mark.asyncio
async def test_a_start_that_nobody_waits_for_any_more_is_given_up() -> None:
    server = Starting()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await server.tools()
    assert server.ended


@pytest.mark.long
@pytest.mark.asyncio
async def test_servers_are_started_once_where_another_cannot_be() -> None:
    before = set(_children())
    tools = ToolSet([{"mcp": {"command": SERVER}}, {"mcp": {"command": ["/no/such/program"]}}])
    for _ in range(2):
        with pytest.raises(ToolError, match="cannot be used"):
            await tools.box()
    assert len(set(_children()) - before) == 1
    await tools.close()
    assert set(_children()) <= before


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_lost_server_is_started_again(tmp_path: Path) -> None:
    """And the calls are made again; one that cannot be started again is no result of a call."""
    held = McpServer([sys.executable, str(tmp_path / "server.py")])
    (tmp_path / "server.py").write_text(Path(SERVER[1]).read_text())
    box = ToolBox(await held.tools())
    assert (await box.call(ToolCall("add", {"a": 1, "b": 2}))).text == "3"
    for child in _children():
        os.kill(child, signal.SIGKILL)
    results = await box.call_all([ToolCall("add", {"a": i, "b": 1}) for i in range(5)])
    assert [result.text for result in results] == ["1", "2", "3", "4", "5"] and held.starts == 2
    (tmp_path / "server.py").write_text("raise SystemExit(1)")
    for child in _children():
        os.kill(child, signal.SIGKILL)
    with pytest.raises(ToolError, match="cannot be used"):
        await box.call(ToolCall("add", {"a": 1, "b": 2}))
    await held.close()
    with pytest.raises(ToolError, match="has been closed"):
        await box.call(ToolCall("add", {"a": 1, "b": 2}))


def _children() -> list[int]:
    """Child processes of this one that run an MCP server of a test."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"server.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found
