"""Checks that build or import parts of an agentic run before anything starts: environments, filters, templates."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from roll.agents.agent_options import AgentOptionError, uses_tools
from roll.agents.chat_ids import ChatTemplate, TemplateError, check_template
from roll.agents.images import ChatImages
from roll.agents.programs import TasksetError, is_taskset, number_of_tasks
from roll.config.data import TEMPLATE_ENDINGS
from roll.config.loader import LoadedConfig
from roll.config.model_files import model_config, model_folder
from roll.config.pipelines import find_own_modules
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.masking import masked
from roll.config.reading.yaml_files import shown
from roll.environments.registry import EnvironmentOptionError, check_environment_options
from roll.pipelines.agentic.config import AgenticConfig, CustomEnvConfig
from roll.pipelines.agentic.plan import AgenticPlan, agent_of, used_entries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_THINKING = {"qwen3": True, "qwen3_nothink": False}


class OwnGroupFilter(Protocol):
    """``group_filter_cls``: an object of a user's class, built without arguments."""

    def filter(self, group_id: str, episode_id: int, group: Sequence[Any]) -> bool:
        """Return true to drop the group; ``group`` holds its :class:`~roll.agents.episode.Episode` objects."""
        ...


def check_environments(loaded: LoadedConfig[AgenticConfig]) -> None:
    """The environments and agents that are played exist and have the options that their sections set. Raises
    ``ConfigError``: with every problem."""
    find_own_modules()
    problems: list[Problem] = []
    for tag, section in used_entries(loaded.config).items():
        problems += agent_problems(f"custom_envs.{tag}", section)
        if section.env_type is not None and not is_taskset(section.env_type):
            policy = loaded.plan.roles.get("actor_train") or loaded.plan.roles["actor_infer"]
            problems += environment_problems(f"custom_envs.{tag}", section, policy.model_path)
    if problems:
        raise ConfigError([replace(problem, source=shown(loaded.source)) for problem in problems])


def agent_problems(key: str, section: CustomEnvConfig) -> Iterator[Problem]:
    """Problems of an entry's agent, or of its environment's verifier, and their options."""
    agent, options = agent_of(section)
    if agent is None and not section.verifier:
        return
    from roll.agents.registry import check_agent, make_verifier

    try:
        if is_taskset(section.env_type):
            number_of_tasks(options)
        if agent is not None:
            check_agent(agent, options)
        else:
            make_verifier(section.verifier, key="verifier", of_environment=True)
    except TasksetError as error:
        yield from (Problem(f"{key}.{name}", None, rule, has_value=False) for name, rule in error.problems)
    except AgentOptionError as error:
        name, colon, rule = str(error).partition(": ")
        if agent is None:
            name = "verifier" + name.removeprefix("verifier")
        elif not colon or " " in name:
            name, rule = "agent", str(error)
        yield Problem(f"{key}.{name}", None, rule, has_value=False)


def environment_problems(key: str, section: CustomEnvConfig, model_path: str | None) -> Iterator[Problem]:
    """Problems of an entry's environment: tools around it that lack something, pictures that a text model cannot see,
    options."""
    from roll.agents.text_tools import text_tool
    from roll.agents.tools import ToolError

    assert section.env_type is not None
    for index, tool in enumerate(section.tool_wrapper.tool_configs if section.tool_wrapper is not None else ()):
        try:
            text_tool(tool.tool_id, tool.tool_args)
        except ToolError as error:
            yield Problem(f"{key}.tool_wrapper.tool_configs[{index}]", None, str(error), has_value=False)
    config, options = model_config(model_path), section.env_config
    for option, value in (("render_mode", "rgb_array"), ("pictures", True)):
        if config is not None and "vision_config" not in config and options.get(option) == value:
            rule = f"shows pictures, and {model_path} is a model of text; a vision-language model sees them"
            yield Problem(f"{key}.env_config.{option}", value, rule)
    try:
        check_environment_options(section.env_type, options)
    except EnvironmentOptionError as error:
        text, begun = str(error), f"env_type {section.env_type!r}"
        if error.option is not None:
            rule = text.removeprefix(f"env_config.{error.option}: ")
            yield Problem(f"{key}.env_config.{error.option}", masked(options[error.option]), rule)
        elif text.startswith(f"{begun}: "):
            yield Problem(f"{key}.env_config", None, text.removeprefix(f"{begun}: "), has_value=False)
        else:
            yield Problem(f"{key}.env_type", section.env_type, text.removeprefix(begun).strip())


def chat_template(
    config: AgenticConfig, tokenizer: PreTrainedTokenizerBase, images: ChatImages | None = None
) -> ChatTemplate:
    """The template that the run names, with the variables of ``data_args.chat_template_kwargs``; ``images``: as the
    policy sees them."""
    data_args = config.actor_train.data_args
    name = config.global_template or data_args.template
    arguments: dict[str, Any] = dict(data_args.chat_template_kwargs)
    if name == "chatml":
        arguments = {"chat_template": CHATML} | arguments
    elif name is not None and name.endswith(TEMPLATE_ENDINGS):
        from roll.datasets.templates import template_text

        arguments = {"chat_template": template_text(name)} | arguments
    elif name in _THINKING:
        arguments = {"enable_thinking": _THINKING[name]} | arguments
    stops = config.actor_infer.generating_args.stop_token_ids or ()
    ends = [token for token in (tokenizer.eos_token_id, *stops) if token is not None]
    return ChatTemplate(tokenizer, ends, arguments=arguments, images=images)


def check_chat_template(loaded: LoadedConfig[AgenticConfig]) -> None:
    """Conversations of more than one turn can grow with the chat template. The tokenizer of a model that is not on this
    machine yet is checked when the run starts. Raises ``ConfigError``: they cannot."""
    assert isinstance(loaded.plan, AgenticPlan)
    role = loaded.plan.roles.get("actor_train") or loaded.plan.roles["actor_infer"]
    folder = model_folder(role.model_path) if role.model_path is not None else None
    if folder is None or not os.path.isfile(folder / "tokenizer_config.json"):
        return
    entries = [one for one in loaded.plan.entries.values() if one.turns > 1 and one.context in ("append", "last")]
    if not entries:
        return
    from roll.agents.template_files import TemplateFiles

    tokenizer: Any = TemplateFiles(folder)
    if tokenizer.has_own_code or not tokenizer.chat_template:  # a class of a tokenizer may bring a template
        from roll.pipelines.files import load_tokenizer

        tokenizer = load_tokenizer(role.model_path, role.section.model_args.trust_remote_code)
    for entry in entries:
        try:
            template = chat_template(loaded.config, tokenizer)
            check_template(template, entry.section.thinking, uses_tools(entry.agent))
        except TemplateError as error:
            key, value = f"custom_envs.{entry.tag}.thinking", entry.section.thinking
            raise ConfigError([loaded.problem(key, value, str(error))]) from error


def own_group_filter(path: str) -> OwnGroupFilter:
    """An object of the class at a dotted path; ValueError: there is no such class, or it has no method ``filter``."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        built = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{path!r} cannot be built: {error}") from error
    if not callable(getattr(built, "filter", None)):
        raise ValueError(f"{path!r} has no method filter(group_id, episode_id, group) -> bool")
    own: OwnGroupFilter = built
    return own
