"""Cost of a call of an agent: a tool call over MCP next to the bare SDK's, and a model call over HTTP next to the
coroutine behind it. The engine answers at once.

python -m benchmarks.agent_calls
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from roll.agents.agent_options import BlackBoxOptions
from roll.agents.call_formats import ToolCall
from roll.agents.chat_ids import ChatTemplate
from roll.agents.endpoint import AgentEndpoint, Session
from roll.agents.episode import Limits, Model, Task
from roll.agents.tools import McpServer, ToolBox
from roll.rollout.groups import FinishedGroup
from roll.strategies.engines.requests import GenerationOutput

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "tiny"))

import tiny_model  # noqa: E402

SERVER = [sys.executable, str(ROOT / "examples" / "agent_tools_mcp" / "calculator_server.py")]
CALLS, IN_FLIGHT, REPEATS = 200, 100, 5
MESSAGES = [{"role": "user", "content": "What is 12+34 ?"}]


async def tools() -> dict[str, tuple[float, float]]:
    """Milliseconds of a call, one after another and with many in flight: through a tool box, and through the SDK."""
    held = McpServer(SERVER)
    box = ToolBox(await held.tools())
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import get_default_environment

    program = StdioServerParameters(command=SERVER[0], args=SERVER[1:], env=get_default_environment())
    async with Client(program) as client:
        call = ToolCall("calculate", {"expression": "12+34"})
        assert (await box.call(call)).text == "46"
        ways: dict[str, Callable[[], Awaitable[Any]]] = {
            "tool call, bare SDK": lambda: client.call_tool("calculate", {"expression": "12+34"}),
            "tool call, tool box": lambda: box.call(call),
        }
        found = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, way in ways.items():
                found[name].append((await one_by_one(way), await in_flight(way)))
    await held.close()
    return {name: medians(rows) for name, rows in found.items()}


async def model_calls() -> dict[str, tuple[float, float]]:
    """Milliseconds of a model call: the coroutine, and an HTTP request to it over a kept connection."""
    tokenizer = tiny_model.make_tokenizer(["What is 12+34 ? answer 46 " * 10])
    template = ChatTemplate(tokenizer)
    ids = [*template.encode("46"), min(template.end_tokens)]

    async def sample(prompt_ids: list[int], max_new_tokens: int, options: Mapping[str, Any]) -> FinishedGroup:
        return FinishedGroup.from_samples(
            [GenerationOutput("", 0, ids, [-1.0] * len(ids), "stop", [(0, 0, len(ids))])], [""]
        )

    model = Model(sample, template, "hermes", Limits(turns=1_000_000, context=100_000))
    endpoint = AgentEndpoint(BlackBoxOptions())
    endpoint.start()
    session = Session(Task("t", 0), model)
    endpoint.open(session)
    direct, over_http = [], []
    for _ in range(REPEATS):
        direct.append((await one_by_one(lambda: model.chat(MESSAGES)), await in_flight(lambda: model.chat(MESSAGES))))
        single = await asyncio.to_thread(requests, endpoint.url, session.key, CALLS)
        begin = time.perf_counter()
        await asyncio.gather(*(asyncio.to_thread(requests, endpoint.url, session.key, CALLS // 4) for _ in range(4)))
        over_http.append((single, 1000 * (time.perf_counter() - begin) / CALLS))
    endpoint.retire(session)
    endpoint.close()
    return {"model call, coroutine": medians(direct), "model call, HTTP": medians(over_http)}


def requests(url: str, key: str, count: int) -> float:
    """Milliseconds of a chat completion, one after another."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    body = json.dumps({"model": "policy", "messages": MESSAGES})
    begin = time.perf_counter()
    for _ in range(count):
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
        assert connection.getresponse().read()
    return 1000 * (time.perf_counter() - begin) / count


async def one_by_one(way: Callable[[], Awaitable[Any]]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        await way()
    return 1000 * (time.perf_counter() - begin) / CALLS


async def in_flight(way: Callable[[], Awaitable[Any]]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS // IN_FLIGHT):
        await asyncio.gather(*(way() for _ in range(IN_FLIGHT)))
    return 1000 * (time.perf_counter() - begin) / CALLS


def medians(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """Of each column."""
    first, second = zip(*rows, strict=True)
    return statistics.median(first), statistics.median(second)


def main() -> None:
    table = Table("call", "ms, one after another", f"ms each, {IN_FLIGHT} in flight (HTTP: 4 connections)")
    for name, (single, many) in (asyncio.run(tools()) | asyncio.run(model_calls())).items():
        table.add_row(name, f"{single:.2f}", f"{many:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
