"""Options of agents and of tools around environments (``agent_config``, ``wrapper_args``), checked without starting
anything."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from roll.config.reading.errors import did_you_mean
from roll.config.reading.fields import setting
from roll.config.reading.schema import Mismatch, convert
from roll.config.rewards import CLUSTER, LLM_JUDGE, PUBLISHED_REWARDS

T = TypeVar("T")
AGENTS = ("tools", "black_box", "verl")  # names of the built-in agents
# Contents of an environment's next prompt: everything so far; the current observation with the last turns in a
# template; the current observation after the last turns as messages; the environment's messages and nothing else;
# everything so far, observations raw within the one message that the policy writes.
Context = Literal["append", "observation", "last", "own", "response"]
# Treatment of a request that sets a temperature or another sampling parameter: ignore it, or refuse the request.
Sampling = Literal["run", "refuse"]
# Treatment of a request that demands a tool call: begin the response with one, or let the policy decide.
ToolChoice = Literal["enforce", "auto"]


def uses_tools(agent: str | None) -> bool:
    """Return whether conversations of the agent may have tool messages, which the chat template must then support."""
    return agent in ("tools", "verl")


class AgentOptionError(ValueError):
    """An agent that does not exist, or an option that it does not have or cannot use."""


@dataclass(frozen=True)
class VerifierOptions:
    """``agent_config.verifier``: the reward of an episode, by a reward of roll's or of one's own, or by a command."""

    # A reward's short name, or the dotted path of a function `(prompt, response, ground_truth, **row)`.
    worker_cls: str | None = None
    reward_kwargs: dict[str, Any] = field(default_factory=dict)  # options of the reward
    answer_key: str = "ground_truth"  # column of the row with the right answer
    # The response that a reward sees: the last one (`answer`); all that was said from the first one on, by the policy
    # and to it, without thoughts (`episode`); the text of all tokens after the first prompt without special ones, which
    # is verl's `solution_str` (`solution`). null: of an environment the episode, of verl's agent the solution, else the
    # answer.
    scores: Literal["answer", "episode", "solution"] | None = None
    # In place of a reward: a program that prints the reward as its last line, or leaves with status 0 or 1.
    command: list[str] = field(default_factory=list)
    timeout: float = 60.0  # seconds of one verdict


@dataclass(frozen=True)
class ToolAgentOptions:
    """``agent_config`` of ``agent: tools``."""

    # Each `python`, `search`, `mcp` with its options, or the dotted path of a function.
    tools: list[Any] = field(default_factory=list)
    verifier: dict[str, Any] = field(default_factory=dict)  # the reward of the last answer
    timeout: float = 30.0  # seconds of a tool call
    max_result: int = 20_000  # characters of a tool's result
    tool_reward: float = 0.0  # added for every response that calls a tool
    tool_success_reward: float = 0.0  # added once to an episode that succeeds and has used a tool
    max_tool_uses: int | None = None  # tool calls of an episode; null: no limit


@dataclass(frozen=True)
class ToolWrapperArguments:
    """``custom_envs.<tag>.tool_wrapper.wrapper_args``."""

    tool_reward: float = 0.0
    """Added for every response that calls a tool."""
    tool_success_reward: float = 0.0
    """Added once at the end of an episode that succeeds and has used a tool."""
    max_tool_uses: int = setting(10, ge=0)
    """Calls of an episode; further ones are actions of the environment."""


@dataclass(frozen=True)
class VerlOptions:
    """``agent_config`` of ``agent: verl``; names and defaults are those of verl's ``rollout.multi_turn``."""

    response_length: int = 0  # tokens after the first prompt, of all turns and tool results together; needed
    tool_config_path: str | None = None  # verl's file of tools: `class_name`, `config` and `tool_schema` each
    interaction_config_path: str | None = None  # verl's file of interactions, which give the next user message
    # Loop of rows without a column `agent_name`.
    default_agent_loop: Literal["single_turn_agent", "tool_agent"] = "single_turn_agent"
    max_assistant_turns: int | None = None  # responses of an episode; null: no limit
    max_user_turns: int | None = None  # results and user messages of an episode; null: no limit
    max_parallel_calls: int = 1  # calls of a response that are made; further ones are not answered
    max_tool_response_length: int = 256  # characters of a result
    # `left`: its beginning stays, `right`: its end, `middle`: both.
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    prompt_key: str = "prompt"  # column of the conversation
    image_key: str = "images"  # column of the images that replace each `<image>` of the conversation, in order
    prompt_length: int | None = None  # longest prompt in tokens, tools included, with `filter_overlong_prompts`
    filter_overlong_prompts: bool = False  # leave out rows with longer prompts
    verifier: dict[str, Any] = field(default_factory=dict)  # the reward of an episode

    def check(self) -> None:
        """Raise ``AgentOptionError`` where there is no room for a response, or no reward."""
        if self.response_length < 1:
            raise AgentOptionError("agent_config.response_length: is needed: tokens of an episode behind its prompt")
        if self.max_parallel_calls < 1:
            raise AgentOptionError(f"agent_config.max_parallel_calls: {self.max_parallel_calls}: must be at least 1")
        if not self.verifier:
            raise AgentOptionError("agent_config.verifier: is needed: the reward, as in {worker_cls: gsm8k_rule}")


@dataclass(frozen=True)
class BlackBoxOptions:
    """``agent_config`` of ``agent: black_box``."""

    # Program and arguments, `{name}` a field of the task; empty: agents from elsewhere take the episodes.
    command: list[str] = field(default_factory=list)
    # Number of processes of `command` for the whole run: programs that take one episode after another by `POST
    # /episodes`. 0: a program of its own for every episode.
    processes: int = 0
    env: dict[str, str] = field(default_factory=dict)  # further environment variables of the program
    # Variables that it gets of this process, besides `PATH` and its like.
    inherit_env: list[str] = field(default_factory=list)
    folder: str | None = None  # its working folder; null: the run's
    reward: Literal["post", "exit", "verifier"] = "post"  # where the reward comes from
    verifier: dict[str, Any] = field(default_factory=dict)  # for `reward: verifier`
    sampling: Sampling = "run"  # treatment of a request that sets a temperature or another sampling parameter
    # Treatment of a request that demands a tool call: `enforce`: the response begins with one; `auto`: the policy may
    # call or not, and learns to.
    tool_choice: ToolChoice = "enforce"
    # Parts that the policy plays in an episode, by the `model` of a request, each with rewards and baselines of its
    # own; empty: a single part, under any name.
    roles: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"  # address of the endpoint
    port: int = 0  # its port; 0: a free one
    public_url: str = ""  # its address as agents from elsewhere reach it; empty: host and port
    api_key_env: str = ""  # environment variable with the key that agents from elsewhere send for `POST /episodes`

    @property
    def worker_key(self) -> str:
        """The value of ``api_key_env``; empty: agents from elsewhere are not served."""
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""

    def check(self) -> None:
        """Raise ``AgentOptionError`` for options that contradict each other, or a variable that is not there."""
        if self.api_key_env and not self.worker_key:
            raise AgentOptionError(f"agent_config.api_key_env: there is no variable {self.api_key_env} here")
        if not self.command and not self.worker_key:
            raise AgentOptionError(
                "agent_config.command: is needed, a program and its arguments; or api_key_env, the variable with the "
                "key that agents from elsewhere send"
            )
        if self.processes < 0 or (self.processes and not self.command):
            raise AgentOptionError(f"agent_config.processes: {self.processes}: must be at least 0, and needs command")
        if len(set(self.roles)) < len(self.roles) or not all(self.roles):
            raise AgentOptionError(f"agent_config.roles: {self.roles}: must be names, each once")
        if self.reward == "exit" and (self.processes or not self.command):
            raise AgentOptionError("agent_config.reward: exit needs a program of its own for every episode")
        if (self.reward == "verifier") != bool(self.verifier):
            raise AgentOptionError("agent_config.verifier: goes with reward: verifier, and only with it")


def asks_the_run(verifier: Mapping[str, Any]) -> bool:
    """Return whether a section ``verifier`` is a judge on the run's own role ``reward``."""
    name, options = verifier.get("worker_cls"), verifier.get("reward_kwargs") or {}
    is_judge = isinstance(name, str) and PUBLISHED_REWARDS.get(name.rpartition(".")[2], name) == LLM_JUDGE
    return is_judge and options.get("model_type") == CLUSTER


def read_options(kind: type[T], options: Mapping[str, Any], key: str = "agent_config") -> T:
    """Read a dataclass of options from a section. Raises ``AgentOptionError``: an unknown name or a wrong type."""
    hints = typing.get_type_hints(kind)
    names = [one.name for one in dataclasses.fields(kind)]  # type: ignore[arg-type]
    checked = {}
    for name, value in options.items():
        if name not in hints:
            hint = did_you_mean(name, names)
            raise AgentOptionError(f"{key}.{name}: there is no such option; {hint}there are {', '.join(names)}")
        try:
            checked[name] = convert(value, hints[name])
        except Mismatch as error:
            raise AgentOptionError(f"{key}.{name}: {value!r}: {error.rule}") from None
    return kind(**checked)
