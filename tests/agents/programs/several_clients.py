"""Three parts of one policy at the same time, each through another client, and a tool of an MCP server between them.

The planner speaks through OpenAI's chat completions (streamed), the solver through Anthropic's Messages with a tool
that an MCP server runs, the checker through OpenAI's Responses. Nobody waits for another one before all are done.
"""

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

import anthropic
import openai
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
SERVER = Path(__file__).parents[1] / "mcp_server.py"
ROUNDS = 3


async def planner(client):
    messages = [{"role": "user", "content": "You plan."}]
    for _ in range(ROUNDS):
        async with client.chat.completions.stream(model="planner", messages=messages) as events:
            async for _ in events:
                pass
            said = (await events.get_final_completion()).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    return said


async def solver(client, mcp):
    messages = [{"role": "user", "content": "You solve."}]
    tools = [{"name": "add", "description": "Add.", "input_schema": ADD}]
    while True:
        answer = await client.messages.create(model="solver", max_tokens=200, messages=messages, tools=tools)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return answer.content[0].text
        results = []
        for block in answer.content:
            if block.type == "tool_use":
                done = await mcp.call_tool(block.name, block.input)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": done.content[0].text})
        messages.append({"role": "user", "content": results})


async def checker(client):
    previous, said = {}, []
    for _ in range(ROUNDS):
        answer = await client.responses.create(
            model="checker", input="You check." if not said else "Again.", **previous
        )
        previous = {"previous_response_id": answer.id}
        said.append(answer.output_text)
    return said[-1]


async def main():
    json.load(sys.stdin)
    parameters = StdioServerParameters(command=sys.executable, args=[str(SERVER)])
    async with (
        openai.AsyncOpenAI() as one,
        anthropic.AsyncAnthropic() as other,
        stdio_client(parameters) as (reading, writing),
        ClientSession(reading, writing) as mcp,
    ):
        await mcp.initialize()
        said = await asyncio.gather(planner(one), solver(other, mcp), checker(one))
    rewards = dict(zip(("planner", "solver", "checker"), (float(text.startswith("5")) for text in said), strict=True))
    body = json.dumps({"reward": rewards}).encode()
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    urllib.request.urlopen(urllib.request.Request(os.environ["ROLL_REWARD_URL"], body, head))


asyncio.run(main())
