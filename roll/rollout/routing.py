"""Which engine gets a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from roll.algorithms.registry import Registry
from roll.strategies.engines.requests import GenerationRequest


class EngineLoad(Protocol):
    """An engine as a router sees it."""

    @property
    def rank(self) -> int: ...

    @property
    def num_requests(self) -> int:
        """Requests that it has in hand."""

    @property
    def num_samples(self) -> int:
        """Their samples that were unfinished when it got them."""


class Router(Protocol):
    """Chooses an engine for each request, in the order in which they were asked. One router serves a whole cluster."""

    def choose(self, request: GenerationRequest, engines: Sequence[EngineLoad]) -> int:
        """The rank of one of ``engines``: those that are alive and have room, by rank, at least one."""


class PromptAffinityRouter:
    """The engine with the fewest samples in hand. The samples of a prompt are one request and stay together, so the
    prompt is computed once."""

    def choose(self, request: GenerationRequest, engines: Sequence[EngineLoad]) -> int:
        return min(engines, key=lambda engine: engine.num_samples).rank


routers: Registry[Callable[..., Router]] = Registry("router_args.router_name")
routers.add(PromptAffinityRouter, "PromptAffinityRouter")


def build_router(name: str | None, options: Mapping[str, Any]) -> Router:
    """The router that a ``router_args`` section asks for; ``name`` may be the dotted path of a class of your own.

    Raises:
        ValueError: no such class, one that does not take these options, or one without a method ``choose``.
    """
    shown = name or "PromptAffinityRouter"
    factory = routers.resolve(shown)
    try:
        router = factory(**options)
    except TypeError as error:
        raise ValueError(f"router_args.router_config {dict(options)} does not fit {shown}: {error}") from error
    if not callable(getattr(router, "choose", None)):
        raise ValueError(f"router_args.router_name: {shown} has no method choose(request, engines)")
    return router
