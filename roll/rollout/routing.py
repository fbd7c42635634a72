"""A request on its way: its handle, the routers that choose an engine for it, and the account of each engine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from roll.algorithms.registry import Registry
from roll.rollout.groups import EngineCommand, FinishedGroup
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest


class Router(Protocol):
    """Chooses an engine for each request, in the order in which they were submitted. One router serves a cluster."""

    def choose(self, request: GenerationRequest, engines: Sequence[EngineAccount]) -> int:
        """By ``rank``, ``num_requests`` and ``num_samples`` of the engines.

        Returns:
            The rank of one of ``engines``: those that are alive and have room, by rank, at least one.
        """


class PromptAffinityRouter:
    """The engine with the fewest unfinished samples. The samples of a prompt are one request and stay together, so the
    prompt is computed once."""

    def choose(self, request: GenerationRequest, engines: Sequence[EngineAccount]) -> int:
        return min(engines, key=lambda engine: engine.num_samples).rank


@dataclass(eq=False)
class ConversationAffinityRouter:
    """The turns of a conversation go to the engine that had the last one, whose prefix cache knows it, as long as it is
    alive and has room; a new conversation, or one that has lost its engine, to the engine with the fewest samples. Of
    more than ``max_conversations`` the least recently used are forgotten.
    """

    max_conversations: int = 100_000
    _homes: OrderedDict[str, int] = field(default_factory=OrderedDict, init=False)

    def choose(self, request: GenerationRequest, engines: Sequence[EngineAccount]) -> int:
        least = min(engines, key=lambda engine: engine.num_samples).rank
        name = request.conversation
        if name is None:
            return least
        home = self._homes.get(name)
        chosen = least if home is None or all(engine.rank != home for engine in engines) else home
        self._homes[name] = chosen
        self._homes.move_to_end(name)
        if len(self._homes) > self.max_conversations:
            self._homes.popitem(last=False)
        return chosen


routers: Registry[Callable[..., Router]] = Registry("router_args.router_name")
routers.add(PromptAffinityRouter, "PromptAffinityRouter")
routers.add(ConversationAffinityRouter, "EnvAffinityRouter")


def build_router(name: str | None, options: Mapping[str, Any]) -> Router:
    """Build the router of a ``router_args`` section; ``name`` may be the dotted path of a class of your own. Raises
    ``ValueError``: no such class, one that does not take these options, or one without a method ``choose``."""
    shown = name or "PromptAffinityRouter"
    factory = routers.resolve(shown)
    try:
        router = factory(**options)
    except TypeError as error:
        raise ValueError(f"router_args.router_config {dict(options)} does not fit {shown}: {error}") from error
    if not callable(getattr(router, "choose", None)):
        raise ValueError(f"router_args.router_name: {shown} has no method choose(request, engines)")
    return router


@dataclass(slots=True)
class EngineAccount:
    """Requests of one engine, which routers see, and the commands for its next turn."""

    rank: int
    outstanding: dict[str, GenerationRequest] = field(default_factory=dict)
    """Requests that were given to the engine and have not come back, as they were given."""
    num_samples: int = 0  # samples of ``outstanding`` that were unfinished when they were given
    to_add: dict[str, GenerationRequest] = field(default_factory=dict)
    to_abort: list[str] = field(default_factory=list)
    to_recall: list[str] = field(default_factory=list)
    turn: asyncio.Task[None] | None = None

    @property
    def num_requests(self) -> int:
        return len(self.outstanding)

    def accept(self, request: GenerationRequest) -> None:
        self.outstanding[request.request_id] = request
        self.num_samples += request.num_samples - len(request.finished)
        self.to_add[request.request_id] = request

    def release(self, request_id: str) -> bool:
        """Take a request off the engine's account; False where it is not on it."""
        request = self.outstanding.pop(request_id, None)
        if request is not None:
            # By the request as it was given, like `accept`: the account would drift if samples finished since counted.
            self.num_samples -= request.num_samples - len(request.finished)
        return request is not None

    def withdraw(self, request_id: str) -> bool:
        """Take back a request that the engine has not been sent yet; False where it is none."""
        return self.to_add.pop(request_id, None) is not None and self.release(request_id)

    def command(
        self, slice_seconds: float, work: bool, report_refusals: bool, watched: Collection[str] = ()
    ) -> EngineCommand:
        own = tuple(request_id for request_id in watched if request_id in self.outstanding)
        add, abort, recall = tuple(self.to_add.values()), tuple(self.to_abort), tuple(self.to_recall)
        # A turn with recalls returns at once: a checkpoint or an exchange of weights waits for it.
        command = EngineCommand(add, abort, recall, slice_seconds, work and not recall, own, report_refusals)
        self.to_add, self.to_abort, self.to_recall = {}, [], []
        return command


Listener = Callable[[Sequence[GenerationOutput]], None]


@dataclass(eq=False, slots=True)
class Generation:
    """A request to the engines. Awaiting it gives its :class:`FinishedGroup`, or None if it was aborted.

    Cancelling the coroutine that awaits it aborts it.
    """

    _discard: Callable[[Sequence[Generation]], None]
    name: str
    request: GenerationRequest  # the request as it was last given to an engine, with what its samples had then
    listener: Listener | None = None
    done: bool = False
    value: FinishedGroup | None = None  # its samples; None: it is not finished, or was aborted
    _error: Exception | None = None
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def __await__(self) -> Generator[Any, None, FinishedGroup | None]:
        if not self.done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.abort()
                raise
        if self._error is not None:
            raise self._error
        return self.value

    def abort(self) -> None:
        """Stop it; what it has so far is discarded."""
        self._discard([self])

    def finish(self, group: FinishedGroup | None, error: Exception | None = None) -> None:
        """Hand over its samples (None: it was aborted), or what ended the engines."""
        if group is not None:
            group.request_id, group.context = self.name, self.request.prompt_token_ids
        self.done, self.value, self._error = True, group, error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
