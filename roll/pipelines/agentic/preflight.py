"""Checks by the parts of an agentic run, before anything starts: environments, filters, the chat template."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from roll.config.loader import LoadedConfig
from roll.config.model_files import model_config, model_folder
from roll.config.pipelines import find_own_modules
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.fields import DOTTED_PATH
from roll.config.reading.masking import masked
from roll.config.reading.yaml_files import shown
from roll.environments.registry import EnvironmentOptionError, check_environment_options
from roll.pipelines.agentic.config import AgenticConfig, CustomEnvConfig, ToolWrapperConfig
from roll.pipelines.agentic.plan import AgenticPlan, agent_of, used_entries
from roll.pipelines.policy_checks import build_own_filter, policy_functions


class OwnGroupFilter(Protocol):
    """``group_filter_cls``: an object of a class of the user's own, built without arguments."""

    def filter(self, group_id: str, episode_id: int, group: Sequence[Any]) -> bool:
        """Drop the group; ``group`` holds its :class:`~roll.agents.episode.Episode` objects."""
        ...


def check_environments(loaded: LoadedConfig[AgenticConfig]) -> None:
    """Each environment that is played exists and has the options that its section gives.

    Raises:
        ConfigError: every one that does not.
    """
    find_own_modules()
    problems: list[Problem] = []
    for tag, section in used_entries(loaded.config).items():
        agent, options = agent_of(section)
        if agent is not None:
            problems += agent_problems(f"custom_envs.{tag}", agent, options, loaded)
        elif section.verifier:
            problems += verifier_problems(f"custom_envs.{tag}.verifier", section.verifier, loaded)
        if section.env_type is None:
            continue
        problems += wrapper_problems(f"custom_envs.{tag}.tool_wrapper", section.tool_wrapper, loaded)
        problems += sight_problems(tag, section, loaded)
        try:
            check_environment_options(section.env_type, section.env_config)
        except EnvironmentOptionError as error:
            problems.append(_problem(f"custom_envs.{tag}", section.env_type, section.env_config, error, loaded))
    if problems:
        raise ConfigError(problems)


def sight_problems(tag: str, section: CustomEnvConfig, loaded: LoadedConfig[AgenticConfig]) -> Iterator[Problem]:
    """An environment that shows pictures to a policy that is a model of text."""
    assert isinstance(loaded.plan, AgenticPlan)
    role = loaded.plan.roles.get("actor_train") or loaded.plan.roles["actor_infer"]
    config = model_config(role.model_path)
    if config is None or "vision_config" in config:
        return
    for option, value in (("render_mode", "rgb_array"), ("pictures", True)):
        if section.env_config.get(option) == value:
            rule = f"shows pictures, and {role.model_path} is a model of text; a vision-language model sees them"
            yield Problem(f"custom_envs.{tag}.env_config.{option}", value, rule, source=shown(loaded.source))


def agent_problems(
    key: str, agent: str, options: dict[str, Any], loaded: LoadedConfig[AgenticConfig]
) -> Iterator[Problem]:
    """Problems of an agent and its options."""
    from roll.agents.agent_options import AgentOptionError
    from roll.agents.doors import check_agent

    try:
        check_agent(agent, options)
    except AgentOptionError as error:
        name, colon, rule = str(error).partition(": ")
        if not colon or " " in name:
            name, rule = "agent", str(error)
        yield Problem(f"{key}.{name}", None, rule, source=shown(loaded.source), has_value=False)


def verifier_problems(key: str, verifier: dict[str, Any], loaded: LoadedConfig[AgenticConfig]) -> Iterator[Problem]:
    """Problems of an environment's verifier."""
    from roll.agents.agent_options import AgentOptionError
    from roll.agents.doors import make_verifier

    try:
        make_verifier(verifier, key="verifier", of_environment=True)
    except AgentOptionError as error:
        name, _, rule = str(error).partition(": ")
        yield Problem(key + name.removeprefix("verifier"), None, rule, source=shown(loaded.source), has_value=False)


def wrapper_problems(
    key: str, wrapper: ToolWrapperConfig | None, loaded: LoadedConfig[AgenticConfig]
) -> Iterator[Problem]:
    """Tools that do not exist, or lack an option."""
    from roll.agents.text_tools import text_tool
    from roll.agents.tools import ToolError

    for index, tool in enumerate(wrapper.tool_configs if wrapper is not None else ()):
        try:
            text_tool(tool.tool_id, tool.tool_args)
        except ToolError as error:
            path = f"{key}.tool_configs[{index}]"
            yield Problem(path, None, str(error), source=shown(loaded.source), has_value=False)


def _problem(
    key: str, env_type: str, env_config: dict[str, Any], error: EnvironmentOptionError, loaded: LoadedConfig[Any]
) -> Problem:
    """At the option where it is known, else at the whole of ``env_config`` where the environment exists."""
    source, text = shown(loaded.source), str(error)
    if error.option is not None:
        rule = text.removeprefix(f"env_config.{error.option}: ")
        return Problem(f"{key}.env_config.{error.option}", masked(env_config[error.option]), rule, source=source)
    begun = f"env_type {env_type!r}"
    if text.startswith(f"{begun}: "):
        return Problem(f"{key}.env_config", None, text.removeprefix(f"{begun}: "), source=source, has_value=False)
    return Problem(f"{key}.env_type", env_type, text.removeprefix(begun).strip(), source=source)


def check_chat_template(loaded: LoadedConfig[AgenticConfig]) -> None:
    """Conversations can grow with the chat template, wherever they have more than one turn. The tokenizer of a model
    that is not on this machine yet is looked at when the run starts.

    Raises:
        ConfigError: they cannot.
    """
    assert isinstance(loaded.plan, AgenticPlan)
    role = loaded.plan.roles.get("actor_train") or loaded.plan.roles["actor_infer"]
    folder = model_folder(role.model_path) if role.model_path is not None else None
    if folder is None or not os.path.isfile(folder / "tokenizer_config.json"):
        return
    entries = [one for one in loaded.plan.entries.values() if one.turns > 1 and one.context in ("append", "last")]
    if not entries:
        return
    from roll.agents.agent_options import uses_tools
    from roll.agents.chat_ids import TemplateError, check_template
    from roll.agents.template_files import TemplateFiles
    from roll.pipelines.agentic.templates import chat_template

    tokenizer: Any = TemplateFiles(folder)
    if tokenizer.has_own_code or not tokenizer.chat_template:  # a class of a tokenizer may bring a template
        from roll.pipelines.files import load_tokenizer

        tokenizer = load_tokenizer(role.model_path, role.section.model_args.trust_remote_code)
    for entry in entries:
        try:
            template = chat_template(loaded.config, tokenizer)
            check_template(template, entry.section.thinking, uses_tools(entry.agent))
        except TemplateError as error:
            key = f"custom_envs.{entry.tag}.thinking"
            raise ConfigError(
                [Problem(key, entry.section.thinking, str(error), source=shown(loaded.source))]
            ) from error


def own_functions(config: AgenticConfig) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """As :func:`~roll.pipelines.policy_checks.policy_functions`, and the filters of groups."""
    yield from policy_functions(config)
    managers = {"train_env_manager": config.train_env_manager, "val_env_manager": config.val_env_manager}
    for name, section in managers.items():
        if section is None:
            continue
        own = section.group_filter_config
        if DOTTED_PATH.fullmatch(own.type):
            yield f"{name}.group_filter_config", own.type, partial(build_own_filter, own.type, own.filter_args)
        if section.group_filter_cls is not None:
            yield (
                f"{name}.group_filter_cls",
                section.group_filter_cls,
                partial(own_group_filter, section.group_filter_cls),
            )


def own_group_filter(path: str) -> OwnGroupFilter:
    """An object of the class at a dotted path.

    Raises:
        ValueError: there is no such class, or it has no method ``filter``.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        built = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{path!r} cannot be built: {error}") from error
    if not callable(getattr(built, "filter", None)):
        raise ValueError(f"{path!r} has no method filter(group_id, episode_id, group) -> bool")
    own: OwnGroupFilter = built
    return own
