"""verl's tool agent: tools and interactions that verl's configuration files name, in the loop of its ``tool_agent``.

The classes are verl's own or written for it, and are built by verl's registries (which needs the package ``verl``).
Everything else is roll's: a conversation grows as the chat template renders it, and what was sampled is trained.

The loop (``verl/experimental/agent_loop/tool_agent_loop.py``): after each response the episode ends where the
response budget is used up or the turns are; else its tool calls are made, the first ``max_parallel_calls`` of them;
without a call an interaction, if there is one, gives the next user message; without either the episode ends. The
reward is a function of all tokens after the prompt; scores of tools and interactions reach only that function, in
``extra_info``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll.agents.agent_options import AgentOptionError, VerlOptions
from roll.agents.call_formats import ToolCall
from roll.agents.chat_ids import ChatTemplate, Message
from roll.agents.conversation import Conversations
from roll.agents.episode import Episode, EpisodeOver, Model, Response, Task
from roll.agents.verifiers import Verifier
from roll.datasets.images import IMAGE_MARK, ImageReader
from roll.datasets.reading import SourceRow

# verl's loops, as the column `agent_name` of a row and `default_agent_loop` name them.
SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"

# Modules of verl's registries (which one exists depends on the version), and the function that builds from a file.
REGISTRIES = {
    "tool_config_path": (
        ("verl.tools.utils.tool_registry", "verl.tools.tool_registry"),
        "initialize_tools_from_config",
    ),
    "interaction_config_path": (
        ("verl.interactions.utils.interaction_registry",),
        "initialize_interactions_from_config",
    ),
}


@dataclass
class AgentData:
    """verl's ``agent_data``, an argument of a tool's ``execute``."""

    messages: list[Message]
    tools_kwargs: Mapping[str, Any]
    request_id: str
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    user_turns: int = 0
    assistant_turns: int = 0


class VerlAgent:
    """Plays verl's ``tool_agent`` and ``single_turn_agent``, whichever a row names.

    Args:
        tools: objects with ``name``, ``tool_schema`` (a pydantic model) and the coroutines ``create``, ``execute`` and
            ``release``; None: those of ``options.tool_config_path``, built at the first episode.
        interactions: by name, objects with the coroutines ``start_interaction`` and ``generate_response``, which are
            all that verl's loop calls; None: those of ``options.interaction_config_path``.
    """

    def __init__(
        self,
        options: VerlOptions,
        verifier: Verifier,
        tools: Sequence[Any] | None = None,
        interactions: Mapping[str, Any] | None = None,
    ) -> None:
        self._options, self._verifier = options, verifier
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._interactions = interactions

    def check_host(self) -> None:
        """Build tools and interactions. Raises ``AgentOptionError``: verl is missing, or its registries refuse the
        file."""
        options = self._options
        if self._tools is None:
            found = _built("tool_config_path", options.tool_config_path) or ()
            self._tools = {tool.name: tool for tool in found}
        if self._interactions is None:
            self._interactions = _built("interaction_config_path", options.interaction_config_path) or {}

    def fits(self, row: Mapping[str, Any], template: ChatTemplate) -> bool:
        """Return false for a row that ``filter_overlong_prompts`` leaves out."""
        options = self._options
        if not options.filter_overlong_prompts or options.prompt_length is None:
            return True
        self.check_host()
        schemas = [schema_of(tool) for tool in self._offered(row).values()]
        return Conversations(template).count_tokens(self._first_messages(row), schemas) <= options.prompt_length

    async def run(self, task: Task, model: Model, episode: Episode) -> float:
        """Play an episode; returns the verifier's score. Raises ``EpisodeOver``: a limit, after the episode has been
        scored; or the verifier has failed."""
        self.check_host()
        row = task.row
        loop = row.get("agent_name") or self._options.default_agent_loop
        if loop not in (SINGLE_TURN, TOOL_AGENT):
            raise ValueError(f"agent_name: {loop}: {TOOL_AGENT} and {SINGLE_TURN} are played here")
        data = AgentData(self._first_messages(row), _entry(row, "tools_kwargs"), uuid.uuid4().hex)
        for name in ("tool_calls", "failed_tool_calls"):
            episode.count(name, 0)
        ended: EpisodeOver | None = None
        try:
            await self._play(data, self._offered(row), row, model, episode, once=loop == SINGLE_TURN)
        except EpisodeOver as over:
            if not episode.calls:
                raise
            ended = over
        extra = {
            **(task.row.get("extra_info") or {}),
            "num_turns": data.user_turns + data.assistant_turns + 1,
            "turn_scores": data.turn_scores,
            "tool_rewards": data.tool_rewards,
            **data.extra_fields,
        }
        score = await self._verifier(replace(task, row={**task.row, "extra_info": extra}), model, episode)
        episode.success = score > 0
        if ended is not None:
            model.reward(score)
            raise ended
        return score

    async def _play(
        self,
        data: AgentData,
        tools: Mapping[str, Any],
        row: Mapping[str, Any],
        model: Model,
        episode: Episode,
        once: bool,
    ) -> None:
        options = self._options
        budget, schemas = options.response_length, [schema_of(tool) for tool in tools.values()]
        interaction: Any = None
        kwargs: Mapping[str, Any] = {}
        if self._interactions and not once:
            kwargs = _entry(row, "interaction_kwargs")
            if kwargs.get("name") not in self._interactions:
                known = ", ".join(self._interactions)
                raise ValueError(f"extra_info.interaction_kwargs.name: {kwargs.get('name')!r}: there are {known}")
            interaction = self._interactions[kwargs["name"]]
            await interaction.start_interaction(data.request_id, **kwargs)
        while True:
            response = await model.chat(data.messages, tools=schemas, most_behind_prompt=budget)
            data.messages.append(response.message)
            data.assistant_turns += 1
            if once or len(model.conversations.ids_behind_prompt(response.call)) >= budget:
                return
            # 0 and None: no limit of turns.
            if options.max_assistant_turns and data.assistant_turns >= options.max_assistant_turns:
                return
            if options.max_user_turns and data.user_turns >= options.max_user_turns:
                return
            begin = time.perf_counter()
            try:
                if response.parsed.calls:
                    data.messages += await self._results(response, data, tools, episode)
                    data.user_turns += 1
                    continue
                if interaction is None:
                    return
                over, content, score, _ = await interaction.generate_response(data.request_id, data.messages, **kwargs)
                data.user_turns += 1
                data.messages.append({"role": "user", "content": content})
                if score is not None:
                    data.turn_scores.append(float(score))
                if over:
                    return
            finally:
                episode.seconds.environment += time.perf_counter() - begin

    async def _results(
        self, response: Response, data: AgentData, tools: Mapping[str, Any], episode: Episode
    ) -> list[Message]:
        """Messages with the results of the first calls; further calls are left unanswered, as in verl."""
        calls = response.parsed.calls[: self._options.max_parallel_calls]
        results = await asyncio.gather(*(self._call(call, data, tools) for call in calls))
        episode.count("tool_calls", len(calls))
        episode.count("failed_tool_calls", sum(failed for _, _, failed in results))
        data.tool_rewards += [float(reward) for _, reward, _ in results if reward is not None]
        answered = zip(calls, response.message["tool_calls"], results, strict=False)
        return [
            {"role": "tool", "tool_call_id": written["id"], "name": call.name, "content": content}
            for call, written, (content, _, _) in answered
        ]

    async def _call(self, call: ToolCall, data: AgentData, tools: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        """Content of the result, the tool's own score, and whether the call has failed."""
        tool = instance = None
        options = self._options
        try:
            tool = tools[call.name]
            kwargs = data.tools_kwargs.get(call.name) or {}
            created = await tool.create(create_kwargs=kwargs.get("create_kwargs") or {})
            # verl's later tools return the instance's id with a first response, earlier ones the id alone.
            instance = created[0] if isinstance(created, tuple) else created
            answer, reward, _ = await tool.execute(instance, call.arguments, agent_data=data)
        except Exception as error:
            return f"Error when executing tool: {error}", 0.0, True
        finally:
            if tool is not None and instance:
                await tool.release(instance)
        content: Any = answer if isinstance(answer, str) else getattr(answer, "text", None) or ""
        most, mark, side = options.max_tool_response_length, "(truncated)", options.tool_response_truncate_side
        if len(content) > most:  # the side is the one that is kept, as in verl
            half = most // 2
            content = {
                "left": f"{content[:most]}...{mark}",
                "right": f"{mark}...{content[-most:]}",
                "middle": f"{content[:half]}...{mark}...{content[-half:]}",
            }[side]
        images = getattr(answer, "image", None)
        if images is not None:
            every = images if isinstance(images, list | tuple) else [images]
            parts: list[Message] = [{"type": "image", "image": image} for image in every if image is not None]
            content = [*parts, *([{"type": "text", "text": content}] if content else [])]
        return content, reward, False

    def _offered(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The tools of a row: those of ``extra_info.tool_selection``, else all."""
        tools = self._tools or {}
        chosen = (row.get("extra_info") or {}).get("tool_selection")
        return {name: tools[name] for name in chosen if name in tools} if chosen else tools

    def _first_messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The conversation of the row, with its images in place of each ``<image>``, in order; ``ValueError`` where it
        has no conversation, or other images than places."""
        options = self._options
        messages, column = row.get(options.prompt_key), options.image_key
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(f"column {options.prompt_key}: must hold a conversation, a list of messages")
        if row.get(column) is None or len(row[column]) == 0:
            return [dict(message) for message in messages]
        number = 0
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # the column may hold anything
            number = int(row.get("index", 0))
        reader, source = ImageReader(None, column), SourceRow(Path("custom_envs"), number, dict(row))
        images = [reader.encoded(source, value, place) for place, value in enumerate(row[column])]
        marks = sum(str(message["content"]).count(IMAGE_MARK) for message in messages)
        if marks != len(images):
            found = f"has {len(images)} images, and the conversation {marks} times {IMAGE_MARK}"
            raise ValueError(f"column {column}: {found}")
        left, shown = iter(images), []
        for message in messages:
            content: Any = message["content"]
            if IMAGE_MARK in str(content):
                pieces = re.split(f"({re.escape(IMAGE_MARK)})", str(content))
                content = [
                    {"type": "image", "image": next(left)} if piece == IMAGE_MARK else {"type": "text", "text": piece}
                    for piece in pieces
                    if piece
                ]
            shown.append({**message, "content": content})
        return shown

    async def close(self) -> None:
        self._verifier.close()


def schema_of(tool: Any) -> Message:
    """A tool's schema as verl gives it to the chat template."""
    schema: Message = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    return schema


def _entry(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping in ``extra_info``; entries of other rows' tools, which Parquet fills with nulls, are left out."""
    found = (row.get("extra_info") or {}).get(name) or {}
    return {key: value for key, value in found.items() if value is not None}


def _built(key: str, path: str | None) -> Any:
    """Objects that verl's registry builds from a file, AgentOptionError where it cannot; None without a file."""
    if path is None:
        return None
    names, function = REGISTRIES[key]
    registries = []
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):  # a parent package is missing
            registries += [name] * (importlib.util.find_spec(name) is not None)
    if not registries:
        rule = f"its classes are built by verl, and {names[0]} is not here: pip install verl (0.7 has both registries)"
        raise AgentOptionError(f"agent_config.{key}: {rule}")
    try:
        return getattr(importlib.import_module(registries[0]), function)(path)
    except Exception as error:
        raise AgentOptionError(f"agent_config.{key}: {path}: {type(error).__name__}: {error}") from error
