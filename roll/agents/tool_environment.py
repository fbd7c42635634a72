"""Tools around an environment, in ROLL's form: calls in the text of a response, results as the next observation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roll.agents.built_in_tools import ToolSet
from roll.agents.tool_calls import ToolCall, parse_response
from roll.agents.tools import ToolBox, ToolError
from roll.environments.base import Environment, read_reset, read_step, takes_task
from roll.environments.off_loop import call_off_loop

_WRITTEN = {
    "python": (re.compile(r"<python>(.*?)</python>|```\s?python\n(.*?)```", re.DOTALL), "code"),
    "search": (re.compile(r"<search>(.*?)</search>", re.DOTALL), "query"),
}
"""Tool to the text of its calls and the argument that they give; all others are called as Hermes models do."""
_OPTIONS = {
    "python_code": {"timeout": "timeout", "memory_mb": "memory_mb"},
    "search": {"path": "path", "topk": "top_k", "title_key": "title_key", "text_key": "text_key"},
    "mcp": {"server_url": "url", "tool_names_subset": "names", "command": "command", "env": "env"},
}
"""Option of ROLL's ``tool_args`` to that of the tool here."""
_INERT = {"python_code": {"sandbox_type": ("none",)}}
"""Options of ROLL's that hold anyway: programs run in the sandbox, whatever a file says."""
_KINDS = {"python_code": "python", "search": "search", "mcp": "mcp"}


def tool_specs(configs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
    """Specifications of a :class:`~roll.agents.built_in_tools.ToolSet` for entries ``(tool_id, tool_args)``.

    Raises:
        ToolError: an option that a tool does not have.
    """
    specs: list[Any] = []
    for name, given in configs:
        if name not in _KINDS:
            if given:
                raise ToolError(f"tool_args: {name} is a function, which has no options")
            specs.append({"function": name})
            continue
        known, inert = _OPTIONS[name], _INERT.get(name, {})
        options = {}
        for key, value in given.items():
            if key in known:
                options[known[key]] = value
            elif value not in inert.get(key, ()):
                raise ToolError(f"tool_args.{key}: {name} has {', '.join(known)}")
        specs.append({_KINDS[name]: options})
    return specs


class ToolEnvironment:
    """An environment in whose turns the policy may use tools: a response that calls one is answered with the result,
    any other is an action of the environment.

    Args:
        reward: added for every response that calls a tool.
        success_reward: added once at the end of an episode that succeeds and has used a tool.
        most_uses: calls of an episode; further ones are actions.
    """

    def __init__(
        self, environment: Environment, tools: ToolSet, reward: float, success_reward: float, most_uses: int
    ) -> None:
        self._environment, self._tools = environment, tools
        self._reward, self._success_reward, self._most_uses = reward, success_reward, most_uses
        self._uses = 0

    async def reset(self, seed: int, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._uses = 0
        given = options if takes_task(self._environment) else {}
        self._turn = read_reset("reset", await call_off_loop(self._environment.reset, seed, **given))
        return self._turn.observation, self._turn.info

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Use a tool, or act."""
        if self._uses < self._most_uses:
            box = await self._tools.box()
            calls = _calls(action, box)
            if calls:
                return await self._used(box, calls)
        turn = read_step("step", await call_off_loop(self._environment.step, action))
        self._turn = turn
        reward = turn.reward
        if turn.done and self._uses and turn.info.get("success"):
            reward += self._success_reward
        return turn.observation, reward, turn.terminated, turn.truncated, turn.info

    async def close(self) -> None:
        """Close the environment; the tools are everybody's."""
        close = getattr(self._environment, "close", None)
        if close is not None:
            await call_off_loop(close)

    async def _used(self, box: ToolBox, calls: list[ToolCall]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        results = await box.call_all(calls[: self._most_uses - self._uses])
        self._uses += len(results)
        failed = sum(result.failed for result in results)
        metrics = {"tool_calls": float(len(results)), "failed_tool_calls": float(failed)}
        info = {"state": f"{self._turn.state}+{self._uses}", "valid": not failed, "metrics": metrics}
        return "\n".join(result.text for result in results), self._reward, False, False, info


def _calls(text: str, box: ToolBox) -> list[ToolCall]:
    """The calls in a response, in the order in which they stand."""
    found: list[tuple[int, ToolCall]] = []
    for name, (pattern, argument) in _WRITTEN.items():
        if name in box.names:
            for match in pattern.finditer(text):
                value = next(group for group in match.groups() if group is not None)
                found.append((match.start(), ToolCall(name, {argument: value.strip()})))
    calls = [call for _, call in sorted(found, key=lambda one: one[0])]
    return calls or parse_response(text, "hermes").calls
