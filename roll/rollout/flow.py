"""The way of a prompt: to an engine, its samples to the rewards, the scored group through the filter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from roll.config.roles import GeneratingArguments
from roll.datasets.types import PromptRow
from roll.rollout.engines import EngineClient
from roll.rollout.filters import GroupFilter
from roll.rollout.group_flow import GroupFlow
from roll.rollout.groups import OpenPrompt, SampleGroup
from roll.rollout.loops import RolloutContext, RolloutLoop, SingleTurn, joined
from roll.rollout.replay import NO_PROGRESS, progress_state
from roll.rollout.rewarding import RewardClient
from roll.strategies.engines.requests import SamplingParams


def sampling_params(args: GeneratingArguments, max_new_tokens: int) -> SamplingParams:
    """The parameters that training samples with; ``do_sample: false`` means greedy."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        temperature=args.temperature if args.do_sample else 0.0,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(args.stop_token_ids or ()),
        stop_strings=tuple(args.stop_strings or ()),
        include_stop_str_in_output=args.include_stop_str_in_output,
    )


def greedy(max_new_tokens: int, like: SamplingParams) -> SamplingParams:
    """The most probable continuation, stopping where ``like`` would."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        stop_token_ids=like.stop_token_ids,
        stop_strings=like.stop_strings,
        include_stop_str_in_output=like.include_stop_str_in_output,
    )


DrawPrompts = Callable[[int], list[PromptRow]]
"""Gives the next n prompts, or fewer when there are no more (validation)."""


@dataclass(frozen=True)
class GroupSettings:
    """Settings of answering and judging every prompt."""

    group_size: int
    """Samples of each prompt."""
    params: SamplingParams
    seed: int
    """With the draw number of a prompt it gives the seed of the prompt's samples, so that a resumed run samples what an
    uninterrupted one would have."""
    filters: Mapping[str, GroupFilter] = field(default_factory=dict)
    """By domain; a domain without one keeps every group."""

    def params_of(self, order: int) -> SamplingParams:
        """With the seed of the prompt that was drawn as number ``order``."""
        return replace(self.params, seed=_sample_seed(self.seed, order))

    def keeps(self, group: SampleGroup) -> bool:
        """True where the filter of its domain accepts a scored group."""
        keep = self.filters.get(group.prompt.domain)
        return keep is None or keep(group.scores())


@dataclass(slots=True)
class _Prompt:
    """A prompt in flight."""

    one: OpenPrompt
    context: RolloutContext
    is_scored: bool = False
    """Its samples are complete, and it waits for their rewards."""

    @property
    def order(self) -> int:
        return self.one.order

    @property
    def label(self) -> str:
        return self.one.prompt.prompt_id


class PromptFlow(GroupFlow[_Prompt, SampleGroup]):
    """Prompts in flight, between being drawn and being accepted or rejected: a coroutine each.

    Args:
        first_draw: how many prompts were drawn before; continues the count of draws.
        loop: makes a scored group of a prompt; None: :class:`~roll.rollout.loops.SingleTurn`.
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
        self._draw = draw
        self._settings = settings
        self._loop = loop or SingleTurn()
        self._is_own = loop is not None
        super().__init__(f"{type(self._loop).__name__}.answer", first_draw)

    def start(self, count: int) -> list[OpenPrompt]:
        """Draw ``count`` prompts and begin them; those that there were."""
        rows = self._draw(count)
        self.exhausted = self.exhausted or len(rows) < count
        begun = [OpenPrompt(self.next_order + index, row) for index, row in enumerate(rows)]
        self.next_order += len(rows)
        contexts = [self._context(one) for one in begun]
        for one, context in zip(begun, contexts, strict=True):
            self._begin(_Prompt(one, context), self._answer(one, context))
        return begun

    def take_up(self, begun: Sequence[tuple[OpenPrompt, Mapping[str, Any]]], scoring: Sequence[SampleGroup]) -> None:
        """Continue prompts and groups of an earlier run: samples from where they were, scoring from its beginning. A
        loop of the user's own begins anew: coroutines do not outlive their process."""
        assert not (self._is_own and scoring), "a loop's groups are scored when they are complete"
        for one, progress in begun:
            context = self._context(one, None if self._is_own else progress)
            self._begin(_Prompt(one, context), self._answer(one, context))
        for group in scoring:
            one = OpenPrompt(group.order, group.prompt)
            context = self._context(one)
            self._begin(_Prompt(one, context, is_scored=True), self._score(group, context))

    def progress_state(self) -> dict[int, dict[str, Any]]:
        """By number, what the prompts that are being answered had when their requests were last given to an engine, or
        recalled from it."""
        states: dict[int, dict[str, Any]] = {}
        for prompt in self._begun.values():
            if not prompt.is_scored:
                states[prompt.one.order] = {} if self._is_own else self._state_of(prompt)
        return states

    @property
    def _moves(self) -> tuple[int, int]:
        return self._engines.num_turns, self._rewards.num_calls

    def _context(self, one: OpenPrompt, progress: Mapping[str, Any] | None = None) -> RolloutContext:
        settings = self._settings
        params = settings.params_of(one.order)
        return RolloutContext(
            one.order, settings.group_size, params, self._engines, self._rewards, progress, one.prompt
        )

    def _begin(self, begun: _Prompt, coroutine: Coroutine[Any, Any, tuple[SampleGroup, bool]]) -> None:
        super()._begin(begun, coroutine)
        if not self._is_own:
            begun.context._on_scoring = partial(self._generated, begun)

    def _ended(self, group: SampleGroup) -> None:
        if self._is_own:
            self._progress.generated.append(group)

    def _generated(self, prompt: _Prompt, group: SampleGroup) -> None:
        if not prompt.is_scored:
            prompt.is_scored = True
            self._progress.generated.append(group)
            self._changed.set()

    async def _answer(self, one: OpenPrompt, context: RolloutContext) -> tuple[SampleGroup, bool]:
        """A prompt's group, and whether it is accepted."""
        has_waited = asyncio.get_running_loop().create_future() if self._is_own else None
        if has_waited is not None:
            asyncio.get_running_loop().call_soon(has_waited.cancel)
        try:
            group = await self._loop.answer(one.prompt, context)
        finally:
            context.close()
        if has_waited is not None and not has_waited.done():
            raise ValueError(f"{self._name} ended without waiting for anything: no sample was generated")
        if group is None:
            return SampleGroup(one.order, one.prompt, joined(str(one.order), [])), False
        if self._is_own:
            self._check(one, group)
        return group, self._settings.keeps(group)

    async def _score(self, group: SampleGroup, context: RolloutContext) -> tuple[SampleGroup, bool]:
        group = await context.compute_rewards(group)
        return group, self._settings.keeps(group)

    def _check(self, one: OpenPrompt, group: SampleGroup) -> None:
        """
        Raises:
            ValueError: a group that a loop of the user's own has put together otherwise than it may.
        """
        size = self._settings.group_size
        if len(group.rewards) != group.num_samples or group.num_samples != size or group.order != one.order:
            raise ValueError(
                f"{self._name} gave a group of {group.num_samples} samples with {len(group.rewards)} rewards; "
                f"it must have {size} of each: use context.group and context.compute_rewards"
            )
        if group.prompt.token_ids != one.prompt.token_ids or group.finished.request_id != str(group.order):
            raise ValueError(
                f"{self._name} gave a group that context.group did not make of its prompt; its samples would be "
                "trained behind another context than they were sampled with"
            )

    def _state_of(self, prompt: _Prompt) -> dict[str, Any]:
        in_flight = prompt.context.in_flight
        return progress_state(in_flight[0].request) if in_flight else NO_PROGRESS


def _sample_seed(run_seed: int, order: int) -> int:
    """Seeds of different runs and prompts never meet: 31 bits for the run, 32 for the draw."""
    return (run_seed & 0x7FFFFFFF) << 32 | (order & 0xFFFFFFFF)
