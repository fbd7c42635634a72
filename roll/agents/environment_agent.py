"""The agent that plays an environment: prompts from observations, actions from responses, rewards turn by turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.agents.agent_options import Context
from roll.agents.chat_ids import Message
from roll.agents.episode import Episode, EpisodeOver, Model, Response, Task
from roll.agents.images import content_text, has_images, is_image
from roll.agents.text_tools import ToolEnvironment
from roll.environments.base import AGGREGATIONS, Environment, Turn, read_reset, read_step, reset_arguments
from roll.environments.off_loop import call_off_loop, in_own_process


@dataclass(frozen=True)
class EnvironmentOptions:
    system: str | None = None  # system message
    # Text of a turn. With `context: append` and `last`: `{observation} {turn_idx} {suffix} {actions_left}
    # {max_response_length}`; with `observation`: `{env_instruction} {history} {step_count} {history_length}
    # {current_step} {current_observation}`.
    template: str = "{observation}"
    context: Context = "append"
    history_length: int = 5  # turns that `observation` and `last` remember
    max_steps: int = 10
    max_tokens: int = 128  # most tokens of a response; shown to the policy
    reset_seconds: float = 60.0
    step_seconds: float = 60.0
    retries: int = 1  # further attempts at a `reset` that failed, each in a new environment
    # Most calls of `reset`, `step` and `close` at a time, over all episodes; None: no limit.
    concurrent: int | None = None


@dataclass(eq=False)
class EnvironmentAgent:
    """Plays environments that ``make`` builds, one per episode.

    Plain methods run in threads, coroutines on the event loop; both within their deadlines. A thread cannot be ended:
    an environment that hangs keeps its thread and is not used again.
    """

    _name: str
    _make: Callable[[], Environment]
    _options: EnvironmentOptions
    _slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=dict)

    async def run(self, task: Task, model: Model, episode: Episode) -> None:
        environment, turn = await self._reset(task, episode)
        seen: list[Turn] = []
        try:
            await self._play(environment, turn, model, episode, seen)
        finally:
            note_metrics(episode, seen)
            await self._close(environment)

    async def _reset(self, task: Task, episode: Episode) -> tuple[Environment, Turn]:
        for attempt in range(self._options.retries + 1):
            environment = None
            try:
                with in_own_process() if attempt else contextlib.nullcontext():
                    environment = self._make()
                args, options = reset_arguments(environment, task.seed, task.row)
                answer = await self._timed(episode, self._options.reset_seconds, environment.reset, *args, **options)
                return environment, read_reset(self._name, answer)
            except BaseException as error:
                if environment is not None:
                    await self._close(environment)
                # Cancellation is no failed attempt.
                if not isinstance(error, Exception):
                    raise
                if attempt == self._options.retries:
                    raise self._fault(episode, "reset", error) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _play(
        self, environment: Environment, turn: Turn, model: Model, episode: Episode, seen: list[Turn]
    ) -> None:
        memory = _Memory(self._options, turn)
        within = self._options.context == "response"
        response: Response | None = None
        while True:
            if within and response is not None:
                if any(has_images(one["content"]) for one in turn.observation):
                    raise ValueError("context: response: an observation has an image; context: append shows it")
                response = await model.go_on(response.call, [content_text(one["content"]) for one in turn.observation])
            else:
                response = await model.chat(memory.prompt(turn))
            response.call.state = turn.state
            before = turn
            try:
                # Calls of tools are looked for outside of thoughts, also of those that the prompt opened.
                opened = {"opened": response.opened} if isinstance(environment, ToolEnvironment) else {}
                step = environment.step
                answer = await self._timed(episode, self._options.step_seconds, step, response.text, **opened)
                turn = read_step(self._name, answer)
            except Exception as error:
                raise self._fault(episode, "step", error) from error
            model.reward(turn.reward, response.call)
            memory.add(before, response.message, response.text)
            seen.append(turn)
            if turn.done:
                if within:
                    model.conversations.end(response.call)
                episode.outcome = "terminated" if turn.terminated else "truncated"
                return
            if memory.turns >= self._options.max_steps:
                raise EpisodeOver("turn_limit")

    def _fault(self, episode: Episode, method: str, error: Exception) -> EpisodeOver:
        limit = self._options.reset_seconds if method == "reset" else self._options.step_seconds
        what = f"took more than {limit:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return episode.fault(f"{self._name}.{method}: {what}")

    async def _timed(
        self, episode: Episode, limit: float, method: Callable[..., Any], *args: object, **options: object
    ) -> Any:
        begin = time.perf_counter()
        try:
            async with self._slot():
                return await asyncio.wait_for(call_off_loop(method, *args, **options), limit)
        finally:
            episode.seconds.environment += time.perf_counter() - begin

    def _slot(self) -> contextlib.AbstractAsyncContextManager[object]:
        """A slot for a call, of ``concurrent``; no deadline runs while waiting for it."""
        if self._options.concurrent is None:
            return contextlib.nullcontext()
        return self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._options.concurrent))

    async def _close(self, environment: Environment) -> None:
        if (close := getattr(environment, "close", None)) is not None:
            with contextlib.suppress(Exception):  # a failing close changes no episode
                async with self._slot():
                    await asyncio.wait_for(call_off_loop(close), self._options.step_seconds)


class _Memory:
    """Builds the prompt of the next turn from the turns so far."""

    def __init__(self, options: EnvironmentOptions, first: Turn) -> None:
        self._options = options
        self._messages: list[Message] = []
        if options.system:
            self._messages.append({"role": "system", "content": options.system})
        self._pairs: list[tuple[list[Message], Message]] = []
        self._history: list[tuple[str, str]] = []
        self._instruction = str(first.info.get("instruction", first.info.get("env_instruction", "")))
        self.turns = 0

    def prompt(self, turn: Turn) -> list[Message]:
        options = self._options
        if options.context == "observation":
            shown: Any = _text_of(turn.observation)
            if any(has_images(message["content"]) for message in turn.observation):
                contents = (message["content"] for message in turn.observation)
                parts = (list(one) if has_images(one) else [content_text(one)] for one in contents)
                shown = [part for one in parts for part in ("\n", *one)][1:]
            return [*self._messages, {"role": "user", "content": self._filled(turn, shown)}]
        if options.context == "own":
            return [*self._messages, *turn.observation]
        forgotten = max(0, self.turns - options.history_length) if options.context == "last" else 0
        before = [message for shown, answer in self._pairs[forgotten:] for message in (*shown, answer)]
        return [*self._messages, *before, *self._shown(turn)]

    def add(self, turn: Turn, message: Message, text: str) -> None:
        """Remember an observation and the response to it."""
        if self._options.context == "observation":
            self._history.append((_text_of(turn.observation), text))
        else:
            self._pairs.append((self._shown(turn), message))
        self.turns += 1

    def _shown(self, turn: Turn) -> list[Message]:
        """The observation's messages, the last user message of them in the template."""
        messages = [dict(message) for message in turn.observation]
        users = [
            message
            for message in messages
            if message["role"] == "user" and (isinstance(message["content"], str) or has_images(message["content"]))
        ]
        if users:
            users[-1]["content"] = self._filled(turn, users[-1]["content"])
        return messages

    def _filled(self, turn: Turn, observation: object) -> Any:
        """The template with an observation and the turns so far."""
        remembered = self._history[max(0, self.turns - self._options.history_length) :]
        first = self.turns - len(remembered) + 1
        history = "\n".join(
            f"Turn {first + number}: observation: {seen}\naction: {answer}"
            for number, (seen, answer) in enumerate(remembered)
        )
        return _filled_content(
            self._options.template,
            env_instruction=self._instruction,
            history=history,
            step_count=self.turns,
            history_length=len(remembered),
            current_step=self.turns + 1,
            turn_idx=self.turns + 1,
            current_observation=observation,
            observation=observation,
            suffix=turn.info.get("suffix", ""),
            max_response_length=self._options.max_tokens,
            actions_left=self._options.max_steps - self.turns,
        )


def note_metrics(episode: Episode, turns: Sequence[Turn]) -> None:
    """Record ``success``, and every metric over the turns that have it, aggregated as the newest ``metrics_agg_mode``
    says, else their mean. Success is that of the last turn that has it, in ``info`` or among its metrics; with mode
    ``mean`` it is a metric."""
    values: dict[str, list[float]] = {}
    modes: dict[str, str] = {}
    for turn in turns:
        for name, value in dict(turn.info.get("metrics") or {}).items():
            values.setdefault(name, []).append(float(value))
        modes |= turn.info.get("metrics_agg_mode") or {}
        if "success" in turn.info:
            episode.success = bool(turn.info["success"])
    if episode.success is None and "success" in values and modes.get("success", "last") != "mean":
        episode.success = bool(AGGREGATIONS[modes.get("success", "last")](values["success"]))
    if episode.success is not None:
        values.pop("success", None)
    episode.metrics |= {name: AGGREGATIONS[modes.get(name, "mean")](found) for name, found in values.items()}


def _text_of(observation: Sequence[Message]) -> str:
    return "\n".join(content_text(message["content"]) for message in observation)


def _filled_content(template: str, **values: Any) -> Any:
    """The filled template as a text, or as parts with the images of its values in their places."""
    # Values are converted to texts first: a template cannot reach attributes or indices of anything else.
    if not any(map(has_images, values.values())):
        return template.format_map({name: str(value) for name, value in values.items()})
    parts: list[Any] = []
    for literal, name, spec, conversion in string.Formatter().parse(template):
        parts.append(literal)
        if name is not None and has_images(values[name]):
            parts += values[name]
        elif name is not None:
            field = f"{{:{spec}}}" if conversion is None else f"{{!{conversion}:{spec}}}"
            parts.append(field.format(str(values[name])))
    content: list[Any] = []
    for are_images, group in itertools.groupby(parts, is_image):
        run = list(group)
        content += run if are_images else [{"type": "text", "text": content_text(run)}]
    return [part for part in content if is_image(part) or part["text"]]
