"""The server side of an agent's program: its model calls, limits as refusals, and the reward that it posts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.agents.agent_options import Sampling, ToolChoice
from roll.agents.chat_ids import Message, TemplateError
from roll.agents.episode import EngineFault, EpisodeOver, Model, Response, Task
from roll.agents.images import has_images
from roll.rewards.base import finite_number
from roll.serving.dialects.parts import ChatRequest, Reply
from roll.serving.http import BadRequest, Refusal
from roll.strategies.engines.requests import visible_text


@dataclass(eq=False)
class Session:
    """An episode that the endpoint serves; created and used on the episode's event loop."""

    task: Task
    model: Model
    sampling: Sampling = "run"
    tool_choice: ToolChoice = "enforce"
    roles: tuple[str, ...] = ()
    """Model names, each a role that the policy plays; empty: the policy has a single role under any name."""
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
    """Key of the worker that has taken it; empty for agents from elsewhere."""
    lost: str = ""
    """Reason why there is no reward: as the agent says, or the end of that worker before the episode's."""
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
        if request.set_sampling and self.sampling == "refuse":
            raise Refusal(400, f"{request.set_sampling[0]}: the run's sampling parameters hold here; leave it out")
        self.overridden += bool(request.set_sampling)
        task = asyncio.current_task()
        assert task is not None
        if self.model.conversations.is_blind and any(has_images(one.get("content")) for one in request.messages):
            raise Refusal(400, "messages: the policy is a model of text, and sees no images")
        options: dict[str, Any] = {"max_new_tokens": request.params.max_new_tokens}
        if request.params.stop_strings:
            options["stop"] = request.params.stop_strings
        if request.must_call and self.tool_choice == "enforce":
            options["must_call"] = request.must_call
            self.demanded += 1
        self.in_flight.add(task)
        try:
            model = self.model.as_(request.model) if self.roles else self.model
            response = await model.chat(request.messages, tools=request.tools, **options)
        except EpisodeOver as over:
            self.limit = over
            if over.outcome != "context_limit":  # an agent may answer that one with a shorter conversation
                self.done.set()
                raise Refusal(
                    403, f"the episode is over: {over.outcome}", "permission_error", str(over.outcome)
                ) from None
            message = "prompt is too long: it leaves no room for a response"
            raise Refusal(400, message, code="context_length_exceeded") from None
        except TemplateError as error:
            raise BadRequest(f"messages: {error}") from error
        except EngineFault as fault:
            self.fault = fault
            self.done.set()
            raise Refusal(503, "the engines have failed", "server_error") from fault
        finally:
            self.in_flight.discard(task)
        # The agent got past the limit by a shorter conversation, so that the episode has not ended by it.
        self.limit = None
        reply = self._reply(request, response)
        # Clients send the message back as they got it: thinking apart, cut at stop strings.
        self.model.conversations.known_as(response.call, reply.message)
        return reply

    def _reply(self, request: ChatRequest, response: Response) -> Reply:
        """The client's view of ``response``: thinking separated, stop strings cut off."""
        parsed = response.parsed
        calls = list(response.message.get("tool_calls", ())) if request.parse_calls else []
        content = parsed.content if request.parse_calls or not parsed.calls else response.text
        shown = visible_text(content, request.params)
        return Reply(
            content=shown,
            reasoning=parsed.reasoning,
            calls=calls,
            finish_reason="tool_calls" if calls else response.finish_reason,
            stop_string=shown != content,
            prompt_tokens=len(self.model.conversations.prompt_ids(response.call)),
            completion_tokens=len(response.call.response_ids),
            model=request.model,
        )

    def close(self) -> None:
        """Drop the calls in flight; further ones are refused."""
        self.closed = True
        for task in self.in_flight:
            task.cancel()

    async def count_tokens(self, request: ChatRequest) -> int:
        """The number of tokens of the conversation as a prompt.

        Raises:
            Refusal: the chat template does not take it.
        """
        try:
            return self.model.conversations.count_tokens(request.messages, request.tools)
        except TemplateError as error:
            raise BadRequest(f"messages: {error}") from error

    async def post(self, body: object) -> None:
        """Take the body of ``POST /reward``.

        Raises:
            BadRequest: a field that is missing, unknown or of a wrong type, or a role that there is not.
        """
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object with reward")
        if body.keys() == {"error"}:
            self.lost, self.closed = str(body["error"]), True
            self.done.set()
            return
        unknown = body.keys() - {"reward", "success", "metrics", "done"}
        if unknown:
            raise BadRequest(f"{min(unknown)}: unknown field; there are reward, success, metrics, done")
        metrics, rewards = body.get("metrics", {}), body.get("reward")
        if not isinstance(metrics, Mapping) or not all(
            isinstance(one, int | float) and finite_number(one) is not None for one in metrics.values()
        ):
            raise BadRequest("metrics: must map names to finite numbers", "metrics")
        if not isinstance(body.get("success"), bool | None):
            raise BadRequest("success: must be true or false", "success")
        by_role: Mapping[str, Any] = rewards if isinstance(rewards, Mapping) else {"reward": rewards}
        for role, value in by_role.items():
            if by_role is rewards and role not in self.roles:
                there = (
                    f"there are {', '.join(self.roles)}" if self.roles else "the agent has none (agent_config.roles)"
                )
                raise BadRequest(f"reward: {role!r} is no role of this agent; {there}", "reward")
            # JSON true is a bool, which Python counts among the integers.
            if not isinstance(value, int | float) or isinstance(value, bool) or finite_number(value) is None:
                raise BadRequest(f"{role}: is needed, a finite number", "reward")
        numbers = {str(role): float(value) for role, value in by_role.items()}
        self.reward = numbers if by_role is rewards else numbers["reward"]
        self.success = body.get("success")
        self.metrics = {str(name): float(value) for name, value in metrics.items()}
        if body.get("done", True):
            self.closed = True
            self.done.set()

    def earn(self, value: float | Mapping[str, float]) -> None:
        """Give each role its reward; a single number goes to all of them."""
        for role in self.roles:
            self.model.as_(role).reward(value.get(role, 0.0) if isinstance(value, Mapping) else value)


def episode_over() -> Refusal:
    return Refusal(410, "the episode of this key has ended", "permission_error", "episode_over")
