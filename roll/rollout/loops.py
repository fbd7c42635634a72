"""Prompts in flight: a rollout loop, the built-in one or a user's own, makes a scored group of each, which a filter
accepts or rejects."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from roll.algorithms.registry import Registry
from roll.datasets.types import PromptRow
from roll.rollout.engines import EngineClient, Generation
from roll.rollout.flow import GroupFlow, GroupInFlight, GroupSettings
from roll.rollout.groups import Drawn, FinishedGroup, SampleGroup
from roll.rollout.replay import NO_PROGRESS, progress_state, with_progress
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
        whole = []
        for part in parts:
            if part.request_id in self._requests:
                _, asked = self._requests[part.request_id]
            elif part.request_id == str(self.order):
                asked = prompt.token_ids  # of a group that was put together before
            else:
                raise ValueError(f"context.group was given {part.request_id!r}, which is no request of this prompt")
            # By identity first: the common case, in which comparing thousands of ids for each prompt would cost driver
            # time.
            if asked is not prompt.token_ids:
                context, count = list(map(int, asked)), len(prompt.token_ids)
                if context[:count] != list(prompt.token_ids):
                    raise ValueError(
                        "context.group was given samples of a context that does not begin with the prompt's tokens; "
                        "they would be trained after another context than they were sampled with. Ask with "
                        "prompt.token_ids in front"
                    )
                part = part if len(context) == count else _with_prefix(context[count:], part)
            whole.append(part)
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


DrawPrompts = Callable[[int], list[PromptRow]]
"""Gives the next n prompts, or fewer when there are no more (validation)."""


class PromptFlow(GroupFlow[PromptRow, SampleGroup]):
    """Prompts in flight, between being drawn and being accepted or rejected: a coroutine each.

    Args:
        first_draw: how many prompts were drawn before; continues the count of draws.
        loop: makes a scored group of a prompt; None: :class:`SingleTurn`.
    """

    _unit = "prompt"

    def __init__(
        self,
        engines: EngineClient,
        rewards: RewardClient,
        draw: DrawPrompts,
        settings: GroupSettings,
        first_draw: int,
        loop: RolloutLoop | None = None,
    ) -> None:
        self._engines = engines
        self._rewards = rewards
        self._settings = settings
        self._loop = loop or SingleTurn()
        self._is_own = self._scores_itself = loop is not None
        super().__init__(f"{type(self._loop).__name__}.answer", draw, first_draw)

    def _start_group(self, drawn: Drawn[PromptRow], progress: Mapping[str, Any] | None = None) -> None:
        """Answer a prompt, from where ``progress`` left its samples; a user's own loop starts over."""
        size, params = self._settings.group_size, self._settings.params_of(drawn.order)
        begun = None if self._is_own else progress
        context = RolloutContext(drawn.order, size, params, self._engines, self._rewards, begun, drawn.item)
        is_scored = False

        def generated(group: SampleGroup) -> None:
            nonlocal is_scored
            if not is_scored:
                is_scored = True
                self._progress.generated.append(group)
                self._changed.set()

        def state() -> dict[str, Any] | None:
            """Samples of its request as an engine last got or gave them."""
            if is_scored or self._is_own:  # coroutines do not outlive their process
                return None if is_scored else {}
            in_flight = context.in_flight
            return progress_state(in_flight[0].request) if in_flight else NO_PROGRESS

        # A user's loop may score in parts or not at all: its groups count as generated when they end.
        if not self._is_own:
            context._on_scoring = generated
        self._begin(GroupInFlight(drawn, drawn.item.prompt_id, state), self._answer(drawn, context))

    def _start_scoring(self, group: SampleGroup) -> None:
        assert not self._is_own, "a loop's groups are scored when they are complete"
        drawn = Drawn(group.order, group.prompt)
        self._begin(GroupInFlight(drawn, drawn.item.prompt_id, lambda: None), self._score(group))

    @property
    def _moves(self) -> tuple[int, int]:
        return self._engines.num_turns, self._rewards.num_calls

    async def _answer(self, drawn: Drawn[PromptRow], context: RolloutContext) -> tuple[SampleGroup, bool]:
        """A prompt's group, and whether it is accepted."""
        has_waited = asyncio.get_running_loop().create_future() if self._is_own else None
        if has_waited is not None:
            # Cancelled in the next pass of the event loop: a coroutine that ends before that has awaited nothing, so no
            # engine can have answered it.
            asyncio.get_running_loop().call_soon(has_waited.cancel)
        try:
            group = await self._loop.answer(drawn.item, context)
        finally:
            if left := context.in_flight:
                self._engines.abort(left)
        if has_waited is not None and not has_waited.done():
            raise ValueError(f"{self._name} ended without waiting for anything: no sample was generated")
        if group is None:
            return SampleGroup(drawn.order, drawn.item, join_requests(str(drawn.order), [])), False
        if self._is_own:
            self._check(drawn, group)
        return group, self._settings.keeps(group)

    async def _score(self, group: SampleGroup) -> tuple[SampleGroup, bool]:
        group = await self._rewards.score(group)
        return group, self._settings.keeps(group)

    def _check(self, drawn: Drawn[PromptRow], group: SampleGroup) -> None:
        """
        Raises:
            ValueError: a group that a loop of the user's own has put together otherwise than it may.
        """
        size = self._settings.group_size
        if len(group.rewards) != group.num_samples or group.num_samples != size or group.order != drawn.order:
            raise ValueError(
                f"{self._name} gave a group of {group.num_samples} samples with {len(group.rewards)} rewards; "
                f"it must have {size} of each: use context.group and context.compute_rewards"
            )
        if group.prompt.token_ids != drawn.item.token_ids or group.finished.request_id != str(group.order):
            raise ValueError(
                f"{self._name} gave a group that context.group did not make of its prompt; its samples would be "
                "trained after another context than they were sampled with"
            )
