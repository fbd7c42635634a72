"""Tools around an environment, called in the text of a response: ``tool_wrapper`` of ROLL's and GEM's files.

A response that calls a tool is answered with the tool's result; any other is an action of the environment.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.agents.agent_options import ToolWrapperArguments
from roll.agents.built_in_tools import PythonTool, ToolSet
from roll.agents.tool_calls import ParsedResponse, parse_response
from roll.agents.tools import ToolError, ToolResult
from roll.environments.base import Environment, reset_arguments
from roll.environments.off_loop import call_off_loop

_MAX_BODY = 4 * 2**20
"""Bytes of a search service's answer."""
_NO_MORE = "\n\nThat was the last use of a tool. Give the final answer."


class TextTool(ABC):
    """A tool that is called in the text of a response."""

    instruction: str
    """Text that tells the policy how to call the tool."""
    _CALL: re.Pattern[str]
    """Pattern of a call, with its content in one of the groups."""

    def find(self, text: str) -> str | None:
        """The call in a response; None: no call."""
        match = self._CALL.search(text)
        return None if match is None else next(group for group in match.groups() if group is not None)

    @abstractmethod
    async def call(self, found: str) -> ToolResult:
        """Make the call."""

    async def close(self) -> None:
        """Release what the tool holds."""


class PythonText(TextTool):
    """Programs between ``<code>`` and ``</code>``, ``<python>`` tags or fences, run in the sandbox.

    Args:
        timeout: seconds of a program.
        keep_error_last_line: show only the last line of the error of a program that fails.
    """

    instruction = "To run a Python program, write it within <code>...</code>. What it prints comes back."
    _CALL = re.compile(r"<code>(.*?)(?:</code>|$)|<python>(.*?)(?:</python>|$)|```python\s(.*?)(?:```|$)", re.DOTALL)

    def __init__(self, timeout: float = 5.0, keep_error_last_line: bool = False) -> None:
        self._tool, self._last_line = PythonTool(timeout=timeout), keep_error_last_line

    async def call(self, found: str) -> ToolResult:
        result = await self._tool(found)
        text = result.text.strip().rpartition("\n")[2] if result.failed and self._last_line else result.text
        return ToolResult(f"Result of the program:\n{text}", result.failed)

    async def close(self) -> None:
        await self._tool.close()


class SearchText(TextTool):
    """Queries between ``<search>`` and ``</search>``, sent to a search service.

    The service gets ``{"queries": [query], "topk": k, "return_scores": true}`` and answers with
    ``{"result": [[{"document": {"contents": text}}, ...]]}``.

    Args:
        timeout: seconds of a search.
    """

    instruction = "To search, write a query within <search>...</search>. What was found comes back."
    _CALL = re.compile(r"<search>\s*(.*?)\s*(?:</search>|$)", re.DOTALL)

    def __init__(self, search_url: str, topk: int = 3, timeout: float = 5.0) -> None:
        self._url, self._topk, self._timeout = search_url, topk, timeout

    async def call(self, found: str) -> ToolResult:
        try:
            texts = await call_off_loop(self._search, found)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            return ToolResult(f"Error: the search failed: {type(error).__name__}: {error}", True)
        shown = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1)) or "Nothing was found."
        return ToolResult(f"<information>{shown}</information>")

    def _search(self, query: str) -> list[str]:
        body = json.dumps({"queries": [query], "topk": self._topk, "return_scores": True}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._timeout) as answer:
            (found,) = json.loads(answer.read(_MAX_BODY))["result"]
        return [str(one.get("document", one)["contents"]) for one in found]


class CallText(TextTool):
    """Tools of an MCP server, or a function, called as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or
    in another form that families write between these marks."""

    def __init__(self, spec: object, instruction: str | None = None) -> None:
        self._tools = ToolSet([spec])
        self.instruction = instruction or (
            'To use a tool, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. Its result comes back.'
        )

    def find(self, text: str) -> str | None:
        parsed = _parsed(text, None)
        return text if parsed.calls or parsed.errors else None

    async def call(self, found: str) -> ToolResult:
        box = await self._tools.box()
        parsed = _parsed(found, box.schemas)
        if not parsed.calls:
            return ToolResult(f"Error: the tool call cannot be read: {parsed.errors[0]}", True)
        results = await box.call_all(parsed.calls)
        text = "\n".join(f"<tool_response>\n{result.text}\n</tool_response>" for result in results)
        return ToolResult(text, any(result.failed for result in results))

    async def close(self) -> None:
        await self._tools.close()


def _parsed(text: str, schemas: Sequence[Mapping[str, Any]] | None) -> ParsedResponse:
    """The calls in the first format that has any; without any, the fault of the format that instructions name."""
    found = [parse_response(text, name, schemas) for name in ("hermes", "qwen_xml", "glm")]
    return next((one for one in found if one.calls), found[0])


def _mcp(server_url: str, tool_names_subset: Sequence[str] = (), custom_prompt: str | None = None) -> CallText:
    return CallText({"mcp": {"url": server_url, "names": list(tool_names_subset)}}, custom_prompt)


KINDS: dict[str, Callable[..., TextTool]] = {"python_code": PythonText, "search": SearchText, "mcp": _mcp}
"""``tool_id`` to the tool's class."""


def text_tool(tool_id: str, tool_args: Mapping[str, Any]) -> TextTool:
    """Build the tool of an entry of ``tool_configs``.

    Raises:
        ToolError: it does not exist, or has no such option.
    """
    options = dict(tool_args)
    if tool_id == "python_code":
        # Programs of a model always run in the sandbox.
        options.pop("sandbox_type", None)
    try:
        return KINDS[tool_id](**options) if tool_id in KINDS else CallText(tool_id)
    except TypeError as error:
        raise ToolError(f"tool_args of {tool_id}: {error}") from error


class TextTools:
    """Puts tools around environments; shared by all episodes of an entry."""

    def __init__(self, tools: Sequence[TextTool], options: ToolWrapperArguments) -> None:
        self._tools, self._options = list(tools), options

    def around(self, make: Callable[[], Environment]) -> Environment:
        """Build an environment with the tools."""
        return ToolEnvironment(make(), self._tools, self._options)

    async def close(self) -> None:
        for tool in self._tools:
            await tool.close()


class ToolEnvironment:
    """An environment, with tools in front of it."""

    def __init__(self, inner: Environment, tools: Sequence[TextTool], options: ToolWrapperArguments) -> None:
        self._inner, self._tools, self._options = inner, tools, options
        self._uses = 0

    async def reset(self, seed: int, task: Mapping[str, Any] | None = None) -> Any:
        args, options = reset_arguments(self._inner, seed, task)
        observation, info = await call_off_loop(self._inner.reset, *args, **options)
        self._uses = 0
        instructions = "\n".join(tool.instruction for tool in self._tools)
        if isinstance(observation, str):
            return f"{observation}\n\n{instructions}", info
        return [{"role": "system", "content": instructions}, *observation], info

    async def step(self, action: str, opened: str = "") -> Any:
        """Call a tool, or take a step of the environment.

        Args:
            opened: the mark with which the prompt opened a thought; the action begins within it.
        """
        if self._uses < self._options.max_tool_uses:
            for tool in self._tools:
                found = tool.find(opened + action)
                if found is not None:
                    return await self._use(tool, found)
        observation, reward, terminated, truncated, info = await call_off_loop(self._inner.step, action)
        succeeded = bool(info.get("success", reward > 0))
        if (terminated or truncated) and self._uses and succeeded:
            reward = float(reward) + self._options.tool_success_reward
        return observation, reward, terminated, truncated, info

    async def close(self) -> None:
        if (close := getattr(self._inner, "close", None)) is not None:
            await call_off_loop(close)

    async def _use(self, tool: TextTool, found: str) -> Any:
        self._uses += 1
        result = await tool.call(found)
        text = result.text + (_NO_MORE if self._uses == self._options.max_tool_uses else "")
        metrics = {"tool_calls": 1.0, "failed_tool_calls": float(result.failed)}
        return text, self._options.tool_reward, False, False, {"metrics": metrics}
