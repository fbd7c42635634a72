"""An agent of the package ``openai-agents``; ``chat`` as an argument: over chat completions, else over Responses."""

import asyncio
import json
import os
import sys
import urllib.request

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    if "chat" in sys.argv:
        set_default_openai_api("chat_completions")
    task = json.load(sys.stdin)
    agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model="gpt-4o")
    if "stream" in sys.argv:
        result = Runner.run_streamed(agent, task["question"])
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, task["question"])
    body = json.dumps({"reward": float(result.final_output == str(task["ground_truth"]))}).encode()
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    urllib.request.urlopen(urllib.request.Request(os.environ["ROLL_REWARD_URL"], body, head))


asyncio.run(main())
