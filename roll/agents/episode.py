"""An episode: a task, an agent that works on it through a model, and what both leave for training."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol

from roll.agents.chat_ids import ChatTemplate, Message, Thinking
from roll.agents.conversation import Call, Conversations
from roll.agents.images import BlindPolicyError
from roll.agents.tool_calls import ParsedResponse, call_opening, choose_opening, parse_response

if TYPE_CHECKING:
    from roll.protocol.vision import VisionInputs
    from roll.rollout.groups import FinishedGroup

# End of an episode: by the task's own rules, at the environment's limit, at one of the episode's limits, or by a fault
# of the environment or of the agent's code.
Outcome = Literal[
    "terminated", "truncated", "turn_limit", "context_limit", "time_limit", "environment_error", "agent_error"
]


@dataclass(frozen=True)
class Task:
    tag: str  # name of the configured environment or agent
    seed: int  # equal for all members of a group
    row: Mapping[str, Any] = field(default_factory=dict)  # row of a data set; empty for environments that need none

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"tag": self.tag, "seed": self.seed, "row": json.dumps(dict(self.row), default=str)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Task:
        """The inverse of :meth:`state_dict`."""
        return cls(state["tag"], int(state["seed"]), json.loads(state["row"]))

    @property
    def body(self) -> dict[str, Any]:
        """The task as programs get it, in JSON."""
        return {"tag": self.tag, "seed": self.seed, **self.row}


@dataclass(frozen=True)
class Limits:
    turns: int = 10  # model calls
    new_tokens: int = 128  # tokens of a response
    context: int = 2048  # tokens of a call's prompt and response together
    seconds: float | None = None  # duration of the whole episode; None: unlimited


# An engine, as `Model` calls it: the response to a prompt, as the group of one sample, from `prompt_ids`,
# `max_new_tokens`, `options` (sampling parameters of the agent's request, such as `temperature`), and `vision` where
# the prompt has images.
Sampler = Callable[..., Awaitable["FinishedGroup"]]


class EpisodeOver(BaseException):
    """A limit of the episode is reached; raised out of a model call.

    Not an ``Exception``, like cancellation: it also ends agents that catch the errors of their tools.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome: Outcome = outcome


class EngineFault(BaseException):
    """An engine failed, which ends the run and not just the episode; ``__cause__`` is the engine's error."""


@dataclass(frozen=True)
class Response:
    """A model call's result, as an agent sees it."""

    message: Message  # put it into the conversation unchanged
    parsed: ParsedResponse
    text: str  # the text as sampled, without the token that ended the turn
    finish_reason: str
    call: Call
    opened: str = ""  # the mark with which the prompt opened a thought; empty: it opened none


@dataclass
class Seconds:
    """Seconds of an episode by what they were spent on."""

    model: float = 0.0
    environment: float = 0.0
    total: float = 0.0


@dataclass
class Episode:
    task: Task
    conversations: Conversations
    outcome: Outcome = "agent_error"
    reward: float = 0.0  # sum of all rewards of its calls
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    # Names of `metrics` that are sums over turns and reported as means over turns; the others are numbers of the whole
    # episode.
    over_turns: set[str] = field(default_factory=set)
    error: str | None = None
    seconds: Seconds = field(default_factory=Seconds)

    def count(self, name: str, number: float = 1.0) -> None:
        """Add to a metric that is summed over turns; add 0 to report one that may never be counted."""
        self.metrics[name] = self.metrics.get(name, 0.0) + float(number)
        self.over_turns.add(name)

    def fault(self, error: str) -> EpisodeOver:
        """Note a fault of the environment, a tool or the verifier, and return the exception that ends the episode."""
        self.error = error
        return EpisodeOver("environment_error")

    @property
    def failed(self) -> bool:
        """A fault of the environment or of the agent's code ended it: its reward says nothing about the policy."""
        return self.outcome in ("environment_error", "agent_error")

    @property
    def score(self) -> float:
        """The reward; NaN where a fault has ended the episode."""
        return math.nan if self.failed else self.reward

    @property
    def calls(self) -> list[Call]:
        """The calls that have a response."""
        return [call for call in self.conversations.calls if call.finished]

    def reward_of(self, role: str | None) -> float:
        """The reward of a role's calls; None: of all."""
        return self.reward if role is None else sum(call.reward for call in self.calls if call.role == role)

    @property
    def is_sampled(self) -> bool:
        return bool(self.calls)

    def version_counts(self) -> list[tuple[int, int]]:
        """Versions of the weights that sampled it, each with its number of tokens."""
        return sorted(Counter(chain.from_iterable(call.versions for call in self.calls)).items())

    def state_dict(self) -> dict[str, Any]:
        """Everything but its task, as plain values and arrays."""
        state = {name: getattr(self, name) for name in ("outcome", "reward", "success", "error", "metrics")}
        state |= {"over_turns": sorted(self.over_turns), "seconds": asdict(self.seconds)}
        return state | {"conversations": self.conversations.state_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], task: Task, template: ChatTemplate, thinking: Thinking) -> Episode:
        """The inverse of :meth:`state_dict`."""
        conversations = Conversations(template, thinking)
        conversations.load_state_dict(state["conversations"])
        own = {"conversations": conversations, "over_turns": set(state["over_turns"])}
        return cls(**{**state, **own, "task": task, "seconds": Seconds(**state["seconds"])})


class Model:
    """The policy, as an agent of one episode talks to it."""

    def __init__(
        self, sample: Sampler, template: ChatTemplate, tool_format: str, limits: Limits, thinking: Thinking = "keep"
    ) -> None:
        self._sample, self._template, self._tool_format, self._limits = sample, template, tool_format, limits
        self.conversations = Conversations(template, thinking)
        self.role = ""
        self.seconds = Seconds()  # `model`: spent waiting for responses

    def as_(self, role: str) -> Model:
        """The same policy in another role: its calls have rewards and a baseline of their own, and are trained where
        ``train_roles`` names the role."""
        # Shallow: conversations, turns and `seconds` are those of the episode, shared by its roles.
        model = copy.copy(self)
        model.role = role
        return model

    @property
    def turns_left(self) -> int:
        return self._limits.turns - len(self.conversations.calls)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        must_call: Sequence[str] = (),
        most_behind_prompt: int | None = None,
        **options: Any,
    ) -> Response:
        """The response to ``messages``.

        Args:
            tools: schemas that the policy may call; None: those of the run's template.
            must_call: names of tools, one of which the response must call; empty: the policy decides.
            most_behind_prompt: limit of the conversation's tokens after its first prompt, this response included.
            options: ``max_new_tokens``; ``stop``, texts that end the response; further sampling parameters, as far as
                the run lets an agent choose them.

        Raises:
            EpisodeOver: no turn is left, or the prompt leaves no room for a response.
            TemplateError: the chat template cannot render the messages, or no call that must be made.
            EngineFault: an engine failed, or the messages have an image and the policy is a text model.
        """
        if self.turns_left <= 0:
            raise EpisodeOver("turn_limit")
        template = self._template if tools is None else self._template.with_tools(tools)
        openings = [call_opening(template, self._tool_format, messages, name) for name in must_call]
        try:
            call = self.conversations.ask(messages, tools, self.role)
        except BlindPolicyError as error:
            raise EngineFault(str(error)) from error
        demanded = None
        if openings:
            prompt_ids, vision = self.conversations.prompt_ids(call), self.conversations.vision(call)
            ids = [template.encode(text) for text in openings]
            # The longest opening has to fit: the choice is known only after draws, which cost engine time.
            if len(prompt_ids) + max(map(len, ids)) >= self._limits.context:
                raise EpisodeOver("context_limit")

            async def draw(prompt: list[int]) -> int:
                return int((await self._sampled(prompt, 1, {}, vision)).token_ids[0])

            chosen = await choose_opening(ids, prompt_ids, draw)
            call.new_ids, call.opening, demanded = [*call.new_ids, *ids[chosen]], len(ids[chosen]), must_call[chosen]
        wanted = int(options.pop("max_new_tokens", self._limits.new_tokens))
        if most_behind_prompt is not None:
            wanted = min(wanted, most_behind_prompt - len(self.conversations.ids_behind_prompt(call)))
        return await self._response(call, wanted, options, demanded)

    async def go_on(self, call: Call, texts: Sequence[str]) -> Response:
        """Continue the message that ``call`` began, after ``texts``, which are inserted into it without a template.
        ``EpisodeOver`` where no turn is left, or no room for a response."""
        if self.turns_left <= 0:
            raise EpisodeOver("turn_limit")
        return await self._response(self.conversations.go_on(call, texts), self._limits.new_tokens, {})

    async def _response(
        self, call: Call, wanted: int, options: Mapping[str, Any], demanded: str | None = None
    ) -> Response:
        """Sample and record the response; ``demanded`` is the tool whose call it was forced to begin."""
        prompt_ids, vision = self.conversations.prompt_ids(call), self.conversations.vision(call)
        room = min(wanted, self._limits.new_tokens, self._limits.context - len(prompt_ids))
        if room <= 0:
            raise EpisodeOver("context_limit")
        sampled = await self._sampled(prompt_ids, room, options, vision)
        ids: list[int] = sampled.token_ids.tolist()
        versions = [version for version, start, end in sampled.weight_versions[0] for _ in range(start, end)]
        reason = sampled.finish_reasons[0]
        text = self.text_of([*call.whole_response, *ids], ended=True)
        # Without the ids of a forced opening, which may close the thought itself: `text` has them already.
        opened = self._template.opened_thought(prompt_ids[: len(prompt_ids) - call.opening])
        forced = None if demanded is None else (demanded, self.text_of(ids, ended=True))
        parsed = parse_response(text, self._tool_format, call.tools or self._template.tools, opened, forced)
        message: Message = {"role": "assistant", "content": text}
        if parsed.functions:
            message["content"] = parsed.content
            message["tool_calls"] = [
                {"id": f"call{call.index:04d}{number:02d}", "type": "function", "function": function}
                for number, function in enumerate(parsed.functions)
            ]
        self.conversations.answer(call, ids, sampled.log_probs.tolist(), versions, reason, message)
        return Response(message, parsed, text, reason, call, opened)

    async def _sampled(
        self, prompt_ids: list[int], room: int, options: Mapping[str, Any], vision: VisionInputs | None
    ) -> FinishedGroup:
        images = {} if vision is None else {"vision": vision}
        begin = time.perf_counter()
        try:
            return await self._sample(prompt_ids, room, options, **images)
        except Exception as error:
            raise EngineFault(str(error)) from error
        finally:
            self.seconds.model += time.perf_counter() - begin

    def text_of(self, token_ids: Sequence[int], ended: bool = False, special: bool = True) -> str:
        """The text of ids, with or without ``special`` tokens; ``ended``: and without the one that ended the turn."""
        ids = list(token_ids)
        cut = ids[:-1] if ended and ids and ids[-1] in self._template.end_tokens else ids
        return self._template.decode(cut, special)

    def reward(self, value: float, call: Call | None = None) -> None:
        """Add to the reward of ``call``; None: of the newest one with a response (of this role, if it has one)."""
        finished = (one for one in reversed(self.conversations.calls) if one.finished)
        target = call or next((one for one in finished if self.role in ("", one.role)), None)
        if target is not None:
            target.reward += value


class Agent(Protocol):
    """An agent, which works on tasks; one object serves many episodes at once."""

    async def run(self, task: Task, model: Model, episode: Episode) -> float | None:
        """Work until done; the returned number is added to the reward of the last call.

        It may await anything, and may set ``outcome``, ``success`` and ``metrics`` of ``episode``.
        """
        ...


async def run_episode(task: Task, agent: Agent, model: Model, limits: Limits) -> Episode:
    """Let ``agent`` work on ``task``; errors in its code are an outcome of the episode, those of engines are raised.
    Raises ``Exception``: errors of the engines; none of the agent or its environment."""
    episode = Episode(task, model.conversations, outcome="terminated")
    begin = time.perf_counter()
    try:
        async with asyncio.timeout(limits.seconds):
            model.reward(await agent.run(task, model, episode) or 0.0)
    except EpisodeOver as over:
        episode.outcome = over.outcome
    except TimeoutError:
        episode.outcome = "time_limit"
    except EngineFault as fault:
        raise fault.__cause__ or fault from None
    except Exception as error:
        episode.outcome, episode.error = "agent_error", f"{type(error).__name__}: {error}"
    episode.seconds.total = time.perf_counter() - begin
    episode.seconds.model = model.seconds.model
    episode.reward = sum(call.reward for call in episode.calls)
    return episode
