"""Agents by name: builds and checks the agents that ``agent`` and ``agent_config`` of a configuration name; those that
answer questions, with tools until there is an answer or by a user's coroutine, are here as well."""

from __future__ import annotations

import inspect
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.agents.agent_options import (
    AGENTS,
    AgentOptionError,
    BlackBoxOptions,
    ToolAgentOptions,
    VerifierOptions,
    VerlOptions,
    asks_the_run,
    read_options,
)
from roll.agents.built_in_tools import ToolSet, load_function
from roll.agents.chat_ids import Message
from roll.agents.episode import Agent, Episode, Model, Response, Task
from roll.agents.programs import program_environment
from roll.agents.tools import ToolBox, ToolError, ToolResult, tool_messages
from roll.agents.verifiers import CommandVerifier, RewardVerifier, Verifier
from roll.agents.verl_agent import VerlAgent
from roll.config.reading.errors import did_you_mean
from roll.config.rewards import INFERENCE, REWARD_MODEL
from roll.rewards.base import RewardOptionError, finite_number
from roll.rewards.registry import resolve_name


def check_agent(agent: str, config: Mapping[str, Any] | None = None) -> None:
    """Check an agent and its options before a run starts, without importing torch or Ray. Raises ``AgentOptionError``:
    the message begins with the key."""
    if agent != "black_box":
        make_agent(agent, config)
        return
    options = read_options(BlackBoxOptions, dict(config or {}))
    options.check()
    if options.verifier:
        make_verifier(options.verifier)
    if options.command and shutil.which(options.command[0], path=program_environment(options.env)["PATH"]) is None:
        raise AgentOptionError(f"agent_config.command: there is no program {options.command[0]!r} here")


def make_agent(
    agent: str,
    config: Mapping[str, Any] | None = None,
    system: str | None = None,
    template: str | None = None,
    judge: Mapping[str, str] | None = None,
) -> Agent:
    """Build an agent; nothing is started yet.

    Args:
        agent: ``tools``, ``black_box``, ``verl``, or a coroutine's dotted path.
        config: options of the agent; of a coroutine its keyword arguments.
        system: system message, for ``tools``.
        template: text of the question, for ``tools``.
        judge: address and key of the role ``reward``, as for :func:`make_verifier`.

    Raises:
        AgentOptionError: no such agent, or a wrong option; the message begins with the key.
    """
    options = dict(config or {})
    try:
        if agent == "tools":
            own = read_options(ToolAgentOptions, options)
            if not own.verifier:
                rule = "is needed: the reward of the last answer, as in {worker_cls: math_rule}"
                raise AgentOptionError(f"agent_config.verifier: {rule}")
            tools = ToolSet(own.tools, own.timeout, own.max_result)
            tools.check_host()
            return ToolAgent(tools, make_verifier(own.verifier, judge), own, system, template)
        if agent == "black_box":
            from roll.agents.black_box import BlackBoxAgent

            program = read_options(BlackBoxOptions, options)
            program.check()
            return BlackBoxAgent(program, make_verifier(program.verifier, judge) if program.verifier else None)
        if agent == "verl":
            loop = read_options(VerlOptions, options)
            loop.check()
            played = VerlAgent(loop, make_verifier({"scores": "solution", **loop.verifier}, judge))
            played.check_host()
            return played
        if "." not in agent:
            hint = did_you_mean(agent, AGENTS)
            there = f"there are {', '.join(AGENTS)}, or the dotted path of a coroutine"
            raise AgentOptionError(f"agent: {agent!r} is not known; {hint}{there}")
        return FunctionAgent(agent, options)
    except ToolError as error:
        key = "" if str(error).startswith("agent: ") else "agent_config.tools: "
        raise AgentOptionError(f"{key}{error}") from error


def make_verifier(
    section: Mapping[str, Any],
    judge: Mapping[str, str] | None = None,
    key: str = "agent_config.verifier",
    of_environment: bool = False,
) -> Verifier:
    """Build the verifier of a section ``verifier``. ``judge``: options of a judge on the run's own role ``reward``
    (``base_url``, ``api_key``, ``model``), which are known only while it runs; ``of_environment``: score whole episodes
    by default. Raises ``AgentOptionError``: a reward or option that does not exist; the message begins with ``key``."""
    options = read_options(VerifierOptions, section, key)
    if bool(options.worker_cls) == bool(options.command):
        raise AgentOptionError(f"{key}: has either worker_cls (a reward) or command (a program)")
    if options.worker_cls is None:
        return CommandVerifier(options.command, options.timeout)
    if options.reward_kwargs.get("model_type") == INFERENCE:
        rule = "inference is for rewards sections; cluster asks the role reward, api a service"
        raise AgentOptionError(f"{key}.reward_kwargs.model_type: {rule}")
    try:
        if resolve_name(options.worker_cls) == REWARD_MODEL:
            rule = "a classifier scores rewards sections alone; http_reward asks one behind a service"
            raise AgentOptionError(f"{key}.worker_cls: {rule}, llm_judge a model")
        scores = options.scores or ("episode" if of_environment else "answer")
        kwargs = options.reward_kwargs | dict((judge or {}) if asks_the_run(section) else {})
        return RewardVerifier(options.worker_cls, kwargs, options.answer_key, options.timeout, scores)
    except RewardOptionError as error:
        raise AgentOptionError(f"{key}: {error}") from error


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
