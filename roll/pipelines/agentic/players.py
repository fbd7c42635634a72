"""From the entries of ``custom_envs`` to agents at work, and from tags and data sets to tasks."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.agents.agent_options import uses_tools
from roll.agents.chat_ids import check_template
from roll.agents.doors import make_agent, make_verifier
from roll.agents.environment_agent import EnvironmentAgent, EnvironmentOptions
from roll.agents.episode import Agent, Limits, Task
from roll.agents.text_tools import TextTools, WrapperOptions, text_tool
from roll.agents.tool_calls import detect_format
from roll.agents.verifiers import ScoredAgent
from roll.config.roles import DataArguments
from roll.datasets.reading import read_rows
from roll.datasets.types import DataError
from roll.environments.base import Environment
from roll.environments.off_loop import EnvironmentProcesses
from roll.environments.registry import is_instant, make_environment
from roll.pipelines.agentic.config import AgenticConfig, EnvManagerConfig, ToolWrapperConfig
from roll.pipelines.agentic.plan import AgenticPlan, EntryPlan, ManagerPlan
from roll.pipelines.agentic.templates import chat_template, policy_images
from roll.rollout.episodes import Player
from roll.rollout.flow import sampling_params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def build_players(
    config: AgenticConfig,
    plan: AgenticPlan,
    manager: ManagerPlan,
    tokenizer: PreTrainedTokenizerBase,
    processes: list[EnvironmentProcesses],
    agents: dict[str, Any],
    judge: Mapping[str, str] | None = None,
) -> dict[str, Player]:
    """One for every tag of ``manager``.

    Args:
        processes: takes those that environments live in.
        agents: of tags without an environment, and tools around environments, used again where they are there; takes
            the others.
        judge: where verifiers find the role ``reward``.

    Raises:
        TemplateError: the chat template is none that conversations can grow with.
        DataError: the policy's image processor is of an unknown kind.
    """
    params = sampling_params(manager.generating_args, plan.max_new_tokens)
    policy = plan.roles.get("actor_train") or plan.roles["actor_infer"]
    images = policy_images(config, policy.model_path, tokenizer)
    players = {}
    for tag in manager.groups_by_tag:
        entry = plan.entries[tag]
        template = chat_template(config, tokenizer, images)
        section = entry.section
        check_template(template, section.thinking, uses_tools(entry.agent))
        if entry.agent is None:
            name = f"tools around {tag}"
            if section.tool_wrapper is not None and name not in agents:
                agents[name] = text_tools(section.tool_wrapper)
            agent = environment_agent(entry, manager.section, processes, agents.get(name))
            if section.verifier:
                name = f"verifier of {tag}"
                if name not in agents:
                    agents[name] = make_verifier(section.verifier, judge, "verifier", of_environment=True)
                agent = ScoredAgent(agent, agents[name])
        else:
            agent = agents[tag] if tag in agents else own_agent(entry.agent, entry, judge)
            agents[tag] = agent
        most = manager.generating_args.max_new_tokens or entry.new_tokens
        limits = Limits(entry.turns, min(entry.new_tokens, most), plan.sequence_length, entry.seconds)
        least = min(params.min_new_tokens, limits.new_tokens)
        own = replace(params, max_new_tokens=limits.new_tokens, min_new_tokens=least)
        tool_format = section.tool_format or detect_format(template.source)
        players[tag] = Player(agent, template, limits, own, tool_format, section.thinking)
    return players


def own_agent(name: str, entry: EntryPlan, judge: Mapping[str, str] | None = None) -> Agent:
    """The agent of an entry without an environment.

    Raises:
        AgentOptionError: there is none, or an option is wrong.
    """
    section = entry.section
    system = section.agent_system_template or None
    return make_agent(name, entry.agent_config, system, section.agent_template, judge)


def text_tools(wrapper: ToolWrapperConfig) -> TextTools:
    """The tools of a section ``tool_wrapper``."""
    given = wrapper.wrapper_args
    tools = [text_tool(one.tool_id, one.tool_args) for one in wrapper.tool_configs]
    return TextTools(tools, WrapperOptions(given.tool_reward, given.tool_success_reward, given.max_tool_uses))


def environment_agent(
    entry: EntryPlan, manager: EnvManagerConfig, processes: list[EnvironmentProcesses], tools: TextTools | None = None
) -> Agent:
    """The agent that plays the environment of an entry.

    Args:
        processes: takes what has been made, to be closed at the end.
        tools: around the environment.
    """
    section = entry.section
    before, behind = section.pre_step_template or "", section.next_step_template or ""
    options = EnvironmentOptions(
        system=section.agent_system_template or None,
        template=section.agent_template or f"{before}{{observation}}{behind}",
        context=entry.context,
        history_length=section.history_length,
        max_steps=entry.turns,
        max_tokens=entry.new_tokens,
        reset_seconds=section.reset_timeout,
        step_seconds=section.step_timeout,
        retries=section.reset_retries,
        concurrent=entry.concurrent,
    )
    assert section.env_type is not None, "the checks ask for it"
    make: Callable[[], Environment] = partial(make_environment, section.env_type, dict(section.env_config))
    if manager.max_env_num_per_worker and not is_instant(section.env_type):
        make_there = partial(made_with, dict(manager.system_envs), make)
        processes.append(EnvironmentProcesses(make_there, manager.max_env_num_per_worker))
        make = processes[-1].make
    return EnvironmentAgent(entry.tag, make if tools is None else tools.maker(make), options)


def made_with(variables: Mapping[str, str], make: Callable[[], Environment]) -> Environment:
    """An environment in a process that has these environment variables from now on."""
    os.environ.update(variables)
    return make()


class TaskSource:
    """The tasks of a manager: task ``n`` is the same in every run of a seed, whenever it is asked for.

    Tags come in turn, as their numbers of groups say. The rows of a data set are drawn in a new order every time that
    they have all been used.

    Args:
        name: tells the tasks of training from those of validation.
        data: rows of data sets, by tag.
        in_order: tags whose rows are drawn as they stand in their files (``data_args.shuffle: false``).
    """

    def __init__(
        self,
        manager: ManagerPlan,
        name: str,
        data: Mapping[str, list[dict[str, Any]]],
        in_order: Container[str] = (),
    ) -> None:
        self._name = name
        self._in_order = in_order
        self._data = data
        self._shares = manager.groups_by_tag
        places = sorted(
            ((index + 0.5) / number, order, tag, index)
            for order, (tag, number) in enumerate(self._shares.items())
            for index in range(number)
        )
        self._pattern = [(tag, index) for _, _, tag, index in places]
        self.num_drawn = 0
        """Tasks drawn since the run began."""

    def draw(self, count: int) -> list[Task]:
        """The next ``count`` tasks."""
        tasks = [self.task(self.num_drawn + index) for index in range(count)]
        self.num_drawn += count
        return tasks

    def task(self, number: int) -> Task:
        """Task ``number``, counted from 0."""
        turn, place = divmod(number, len(self._pattern))
        tag, index = self._pattern[place]
        own = turn * self._shares[tag] + index
        rows = self._data.get(tag)
        if rows is None:
            return Task(tag, _number(f"{self._name}/{tag}/{own}"))
        epoch, position = divmod(own, len(rows))
        order = list(range(len(rows)))
        if tag not in self._in_order:
            random.Random(f"{self._name}/{tag}/order/{epoch}").shuffle(order)
        return Task(tag, _number(f"{self._name}/{tag}/{own}"), rows[order[position]])


def _number(name: str) -> int:
    """A seed that every generator takes: 31 bits."""
    return random.Random(name).getrandbits(31)


def read_data(plan: AgenticPlan) -> dict[str, list[dict[str, Any]]]:
    """The rows of the entries that have a data set, by tag.

    Raises:
        DataError: a file that is not there or holds no rows.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for tag, entry in plan.entries.items():
        arguments: DataArguments | None = entry.section.data_args
        if arguments is not None and arguments.file_name:
            found[tag] = [source.row for source in read_rows(arguments.file_name, arguments.dataset_dir)]
    return found


def fitting_rows(
    data: Mapping[str, list[dict[str, Any]]], players: Mapping[str, Player]
) -> dict[str, list[dict[str, Any]]]:
    """The rows that their agents take: verl's leaves out those with long prompts (``filter_overlong_prompts``).

    Raises:
        DataError: none is left.
    """
    kept = dict(data)
    for tag in kept.keys() & players.keys():
        player, rows = players[tag], kept[tag]
        fits = getattr(player.agent, "fits", None)
        if fits is None:
            continue
        kept[tag] = [row for row in rows if fits(row, player.template)]
        if not kept[tag]:
            raise DataError(f"custom_envs.{tag}: all {len(rows)} prompts are longer than agent_config.prompt_length")
        if len(kept[tag]) < len(rows):
            logger.info("%s: %d of %d rows left out: longer prompts", tag, len(rows) - len(kept[tag]), len(rows))
    return kept


def tags_in_order(plan: AgenticPlan) -> frozenset[str]:
    """Tags whose rows are not shuffled."""
    given = ((tag, entry.section.data_args) for tag, entry in plan.entries.items())
    return frozenset(tag for tag, arguments in given if arguments is not None and not arguments.shuffle)
