"""Tools around an environment, called in the text of a response: ``tool_wrapper`` of ROLL's and GEM's files.

A response that calls a tool is answered with the tool's result; any other is an action of the environment.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from roll.agents.agent_options import ToolWrapperArguments
from roll.agents.built_in_tools import PythonTool, ToolSet
from roll.agents.tool_calls import ParsedResponse, parse_response
from roll.agents.tools import ToolError, ToolResult
from roll.environments.base import Environment, reset_arguments
from roll.environments.off_loop import call_off_loop

_MAX_BODY = 4 * 2**20  # bytes of a search service's answer
_PROGRAM = re.compile(r"<code>(.*?)(?:</code>|$)|<python>(.*?)(?:</python>|$)|```python\s(.*?)(?:```|$)", re.DOTALL)
_QUERY = re.compile(r"<search>\s*(.*?)\s*(?:</search>|$)", re.DOTALL)
_NO_MORE = "\n\nThat was the last use of a tool. Give the final answer."


@dataclass(frozen=True)
class TextTool:
    """A tool that is called in the text of a response."""

    instruction: str  # text that tells the policy how to call the tool
    find: Callable[[str], str | None]  # the call in a response; None: no call
    call: Callable[[str], Awaitable[ToolResult]]  # makes a call
    close: Callable[[], Awaitable[None]] | None = None  # releases what the tool holds


def _content(pattern: re.Pattern[str], text: str) -> str | None:
    """Content of the first match of ``pattern``, in whichever of its groups."""
    match = pattern.search(text)
    return None if match is None else next(group for group in match.groups() if group is not None)


def python_text(timeout: float = 5.0, keep_error_last_line: bool = False) -> TextTool:
    """Programs between ``<code>`` and ``</code>``, ``<python>`` tags or fences, run in the sandbox. ``timeout``:
    seconds of a program; ``keep_error_last_line``: show only the last line of the error of a program that fails."""
    tool = PythonTool(timeout=timeout)

    async def call(program: str) -> ToolResult:
        result = await tool(program)
        text = result.text.strip().rpartition("\n")[2] if result.failed and keep_error_last_line else result.text
        return ToolResult(f"Result of the program:\n{text}", result.failed)

    instruction = "To run a Python program, write it within <code>...</code>. What it prints comes back."
    return TextTool(instruction, partial(_content, _PROGRAM), call, tool.close)


def search_text(search_url: str, topk: int = 3, timeout: float = 5.0) -> TextTool:
    """Queries between ``<search>`` and ``</search>``, sent to a search service.

    The service gets ``{"queries": [query], "topk": k, "return_scores": true}`` and answers with
    ``{"result": [[{"document": {"contents": text}}, ...]]}``, within ``timeout`` seconds.
    """

    def search(query: str) -> list[str]:
        body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
        request = urllib.request.Request(search_url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            (found,) = json.loads(answer.read(_MAX_BODY))["result"]
        return [str(one.get("document", one)["contents"]) for one in found]

    async def call(query: str) -> ToolResult:
        try:
            texts = await call_off_loop(search, query)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            return ToolResult(f"Error: the search failed: {type(error).__name__}: {error}", True)
        shown = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1)) or "Nothing was found."
        return ToolResult(f"<information>{shown}</information>")

    instruction = "To search, write a query within <search>...</search>. What was found comes back."
    return TextTool(instruction, partial(_content, _QUERY), call)


def call_text(spec: object, instruction: str | None = None) -> TextTool:
    """Tools of an MCP server, or a function, called as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or
    in another form that families write between these marks."""
    tools = ToolSet([spec])

    def find(text: str) -> str | None:
        parsed = _parsed(text, None)
        return text if parsed.calls or parsed.errors else None

    async def call(text: str) -> ToolResult:
        box = await tools.box()
        parsed = _parsed(text, box.schemas)
        if not parsed.calls:
            return ToolResult(f"Error: the tool call cannot be read: {parsed.errors[0]}", True)
        results = await box.call_all(parsed.calls)
        shown = "\n".join(f"<tool_response>\n{result.text}\n</tool_response>" for result in results)
        return ToolResult(shown, any(result.failed for result in results))

    usual = 'To use a tool, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. Its result comes back.'
    return TextTool(instruction or usual, find, call, tools.close)


def _parsed(text: str, schemas: Sequence[Mapping[str, Any]] | None) -> ParsedResponse:
    """The calls in the first format that has any; without any, the fault of the format that instructions name."""
    found = [parse_response(text, name, schemas) for name in ("hermes", "qwen_xml", "glm")]
    return next((one for one in found if one.calls), found[0])


def _mcp(server_url: str, tool_names_subset: Sequence[str] = (), custom_prompt: str | None = None) -> TextTool:
    return call_text({"mcp": {"url": server_url, "names": list(tool_names_subset)}}, custom_prompt)


# `tool_id` to what builds the tool from its options.
KINDS: dict[str, Callable[..., TextTool]] = {"python_code": python_text, "search": search_text, "mcp": _mcp}


def text_tool(tool_id: str, tool_args: Mapping[str, Any]) -> TextTool:
    """Build the tool of an entry of ``tool_configs``. Raises ``ToolError``: there is none, or it has no such option."""
    options = dict(tool_args)
    if tool_id == "python_code":
        # Programs of a model always run in the sandbox.
        options.pop("sandbox_type", None)
    try:
        return KINDS[tool_id](**options) if tool_id in KINDS else call_text(tool_id)
    except TypeError as error:
        raise ToolError(f"tool_args of {tool_id}: {error}") from error


@dataclass(eq=False)
class TextTools:
    """Puts tools around environments; shared by all episodes of an entry."""

    tools: Sequence[TextTool]
    options: ToolWrapperArguments

    def around(self, make: Callable[[], Environment]) -> Environment:
        return ToolEnvironment(make(), self.tools, self.options)

    async def close(self) -> None:
        for tool in self.tools:
            if tool.close is not None:
                await tool.close()


@dataclass(eq=False)
class ToolEnvironment:
    inner: Environment
    tools: Sequence[TextTool]
    options: ToolWrapperArguments
    uses: int = 0  # calls of tools in this episode

    async def reset(self, seed: int, task: Mapping[str, Any] | None = None) -> Any:
        args, options = reset_arguments(self.inner, seed, task)
        observation, info = await call_off_loop(self.inner.reset, *args, **options)
        self.uses = 0
        instructions = "\n".join(tool.instruction for tool in self.tools)
        if isinstance(observation, str):
            return f"{observation}\n\n{instructions}", info
        return [{"role": "system", "content": instructions}, *observation], info

    async def step(self, action: str, opened: str = "") -> Any:
        """Call a tool, or take a step of the environment. ``opened``: the mark with which the prompt opened a thought;
        the action begins within it."""
        options = self.options
        for tool in self.tools if self.uses < options.max_tool_uses else ():
            found = tool.find(opened + action)
            if found is not None:
                self.uses += 1
                result = await tool.call(found)
                text = result.text + (_NO_MORE if self.uses == options.max_tool_uses else "")
                metrics = {"tool_calls": 1.0, "failed_tool_calls": float(result.failed)}
                return text, options.tool_reward, False, False, {"metrics": metrics}
        observation, reward, terminated, truncated, info = await call_off_loop(self.inner.step, action)
        succeeded = bool(info.get("success", reward > 0))
        if (terminated or truncated) and self.uses and succeeded:
            reward = float(reward) + options.tool_success_reward
        return observation, reward, terminated, truncated, info

    async def close(self) -> None:
        if (close := getattr(self.inner, "close", None)) is not None:
            await call_off_loop(close)
