"""Builds the agents of the entries of ``custom_envs``, and draws their tasks from seeds and data sets."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from roll.agents.agent_options import uses_tools
from roll.agents.chat_ids import check_template
from roll.agents.environment_agent import EnvironmentAgent, EnvironmentOptions
from roll.agents.episode import Agent, Limits, Task
from roll.agents.images import ChatImages
from roll.agents.programs import is_taskset, number_of_tasks
from roll.agents.registry import make_agent, make_verifier
from roll.agents.text_tools import TextTools, text_tool
from roll.agents.tool_calls import detect_format
from roll.agents.verifiers import ScoredAgent
from roll.datasets.images import ImageReader
from roll.datasets.reading import read_rows
from roll.datasets.types import DataError
from roll.datasets.vision_model import VisionModel
from roll.distributed import DriverLoop
from roll.environments.base import Environment, is_instant, make_environment, resolved
from roll.environments.off_loop import EnvironmentProcesses
from roll.pipelines.agentic.config import AgenticConfig, AgenticPlan, EntryPlan, EnvManagerConfig, ManagerPlan
from roll.pipelines.agentic.definition import chat_template
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
    """Build a player for every tag of ``manager``.

    Args:
        processes: collects the processes of environments, to be closed at the end.
        agents: agents of tags without an environment, tools around environments and their verifiers, which are reused
            if they exist; collects new ones, for :func:`close_agents`.
        judge: address and key of the role ``reward``, for verifiers.

    Raises:
        TemplateError: conversations cannot grow with the chat template.
        DataError: the policy's image processor is of an unknown kind.
    """
    params = sampling_params(manager.generating_args, plan.max_new_tokens)
    policy = plan.roles.get("actor_train") or plan.roles["actor_infer"]
    assert policy.model_path is not None, "the policy has a model"
    remote = config.actor_train.model_args.trust_remote_code
    # With the pixel limits of the policy's data section; None: it is a model of text.
    reader = ImageReader.of(config.actor_train.data_args, VisionModel.load(policy.model_path, tokenizer, remote))
    images = None if reader.model is None else ChatImages(reader.model)
    players = {}
    for tag in manager.groups_by_tag:
        entry = plan.entries[tag]
        template = chat_template(config, tokenizer, images)
        section = entry.section
        check_template(template, section.thinking, uses_tools(entry.agent))
        if uses_tools(entry.agent) and not section.agent_system_template and not template.shows_tools():
            logger.warning(
                "custom_envs.%s: the chat template shows no tools, so the policy sees them only where the rows "
                "describe them; describe them and the form of a call in agent_system_template, or name a template "
                "that shows them in actor_train.data_args.template",
                tag,
            )
        if entry.agent is None:
            name, verifier = f"tools around {tag}", f"verifier of {tag}"
            if (wrapper := section.tool_wrapper) is not None and name not in agents:
                tools = [text_tool(one.tool_id, one.tool_args) for one in wrapper.tool_configs]
                agents[name] = TextTools(tools, wrapper.wrapper_args)
            if section.verifier and verifier not in agents:
                agents[verifier] = make_verifier(section.verifier, judge, "verifier", of_environment=True)
            agent = environment_agent(entry, manager.section, processes, agents.get(name))
            agent = ScoredAgent(agent, agents[verifier]) if section.verifier else agent
        else:
            if tag not in agents:
                system = section.agent_system_template or None
                agents[tag] = make_agent(entry.agent, entry.agent_config, system, section.agent_template, judge)
            agent = agents[tag]
        most = manager.generating_args.max_new_tokens or entry.new_tokens
        limits = Limits(entry.turns, min(entry.new_tokens, most), plan.sequence_length, entry.seconds)
        # The limit of an entry may be below the minimum of the manager.
        least = min(params.min_new_tokens, limits.new_tokens)
        own = replace(params, max_new_tokens=limits.new_tokens, min_new_tokens=least)
        tool_format = section.tool_format or detect_format(template.source)
        players[tag] = Player(agent, template, limits, own, tool_format, section.thinking)
    return players


def close_players(driver: DriverLoop, processes: Iterable[EnvironmentProcesses], agents: Iterable[Any]) -> None:
    """End agents, tasks, the loop and the processes of environments; a second call does nothing."""
    if driver.is_closed:
        return
    with ExitStack() as stack:  # all of it, also where an agent of the user's raises
        for one in processes:
            stack.callback(one.close)
        stack.callback(driver.close)
        driver.run(close_agents(agents))


async def close_agents(agents: Iterable[Any]) -> None:
    """End what agents have started: servers of tools, sandboxes, their endpoint. If one raises, the others are closed
    all the same."""
    async with AsyncExitStack() as stack:
        for agent in agents:
            if (close := getattr(agent, "close", None)) is not None:
                # Called when its turn comes: it may be a coroutine function or not.
                stack.push_async_callback(lambda close: resolved(close()), close)


def environment_agent(
    entry: EntryPlan, manager: EnvManagerConfig, processes: list[EnvironmentProcesses], tools: TextTools | None = None
) -> Agent:
    """The agent that plays the environment of an entry, with ``tools`` around it; adds the environment's processes,
    which are to be closed at the end."""
    section = entry.section
    before, after = section.pre_step_template or "", section.next_step_template or ""
    options = EnvironmentOptions(
        system=section.agent_system_template or None,
        template=section.agent_template or f"{before}{{observation}}{after}",
        context=entry.context,
        history_length=section.history_length,
        max_steps=entry.turns,
        max_tokens=entry.new_tokens,
        reset_seconds=section.reset_timeout,
        step_seconds=section.step_timeout,
        concurrent=entry.concurrent,
    )
    assert section.env_type is not None, "the checks ask for it"
    make: Callable[[], Environment] = partial(make_environment, section.env_type, dict(section.env_config))
    if manager.max_env_num_per_worker and not is_instant(section.env_type):
        make_in_process = partial(make_with_variables, dict(manager.system_envs), make)
        processes.append(EnvironmentProcesses(make_in_process, manager.max_env_num_per_worker))
        make = processes[-1].make
    return EnvironmentAgent(entry.tag, make if tools is None else partial(tools.around, make), options)


def make_with_variables(variables: Mapping[str, str], make: Callable[[], Environment]) -> Environment:
    os.environ.update(variables)
    return make()


class TaskSource:
    """The tasks of a manager: task ``n`` is the same in every run of a seed, whenever it is drawn.

    Tags take turns in proportion to their numbers of groups. The rows of a data set are shuffled in every epoch.

    Args:
        name: prefix of the tasks' seeds, different for training and validation.
        data: rows of data sets, by tag.
        in_order: tags whose rows are not shuffled (``data_args.shuffle: false``).
    """

    def __init__(
        self, manager: ManagerPlan, name: str, data: Mapping[str, list[dict[str, Any]]], in_order: Container[str] = ()
    ) -> None:
        self._name, self._data, self._in_order, self._shares = name, data, in_order, manager.groups_by_tag
        # Each group at the middle of its share of the cycle, which interleaves tags evenly whatever their numbers.
        places = sorted(
            ((index + 0.5) / number, order, tag, index)
            for order, (tag, number) in enumerate(self._shares.items())
            for index in range(number)
        )
        self._pattern = [(tag, index) for _, _, tag, index in places]
        self.num_drawn = 0  # tasks drawn since the run began

    def draw(self, count: int) -> list[Task]:
        tasks = [self.task(self.num_drawn + index) for index in range(count)]
        self.num_drawn += count
        return tasks

    def task(self, number: int) -> Task:
        """Task ``number``, counted from 0."""
        turn, place = divmod(number, len(self._pattern))
        tag, index = self._pattern[place]
        # Counted within the tag: its tasks do not depend on which other tags there are.
        own = turn * self._shares[tag] + index
        seed = random.Random(f"{self._name}/{tag}/{own}").getrandbits(31)  # every generator takes 31 bits
        rows = self._data.get(tag)
        if rows is None:
            return Task(tag, seed)
        epoch, position = divmod(own, len(rows))
        if tag not in self._in_order:
            position = _shuffled(f"{self._name}/{tag}/order/{epoch}", len(rows))[position]
        return Task(tag, seed, rows[position])


@lru_cache(maxsize=16)
def _shuffled(name: str, count: int) -> list[int]:
    order = list(range(count))
    random.Random(name).shuffle(order)
    return order


def read_tasks(
    plan: AgenticPlan, players: Mapping[str, Player]
) -> tuple[dict[str, list[dict[str, Any]]], frozenset[str]]:
    """The rows of the entries that have a data set, by tag, and the tags whose rows are not shuffled.

    Rows of a taskset are the numbers of its tasks. An agent may leave rows out: verl's does so with long prompts
    (``filter_overlong_prompts``). DataError: no row is there, or none is left.
    """
    data: dict[str, list[dict[str, Any]]] = {}
    in_order = set()
    for tag, entry in plan.entries.items():
        arguments = entry.section.data_args
        if arguments is not None and not arguments.shuffle:
            in_order.add(tag)
        if is_taskset(entry.section.env_type):
            data[tag] = [{"index": index} for index in range(number_of_tasks(entry.agent_config))]
        elif arguments is not None and arguments.file_name:
            data[tag] = [source.row for source in read_rows(arguments.file_name)]
    for tag in data.keys() & players.keys():
        player, rows = players[tag], data[tag]
        if (fits := getattr(player.agent, "fits", None)) is None:
            continue
        data[tag] = [row for row in rows if fits(row, player.template)]
        if not data[tag]:
            raise DataError(f"custom_envs.{tag}: all {len(rows)} prompts are longer than agent_config.prompt_length")
        if len(data[tag]) < len(rows):
            logger.info("%s: %d of %d rows left out: longer prompts", tag, len(rows) - len(data[tag]), len(rows))
    return data, frozenset(in_order)
