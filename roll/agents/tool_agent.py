"""Agents that answer questions: with tools, until there is an answer; or by a user's coroutine."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.agents.agent_options import ToolAgentOptions
from roll.agents.built_in_tools import ToolSet, load_function
from roll.agents.chat_ids import Message
from roll.agents.episode import Episode, Model, Response, Task
from roll.agents.tools import ToolBox, ToolError, ToolResult, tool_messages
from roll.agents.verifiers import Verifier
from roll.rewards.base import finite_number


@dataclass(eq=False)
class ToolAgent:
    """Calls the policy, makes the tool calls that it writes, and calls it again with their results, until a response
    has none. A call that cannot be parsed is answered with the error."""

    _tools: ToolSet
    _verifier: Verifier
    _options: ToolAgentOptions
    _system: str | None = None  # system message
    # Text of the question, a format string of the row's columns; None: the column `messages` (a conversation), `prompt`
    # or `question`.
    _template: str | None = None

    async def run(self, task: Task, model: Model, episode: Episode) -> float:
        """Work until there is an answer; returns the verifier's score. Raises ``EpisodeOver``: a limit, or a tool's
        server that is lost."""
        episode.success = False
        for name in ("tool_calls", "failed_tool_calls", "unreadable_calls"):
            episode.count(name, 0)
        try:
            used = await self._use_tools(task, model, episode, await self._tools.box())
        except ToolError as error:
            raise episode.fault(str(error)) from error
        score = await self._verifier(task, model, episode)
        episode.success = score > 0
        return score + self._options.tool_success_reward * (episode.success and used > 0)

    async def _use_tools(self, task: Task, model: Model, episode: Episode, box: ToolBox) -> int:
        """Work until a response calls no tool; returns the number of calls."""
        messages = first_messages(task, self._system, self._template)
        used = 0
        while True:
            response = await model.chat(messages, tools=box.schemas)
            messages.append(response.message)
            if not response.parsed.calls and not response.parsed.errors:
                return used
            begin = time.perf_counter()
            messages += await self._results(response, box, used, episode)
            episode.seconds.environment += time.perf_counter() - begin
            used += len(response.parsed.calls)
            if response.parsed.calls:
                model.reward(self._options.tool_reward, response.call)

    async def _results(self, response: Response, box: ToolBox, used: int, episode: Episode) -> list[Message]:
        calls, most = response.parsed.calls, self._options.max_tool_uses
        for error in response.parsed.errors:
            episode.count("unreadable_calls")
            if not calls:
                # Templates render no tool message after a response without a call.
                cut = ", since the response was cut at its most tokens" if response.finish_reason == "length" else ""
                return [{"role": "user", "content": f"Error: the tool call cannot be read{cut}: {error}"}]
        allowed = calls if most is None else calls[: max(0, most - used)]
        results = await box.call_all(allowed)
        episode.count("tool_calls", len(calls))
        episode.count("failed_tool_calls", sum(result.failed for result in results) + len(calls) - len(allowed))
        identities = [call["id"] for call in response.message["tool_calls"]]
        refused = ToolResult(f"Error: no more than {most} tool calls; give the answer.", True)
        return tool_messages(calls, identities, [*results, *[refused] * (len(calls) - len(allowed))])

    async def close(self) -> None:
        """End the tools' servers and sandboxes, and what the verifier holds."""
        self._verifier.close()
        await self._tools.close()


def first_messages(task: Task, system: str | None, template: str | None) -> list[Message]:
    """The first messages of a task's conversation. Raises ``ValueError``: the row lacks a column of the template, or
    has no question at all."""
    row = task.row
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    if template is not None:
        try:
            return [*start, {"role": "user", "content": template.format_map({key: str(row[key]) for key in row})}]
        except KeyError as error:
            raise ValueError(f"the template names {error}, which is no column of the row: {', '.join(row)}") from error
    if row.get("messages"):
        return [*start, *(dict(message) for message in row["messages"])]
    for key in ("prompt", "question"):
        if isinstance(row.get(key), str):
            return [*start, {"role": "user", "content": row[key]}]
    raise ValueError(f"the row has no column messages, prompt or question, and no template names one: {', '.join(row)}")


class FunctionAgent:
    """A user's coroutine: ``async def run(task, model) -> float``, or ``run(task, model, episode)``.

    It returns a reward, None (after rewards by ``model.reward``), or a mapping with ``reward``, ``success`` and further
    numbers, which become metrics. ``path`` is the dotted path of the function, or of a class with such a method
    ``run``; ``arguments`` are its keyword arguments. Raises ``ToolError``: there is no such function, it is not a
    coroutine function, or takes other arguments.
    """

    def __init__(self, path: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._arguments = dict(arguments or {})
        self._function: Any = load_function(path, "agent")
        agent: Any = None
        if inspect.isclass(self._function):
            try:
                agent = self._function(**self._arguments)
                self._function = agent.run
            except (TypeError, ValueError, AttributeError) as error:
                raise ToolError(f"agent: {path} cannot be made: {error}") from error
            self._arguments = {}
        self._close = getattr(agent, "close", None)
        function = self._function
        if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
            raise ToolError(f"agent: {path} must be a coroutine function: async def run(task, model)")
        signature = inspect.signature(function)
        free = [name for name in signature.parameters if name not in self._arguments]
        self._takes_episode = free[2:3] == ["episode"]
        try:
            signature.bind(*(None,) * (3 if self._takes_episode else 2), **self._arguments)
        except TypeError as error:
            raise ToolError(f"agent: {path}{signature} must be callable as run(task, model): {error}") from None

    async def run(self, task: Task, model: Model, episode: Episode) -> float:
        """The reward that the coroutine returns; ``TypeError`` where that is none."""
        positional = (task, model, episode) if self._takes_episode else (task, model)
        result = await self._function(*positional, **self._arguments)
        if isinstance(result, Mapping):
            numbers = dict(result)
            if numbers.get("success") is not None:
                episode.success = bool(numbers.pop("success"))
            result = numbers.pop("reward", None)
            episode.metrics |= {str(name): float(value) for name, value in numbers.items() if value is not None}
        if result is None:
            return 0.0
        if not isinstance(result, int | float) or finite_number(result) is None:
            raise TypeError(f"{self._path} returned {result!r:.100}; a reward is a finite number")
        return float(result)

    async def close(self) -> None:
        """End what an agent's own ``async def close()`` ends."""
        if self._close is not None:
            await self._close()
