"""Finding the request that makes an engine fail, so that the others are answered."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from roll.strategies.generation import GenerationOutput, GenerationRequest, GenerationStrategy, SamplingParams

logger = logging.getLogger(__name__)

_PROBE_STEPS = 100


class Quarantine:
    """Steps an engine; when a step raises, the requests that it had are tried again in halves until those that fail by
    themselves are found.  A group has the engine to itself, so that it is the group's fault when a step raises again.

    An error that a plain request meets as well is the engine's own and is raised.

    Args:
        engine: whose steps are taken.
        begun: the open requests as they must be given to an engine to go on, by what their samples have.
    """

    def __init__(
        self,
        engine: GenerationStrategy,
        begun: Callable[[Sequence[GenerationOutput]], list[GenerationRequest]],
    ) -> None:
        self._engine = engine
        self._begun = begun
        self._suspects: deque[list[GenerationRequest]] = deque()
        self._newcomers: list[GenerationRequest] = []
        self._tries_suspects = False

    @property
    def has_work(self) -> bool:
        return bool(self._engine.num_unfinished or self._suspects or self._newcomers)

    @property
    def is_open(self) -> bool:
        """Whether suspects are being tried: new requests wait then."""
        return bool(self._suspects) or (self._tries_suspects and self._engine.num_unfinished > 0)

    def add(self, request: GenerationRequest) -> None:
        """Let a new request wait until no suspect is left."""
        self._newcomers.append(request)

    def drop(self, request_id: str) -> None:
        """Forget a request that waits."""
        self._suspects = deque(
            kept for group in self._suspects if (kept := [r for r in group if r.request_id != request_id])
        )
        self._newcomers = [request for request in self._newcomers if request.request_id != request_id]

    def waiting(self, request_id: str) -> GenerationRequest | None:
        """A request that the engine does not have at the moment."""
        return next(
            (r for group in (*self._suspects, self._newcomers) for r in group if r.request_id == request_id), None
        )

    def step(self, failed: dict[str, str]) -> list[GenerationOutput]:
        """One step of the engine.

        Args:
            failed: takes the requests that have failed by themselves, by id, and why.
        """
        if not self._engine.num_unfinished:
            self._tries_suspects = bool(self._suspects)
            group = self._suspects.popleft() if self._suspects else self._newcomers
            if group is self._newcomers:
                self._newcomers = []
            for request in group:
                self._add(request, failed)
        try:
            return self._engine.step()
        except Exception as error:
            self._split(error, failed)
            return []

    def _add(self, request: GenerationRequest, failed: dict[str, str]) -> None:
        try:
            self._engine.add_requests([request])
        except Exception as error:
            failed[request.request_id] = f"{type(error).__name__}: {error}"

    def _split(self, error: Exception, failed: dict[str, str]) -> None:
        begun = self._begun(self._engine.recover())
        logger.warning("a step of the engine has failed with %d requests: %s", len(begun), error, exc_info=error)
        self._probe(error)
        if len(begun) == 1:
            failed[begun[0].request_id] = f"{type(error).__name__}: {error}"
        elif begun:
            middle = len(begun) // 2
            self._suspects.extendleft([begun[middle:], begun[:middle]])

    def _probe(self, error: Exception) -> None:
        """Raise ``error`` where the engine fails at a plain request, too."""
        name = "probe"
        try:
            self._engine.add_requests([GenerationRequest(name, [0], SamplingParams(1, temperature=0.0))])
            for _ in range(_PROBE_STEPS):
                self._engine.step()
                if not self._engine.num_unfinished:
                    break
        except Exception:
            raise error from None
        if self._engine.num_unfinished or name in self._engine.take_failures():
            raise error
