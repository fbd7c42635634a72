"""An agent of the package ``smolagents``: its tool-calling agent, or with ``code`` the one that writes programs."""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


task = json.load(sys.stdin)
model = OpenAIServerModel("any", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = CodeAgent if "code" in sys.argv else ToolCallingAgent
answer = kind(tools=[add], model=model, max_steps=4).run(task["question"])
sys.exit(str(answer) != str(task["ground_truth"]))
