"""Rollout loops: the coroutine that makes a scored group of a prompt, the built-in one or a user's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from roll.algorithms.registry import Registry
from roll.datasets.types import PromptRow
from roll.rollout.engines import EngineClient, Generation
from roll.rollout.groups import FinishedGroup, SampleGroup
from roll.rollout.replay import with_progress
from roll.rollout.rewarding import RewardClient
from roll.strategies.engines.requests import GenerationRequest, SamplingParams


class RolloutLoop(Protocol):
    """Made once a run, without arguments; ``answer`` is called for every training prompt, many at a time."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        """A scored group of ``context.group_size`` samples, or None for a prompt that is to be replaced by another.

        It may await anything: generations and rewards of ``context``, sleeps, subprocesses, HTTP, other coroutines.
        All prompts in flight share one event loop, so nothing may block it. A prompt that is not needed any more is
        cancelled.
        """
        ...


class SingleTurn:
    """The loop of runs without one of their own: one request for all samples of a prompt, then their rewards."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        finished = await context.start(prompt.token_ids)
        assert finished is not None, "nobody else aborts it"
        return await context.compute_rewards(context.group(prompt, finished))


rollout_loops: Registry[Callable[[], RolloutLoop]] = Registry("user_defined_rollout_loop_cls")


@dataclass(eq=False, slots=True)
class RolloutContext:
    """The engines and rewards of the run, for one prompt."""

    order: int
    """Position in the order in which prompts were drawn."""
    group_size: int
    """Samples that the group must have."""
    params: SamplingParams
    """Sampling parameters of training."""
    _engines: EngineClient
    _rewards: RewardClient
    _progress: Mapping[str, Any] | None = None
    """Samples of the first request, in an earlier run."""
    _prompt: PromptRow | None = None
    _on_scoring: Callable[[SampleGroup], None] | None = None
    _requests: dict[str, tuple[Generation, Sequence[int]]] = field(default_factory=dict)
    """Every request with its context."""

    def start(
        self, token_ids: Sequence[int], num_samples: int | None = None, params: SamplingParams | None = None
    ) -> Generation:
        """Have ``num_samples`` (None: ``group_size``) responses to ``token_ids`` generated, in the background.

        Each request of a prompt draws from random streams of its own, the first from those of the default loop. One
        that begins with the prompt's tokens has its images.
        """
        own, number = params or self.params, len(self._requests)
        if number or params is not None:
            seed = self.params.seed
            own = replace(own, seed=random.Random(f"{seed}/{number}").getrandbits(63) if number else seed)
        name, prompt = f"{self.order}.{number}", self._prompt
        vision = None if prompt is None else prompt.vision
        if vision is not None and prompt is not None and list(token_ids[: len(prompt.token_ids)]) != prompt.token_ids:
            vision = None
        request = GenerationRequest(name, token_ids, own, num_samples or self.group_size, vision=vision)
        if self._progress is not None and not number:
            request = with_progress(request, self._progress)
        generation = self._engines.submit(request)
        self._requests[name] = generation, token_ids
        return generation

    async def generate(
        self, token_ids: Sequence[int], num_samples: int | None = None, params: SamplingParams | None = None
    ) -> FinishedGroup:
        """Like :meth:`start`; waits for the responses."""
        finished = await self.start(token_ids, num_samples, params)
        assert finished is not None, "nobody else aborts it"
        return finished

    def group(self, prompt: PromptRow, *parts: FinishedGroup) -> SampleGroup:
        """The samples of ``parts`` as the group of ``prompt``, each after the context that it was sampled with.

        A part may answer a context that goes on after the prompt: with an earlier sample, and whatever the loop puts
        there.  All of it is context; what is trained of a sample, its text and its finish reason are those of its last
        round.

        Raises:
            ValueError: a part whose context does not begin with the prompt's tokens, or of no request of this prompt.
        """
        whole = [self._with_context(prompt, part) for part in parts]
        return SampleGroup(self.order, prompt, join_requests(str(self.order), whole))

    async def compute_rewards(self, group: SampleGroup) -> SampleGroup:
        """``group`` with ``rewards`` from the reward workers of its prompt's domain."""
        if self._on_scoring is not None:
            self._on_scoring(group)
        return await self._rewards.score(group)

    @property
    def in_flight(self) -> list[Generation]:
        """Requests that are not finished."""
        return [one for one, _ in self._requests.values() if not one.done]

    def close(self) -> None:
        """Abort what is in flight."""
        self._engines.abort(self.in_flight)

    def _with_context(self, prompt: PromptRow, part: FinishedGroup) -> FinishedGroup:
        """``part`` with all that is between the prompt and its samples in front of each of them."""
        if part.request_id not in self._requests:
            if part.request_id == str(self.order):
                return part  # of a group that was put together before
            raise ValueError(f"context.group was given {part.request_id!r}, which is no request of this prompt")
        _, asked = self._requests[part.request_id]
        # By identity first: the common case, in which comparing thousands of ids for each prompt would cost driver
        # time.
        if asked is prompt.token_ids:
            return part
        context, count = list(map(int, asked)), len(prompt.token_ids)
        if context[:count] != list(prompt.token_ids):
            raise ValueError(
                "context.group was given samples of a context that does not begin with the prompt's tokens; they would "
                "be trained after another context than they were sampled with. Ask with prompt.token_ids in front"
            )
        return part if len(context) == count else _with_prefix(context[count:], part)


def _with_prefix(given: list[int], part: FinishedGroup) -> FinishedGroup:
    """The samples of ``part``, each with the tokens ``given`` in front, which nobody sampled."""
    size = len(given)

    def prepended(value: Any, own: np.ndarray) -> np.ndarray:
        head = np.broadcast_to(np.asarray(value, dtype=own.dtype), size)
        # The empty array is for a part without samples: concatenate refuses an empty list.
        return np.concatenate([np.zeros(0, own.dtype), *(piece for one in part.split(own) for piece in (head, one))])

    return replace(
        part,
        token_ids=prepended(given, part.token_ids),
        log_probs=prepended(0.0, part.log_probs),
        given=prepended(True, np.zeros(len(part.token_ids), dtype=bool)),
        lengths=part.lengths + size,
        weight_versions=[[(v, first + size, end + size) for v, first, end in one] for one in part.weight_versions],
    )


def join_requests(request_id: str, parts: Sequence[FinishedGroup]) -> FinishedGroup:
    """Merge the samples of several requests into one group."""
    if len(parts) == 1:
        return replace(parts[0], request_id=request_id)
    all_sampled = all(part.given is None for part in parts)
    # Where some samples have no record of their routes, it could not be said whose the others' are.
    have_routes = all(len(part.routes) == len(part.lengths) for part in parts)
    return FinishedGroup(
        request_id=request_id,
        # The empty arrays give a group of no parts (a loop returned None) its dtypes; concatenate refuses an empty
        # list.
        token_ids=np.concatenate([np.zeros(0, dtype=np.int32), *(part.token_ids for part in parts)]),
        log_probs=np.concatenate([np.zeros(0, dtype=np.float32), *(part.log_probs for part in parts)]),
        lengths=np.concatenate([np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)]),
        finish_reasons=[reason for part in parts for reason in part.finish_reasons],
        texts=[text for part in parts for text in part.texts],
        weight_versions=[spans for part in parts for spans in part.weight_versions],
        given=None if all_sampled else np.concatenate([~part.sampled for part in parts]),
        routes=[routes for part in parts for routes in part.routes] if have_routes else [],
    )
