"""Agents by name: builds and checks the agents that ``agent`` and ``agent_config`` of a configuration name."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
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
from roll.agents.built_in_tools import ToolSet
from roll.agents.episode import Agent
from roll.agents.programs import program_environment
from roll.agents.tool_agent import FunctionAgent, ToolAgent
from roll.agents.tools import ToolError
from roll.agents.verifiers import CommandVerifier, RewardVerifier, Verifier
from roll.agents.verl_agent import VerlAgent
from roll.config.reading.errors import did_you_mean
from roll.config.rewards import INFERENCE, REWARD_MODEL
from roll.rewards.base import RewardOptionError
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
