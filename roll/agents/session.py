"""The server side of an agent's program: its model calls, limits as refusals, and the reward that it posts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.agents.agent_options import Sampling, ToolChoice
from roll.agents.chat_ids import Message, TemplateError
from roll.agents.episode import EngineFault, EpisodeOver, Model, Task
from roll.agents.images import has_images
from roll.agents.wire_chat import ChatRequest, Reply, reply_of


@dataclass(frozen=True)
class Refusal(Exception):
    """An answer of the endpoint other than 200."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None


@dataclass(eq=False)
class Session:
    """An episode that the endpoint serves; created and used on the episode's event loop."""

    task: Task
    model: Model
    sampling: Sampling = "run"
    tool_choice: ToolChoice = "enforce"
    roles: tuple[str, ...] = ()
    """Model names, each a role that the policy plays; empty: the policy has one role, whatever the model's name."""
    key: str = ""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    reward: float | dict[str, float] | None = None
    """As posted: one number, or one by role."""
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """The agent has posted that it is done, has no turn left, or an engine has failed."""
    limit: EpisodeOver | None = None
    """The limit that the latest call ran into."""
    fault: EngineFault | None = None
    demanded: int = 0
    """Calls with an enforced tool call."""
    overridden: int = 0
    """Calls whose sampling parameters were replaced by the run's."""
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)
    closed: bool = False
    began: float | None = None
    """Time at which an agent began to work on it, by ``time.perf_counter``."""
    taker: str = ""
    """Public part of the key of the worker that has taken it; empty for agents from elsewhere."""
    lost: str = ""
    """Exit status and output of that worker, where it ended before the episode."""
    responses: dict[str, list[Message]] = field(default_factory=dict)
    """Response id to its conversation, for ``previous_response_id``."""

    def begin(self) -> None:
        """Record that an agent starts to work on it."""
        self.began = time.perf_counter()

    async def answer(self, request: ChatRequest) -> Reply:
        """Make one model call.

        Raises:
            Refusal: the episode is over, a limit of it, messages that the chat template does not take, or sampling
                parameters that may not be set.
        """
        if self.closed:
            raise episode_over()
        if self.roles and request.model not in self.roles:
            message = f"model: {request.model!r} is no role of this agent; there are {', '.join(self.roles)}"
            raise Refusal(404, message, "not_found_error", "model_not_found")
        if request.sampling and self.sampling == "refuse":
            raise Refusal(400, f"{request.sampling[0]}: the run's sampling parameters hold here; leave it out")
        self.overridden += bool(request.sampling)
        task = asyncio.current_task()
        assert task is not None
        self.in_flight.add(task)
        try:
            return await self._answered(request)
        finally:
            self.in_flight.discard(task)

    async def _answered(self, request: ChatRequest) -> Reply:
        if self.model.conversations.is_blind and any(has_images(one.get("content")) for one in request.messages):
            raise Refusal(400, "messages: the policy is a model of text, and sees no images")
        options: dict[str, Any] = {"stop": request.stops} if request.stops else {}
        if request.must_call and self.tool_choice == "enforce":
            options["must_call"] = request.must_call
            self.demanded += 1
        if request.max_tokens is not None:
            options["max_new_tokens"] = request.max_tokens
        try:
            model = self.model.as_(request.model) if self.roles else self.model
            response = await model.chat(request.messages, tools=request.tools, **options)
        except EpisodeOver as over:
            self.limit = over
            if over.outcome != "context_limit":  # an agent may answer that one with a shorter conversation
                self.done.set()
            raise _limit_reached(over) from None
        except TemplateError as error:
            raise Refusal(400, f"messages: {error}") from error
        except EngineFault as fault:
            self.fault = fault
            self.done.set()
            raise Refusal(503, "the engines have failed", "server_error") from fault
        self.limit = None
        prompt_tokens = len(self.model.conversations.prompt_ids(response.call))
        reply = reply_of(request, response, prompt_tokens)
        self.model.conversations.known_as(response.call, reply.message)
        return reply

    def close(self) -> None:
        """Drop the calls in flight; further ones are refused."""
        self.closed = True
        for task in self.in_flight:
            task.cancel()

    async def post(self, body: Mapping[str, Any]) -> None:
        """Take the body of ``POST /reward``."""
        self.reward, self.success = self._posted_reward(body), body.get("success")
        self.metrics = {str(name): float(value) for name, value in body.get("metrics", {}).items()}
        if body.get("done", True):
            self.closed = True
            self.done.set()

    def _posted_reward(self, body: Mapping[str, Any]) -> float | dict[str, float]:
        rewards = body.get("reward")
        if not isinstance(rewards, Mapping):
            return _number(body, "reward")
        there = f"there are {', '.join(self.roles)}" if self.roles else "the agent has none (agent_config.roles)"
        for role in rewards:
            if role not in self.roles:
                raise Refusal(400, f"reward: {role!r} is no role of this agent; {there}")
        return {str(role): _number(rewards, role) for role in rewards}

    def earn(self, value: float | Mapping[str, float]) -> None:
        """Give each role its reward; a single number goes to all of them."""
        for role in self.roles:
            self.model.as_(role).reward(value.get(role, 0.0) if isinstance(value, Mapping) else value)


def episode_over() -> Refusal:
    return Refusal(410, "the episode of this key has ended", "permission_error", "episode_over")


def _limit_reached(over: EpisodeOver) -> Refusal:
    if over.outcome == "context_limit":
        return Refusal(400, "prompt is too long: it leaves no room for a response", code="context_length_exceeded")
    return Refusal(403, f"the episode is over: {over.outcome}", "permission_error", str(over.outcome))


def _number(body: Mapping[str, Any], name: str) -> float:
    value = body.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise Refusal(400, f"{name}: is needed, a finite number")
    return float(value)
