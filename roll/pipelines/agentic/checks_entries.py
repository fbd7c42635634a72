"""Checks of the entries of ``custom_envs``, and of the keys that ROLL's files have in their place."""

from __future__ import annotations

import string

from roll.agents.programs import is_taskset
from roll.config.checks.base import Checks, check_data_files
from roll.config.reading.errors import closest
from roll.pipelines.agentic.config import MANAGERS, AgenticConfig, CustomEnvConfig, agent_of, played_as, used_entries

# Names that `agent_template` may use, by context.
TEMPLATE_FIELDS = {
    "append": ("observation", "turn_idx", "suffix", "actions_left", "max_response_length"),
    "observation": (
        *("env_instruction", "history", "step_count", "history_length", "current_step", "current_observation"),
        *("observation", "max_response_length", "actions_left"),
    ),
}
TEMPLATE_FIELDS["last"] = TEMPLATE_FIELDS["own"] = TEMPLATE_FIELDS["response"] = TEMPLATE_FIELDS["append"]

# Environments of ROLL's files that need something that is not part of this package.
EXTERNAL_ENVIRONMENTS = {
    "webshop": "its shop and search index are a package of their own",
    "sokoban_mcp": "its game runs on an MCP server of its own",
    "sokoban_sandbox": "its game runs in a sandbox service of its own",
    "sokoban_native_env": "its game runs in a sandbox service of its own",
    "sokoban_tool_call": "it is played by tool calls of a proxy's agent",
    "deepeyes": "its tools zoom into and turn images in a package of its own",
    "rock_tb_native_env": "it needs the ROCK sandbox service",
    "openreward_env": "it needs the OpenReward service",
    "atropos_env": "it needs an Atropos server",
    "roll_code": "its test cases have a form of their own",
}
# Keys of `config` that are read with it, each with what decides instead; empty: it has an effect.
PROXY_OPTIONS = {
    "trajectory_mode": "",
    "enable_fork": "every branch is trained, each sampled token once",
    "enable_thinking": "actor_train.data_args.template and chat_template_kwargs decide",
    "tool_call_parser": "tool_format decides",
}


def check_entries(config: AgenticConfig, checks: Checks) -> None:
    """Check the entries that are played; others may be unfinished."""
    for tag, section in used_entries(config).items():
        key = f"custom_envs.{tag}"
        if checks.broken(key):
            continue
        check_proxy(key, section, checks)
        check_manager(key, section, checks)
        check_player(key, section, checks)
        check_tool_wrapper(key, section, checks)
        check_texts(key, section, checks)
        if section.use_thread_lock and section.max_env_step_concurrent > 1:
            text = "has no effect with use_thread_lock: true: one call at a time"
            checks.note(f"{key}.max_env_step_concurrent", text)


def check_proxy(key: str, section: CustomEnvConfig, checks: Checks) -> None:
    """Options of ROLL's files for agents that use its proxy."""
    for name, value in section.config.items():
        path = f"{key}.config.{name}"
        if name == "trajectory_mode" and value not in ("traj", "step"):
            checks.add(path, value, "must be traj (a row a conversation) or step (a row a call)", "traj")
        elif name not in PROXY_OPTIONS:
            rule = "is an option of agents in ROLL's sandboxes; command (a program of your own) is the way here"
            checks.add(path, value, rule)
        elif PROXY_OPTIONS[name]:
            checks.note(path, f"has no effect: {PROXY_OPTIONS[name]}")


def check_manager(key: str, section: CustomEnvConfig, checks: Checks) -> None:
    """``env_manager_cls`` is a class of ROLL that is known here."""
    path = section.env_manager_cls
    if path is None:
        return
    name = path.rpartition(".")[2]
    if name not in MANAGERS:
        near = closest(name, MANAGERS) or "TrajEnvManager"
        rule = f"is not known: {', '.join(MANAGERS)} are; context and samples say the same without a class"
        checks.add(f"{key}.env_manager_cls", path, rule, near)
    elif section.context is not None or section.samples is not None:
        checks.note(f"{key}.env_manager_cls", "context and samples, where they are written, decide")


def check_player(key: str, section: CustomEnvConfig, checks: Checks) -> None:
    """An entry has either an environment or an agent; or a taskset, which brings tasks, tools and reward."""
    agent, _ = agent_of(section)
    if is_taskset(section.env_type):
        sections = ("agent", "tools", "command", "verifier", "data_args", "tool_wrapper")
        own = {name: getattr(section, name) for name in sections}
        named = (*sections[2:4], "reward", "roles")
        own |= {f"agent_config.{name}": section.agent_config.get(name) for name in named}
        for name, value in own.items():
            if value:
                rule = f"cannot be used with {section.env_type}, which has tasks, tools and rewards of its own"
                checks.add(f"{key}.{name}", value if isinstance(value, str | list) else "a section", rule, "~")
        return
    if agent is None and section.env_type is None:
        rule = "is needed: which environment is played (docs/environments.md); or agent, tools or command"
        checks.missing(f"{key}.env_type", rule, "frozen_lake")
    elif agent is not None and section.env_type is not None:
        rule = "goes without agent, tools and command: an agent is given its task by data_args or by its own code"
        also = "; tool_wrapper puts tools around an environment" if agent == "tools" else ""
        checks.add(f"{key}.env_type", section.env_type, rule + also, "~")
    elif section.env_type in EXTERNAL_ENVIRONMENTS:
        rule = f"is not part of this package: {EXTERNAL_ENVIRONMENTS[section.env_type]}"
        remedy = "the dotted path of a class of your own (docs/environments.md), or openenv:URL"
        checks.add(f"{key}.env_type", section.env_type, rule, remedy)
    if agent is not None:
        check_agent_keys(key, agent, section, checks)
    elif section.agent_config:
        checks.note(f"{key}.agent_config", "has no effect without agent, tools or command")
    if section.data_args is not None:
        check_data_files(f"{key}.data_args", section.data_args, checks)
        if section.data_args.ground_truth is not None:
            rule = "is not read here: tasks get rows as they are; agent_config.verifier.answer_key names the column"
            checks.add(f"{key}.data_args.ground_truth", section.data_args.ground_truth, rule, "~")


def check_agent_keys(key: str, agent: str, section: CustomEnvConfig, checks: Checks) -> None:
    """Short keys and ``agent_config`` agree, and an agent that needs questions has a data set."""
    for name, wanted in (("tools", "tools"), ("command", "black_box")):
        if getattr(section, name) and agent != wanted:
            rule = f"is short for agent: {wanted}, and agent is {agent}: keep one of them"
            checks.add(f"{key}.{name}", getattr(section, name), rule)
    for name in ("tools", "command", "verifier"):
        if getattr(section, name) and name in section.agent_config:
            rule = f"is set by agent_config.{name}, too: keep one of them"
            checks.add(f"{key}.{name}", getattr(section, name), rule)
    columns = {"tools": "messages, prompt or question", "verl": "prompt"}
    if agent in columns and section.data_args is None and section.env_type is None:
        rule = f"is needed by agent: {agent}: the questions, in a column {columns[agent]}"
        checks.missing(f"{key}.data_args.file_name", rule, "[data/train.jsonl]")
    for name in ("context", "history_length", "env_config", "use_thread_lock", "max_env_step_concurrent"):
        if checks.written(f"{key}.{name}"):
            checks.note(f"{key}.{name}", f"has no effect with agent: {agent}, which writes its own prompts")


def check_tool_wrapper(key: str, section: CustomEnvConfig, checks: Checks) -> None:
    """Tools are around an environment, and there is one."""
    wrapper, path = section.tool_wrapper, f"{key}.tool_wrapper"
    if wrapper is None:
        return
    if section.env_type is None:
        checks.add(path, "a section", "goes around an environment; tools are the key for agents", "~")
    if not wrapper.tool_configs:
        checks.missing(f"{path}.tool_configs", "is needed: the tools", "[{tool_id: python_code}]")
    for index, tool in enumerate(wrapper.tool_configs):
        inside = f"{path}.tool_configs[{index}].tool_args"
        if tool.tool_id == "python_code" and tool.tool_args.get("sandbox_type") not in (None, "sandbox"):
            checks.note(f"{inside}.sandbox_type", "has no effect: what a model writes runs in the sandbox")


def check_texts(key: str, section: CustomEnvConfig, checks: Checks) -> None:
    (context, _), whole = played_as(section), section.agent_template is not None
    names = ("agent_template", "pre_step_template", "next_step_template")
    for name in names if agent_of(section)[0] is None else ():
        path, text = f"{key}.{name}", getattr(section, name)
        if text is None:
            continue
        if context == "own":
            checks.note(path, "has no effect with context: own, whose messages are the environment's")
        elif whole and name != "agent_template":
            checks.note(path, "has no effect with agent_template, which is the whole text of a turn")
        else:
            check_text(path, text, context, name == "agent_template", checks)


def check_text(path: str, text: str, context: str, whole: bool, checks: Checks) -> None:
    """A text is a format string of the names of its context; ``whole``: it should show an observation."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        rule = f"is not a format string: {error}; a brace that is meant as such is written twice"
        checks.add(path, text, rule, "'{observation}'")
        return
    known = TEMPLATE_FIELDS[context]
    for name in names:
        if name not in known:
            near = closest(name, known)
            rule = f"names {{{name}}}; with context: {context} there are {', '.join(known)}"
            checks.add(path, text, rule, f"{{{near or 'observation'}}}")
            return
    if whole and not {"observation", "current_observation", "history"} & set(names):
        checks.note(path, "names no observation: the policy does not see the environment")
