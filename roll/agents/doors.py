"""Agents by name: ``agent`` and ``agent_config`` of a configuration to the agent that they ask for."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from roll.agents.black_box import BlackBoxAgent, BlackBoxOptions
from roll.agents.built_in_tools import ToolSet
from roll.agents.endpoint import AgentEndpoint
from roll.agents.episode import Agent
from roll.agents.tool_agent import FunctionAgent, ToolAgent, ToolOptions
from roll.agents.tools import ToolError
from roll.agents.verifiers import CommandVerifier, RewardVerifier, Verifier
from roll.config.reading.errors import closest
from roll.config.reading.schema import Mismatch, convert
from roll.rewards.base import RewardOptionError

T = TypeVar("T")
BUILT_IN = ("tools", "black_box")


class AgentOptionError(ValueError):
    """An agent that does not exist, or an option that it does not have or cannot use."""


@dataclass(frozen=True)
class VerifierSection:
    """``agent_config.verifier``: the reward of an episode, by a reward of roll's or of one's own, or by a command."""

    worker_cls: str | None = None
    """A reward's short name, or the dotted path of a function ``(prompt, response, ground_truth, **row)``."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the reward."""
    answer_key: str = "ground_truth"
    """Column of the row with the right answer."""
    command: list[str] = field(default_factory=list)
    """In place of a reward: a program that prints the reward as its last line, or leaves with status 0 or 1."""
    timeout: float = 60.0
    """Seconds of one verdict."""


@dataclass(frozen=True)
class ToolSection:
    """``agent_config`` of ``agent: tools``."""

    tools: list[Any] = field(default_factory=list)
    """Each ``python``, ``search``, ``mcp`` with its options, or the dotted path of a function."""
    verifier: dict[str, Any] = field(default_factory=dict)
    """The reward of the last answer."""
    timeout: float = 30.0
    """Seconds of a tool call."""
    max_result: int = 20_000
    """Characters of a tool's result."""
    tool_reward: float = 0.0
    """Added for every response that calls a tool."""
    tool_success_reward: float = 0.0
    """Added once to an episode that succeeds and has used a tool."""
    max_tool_uses: int | None = None
    """Tool calls of an episode; null: no limit."""


@dataclass(frozen=True)
class BlackBoxSection:
    """``agent_config`` of ``agent: black_box``."""

    command: list[str] = field(default_factory=list)
    """Program and arguments, ``{name}`` a field of the task; empty: agents from elsewhere take the episodes."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the program."""
    inherit_env: list[str] = field(default_factory=list)
    """Variables that it gets of this process, besides ``PATH`` and its like."""
    folder: str | None = None
    """Its working folder; null: the run's."""
    reward: Literal["post", "exit", "verifier"] = "post"
    """Where the reward comes from."""
    verifier: dict[str, Any] = field(default_factory=dict)
    """For ``reward: verifier``."""
    sampling: Literal["run", "refuse"] = "run"
    """What becomes of a request that sets a temperature or its like."""
    host: str = "127.0.0.1"
    """Address of the endpoint."""
    port: int = 0
    """Its port; 0: a free one."""
    public_url: str = ""
    """Its address as agents from elsewhere reach it; empty: host and port."""
    api_key_env: str = ""
    """Environment variable with the key that agents from elsewhere send for ``POST /episodes``."""


def make_agent(
    agent: str, config: Mapping[str, Any] | None = None, system: str | None = None, template: str | None = None
) -> Agent:
    """Build an agent; nothing is started yet.

    Args:
        agent: ``tools``, ``black_box``, or the dotted path of a coroutine ``run(task, model)``.
        config: options of the agent; of a coroutine its keyword arguments.
        system: system message, for ``tools``.
        template: text of the question, for ``tools``.

    Raises:
        AgentOptionError: see there; the message begins with the key.
    """
    given = dict(config or {})
    try:
        if agent == "tools":
            return _tool_agent(_section(ToolSection, given), system, template)
        if agent == "black_box":
            return _black_box(_section(BlackBoxSection, given))
        if "." not in agent:
            near = closest(agent, BUILT_IN)
            hint = f"did you mean {near!r}? " if near else ""
            raise AgentOptionError(
                f"agent: {agent!r} is not known; {hint}there are {', '.join(BUILT_IN)}, or a dotted path"
            )
        return FunctionAgent(agent, given)
    except (ToolError, RewardOptionError) as error:
        raise AgentOptionError(str(error)) from error


def _tool_agent(section: ToolSection, system: str | None, template: str | None) -> ToolAgent:
    if not section.verifier:
        raise AgentOptionError(
            "agent_config.verifier: is needed: the reward of the last answer, as in {worker_cls: math_rule}"
        )
    tools = ToolSet(section.tools, section.timeout, section.max_result)
    tools.check_host()
    options = ToolOptions(system, template, section.tool_reward, section.tool_success_reward, section.max_tool_uses)
    return ToolAgent(tools, _verifier(section.verifier), options)


def _black_box(section: BlackBoxSection) -> BlackBoxAgent:
    options = BlackBoxOptions(
        command=section.command,
        env=section.env,
        inherit_env=section.inherit_env,
        folder=section.folder,
        reward=section.reward,
        sampling=section.sampling,
    )
    worker_key = ""
    if section.api_key_env:
        worker_key = os.environ.get(section.api_key_env, "")
        if not worker_key:
            raise AgentOptionError(f"agent_config.api_key_env: there is no variable {section.api_key_env} here")
    verifier = _verifier(section.verifier) if section.verifier else None
    problems = options.problems(verifier is not None, bool(worker_key))
    if problems:
        raise AgentOptionError(f"agent_config: {problems[0]}")
    endpoint = AgentEndpoint(section.host, section.port, worker_key, section.public_url)
    return BlackBoxAgent(endpoint, options, verifier)


def _verifier(given: Mapping[str, Any]) -> Verifier:
    section = _section(VerifierSection, given, "agent_config.verifier")
    if bool(section.worker_cls) == bool(section.command):
        raise AgentOptionError("agent_config.verifier: has either worker_cls (a reward) or command (a program)")
    if section.worker_cls is None:
        return CommandVerifier(section.command, section.timeout)
    verifier = RewardVerifier(section.worker_cls, section.reward_kwargs, section.answer_key, section.timeout)
    verifier.check_host()
    return verifier


def _section(kind: type[T], given: Mapping[str, Any], key: str = "agent_config") -> T:
    """An instance of a dataclass of options; unknown names and wrong types are errors."""
    hints = typing.get_type_hints(kind)
    names = [one.name for one in dataclasses.fields(kind)]  # type: ignore[arg-type]
    checked = {}
    for name, value in given.items():
        if name not in hints:
            near = closest(name, names)
            hint = f"did you mean {near!r}? " if near else ""
            raise AgentOptionError(f"{key}.{name}: there is no such option; {hint}there are {', '.join(names)}")
        try:
            checked[name] = convert(value, hints[name])
        except Mismatch as error:
            raise AgentOptionError(f"{key}.{name}: {value!r}: {error.rule}") from None
    return kind(**checked)
