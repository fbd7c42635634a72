"""The way of a prompt: to an engine, its samples to the rewards, the scored group through the filter."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from roll.config.roles import GeneratingArguments
from roll.datasets.types import PromptRow
from roll.rollout.engines import EngineClient
from roll.rollout.filters import GroupFilter
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

MAX_DRAWS_PER_WANTED = 50
CANCELLED_SECONDS = 30.0
"""How long the coroutine of a prompt may take to end after it has been cancelled."""


class RolloutExhausted(RuntimeError):
    """So many groups were rejected by filters, or could not be scored, that a step cannot be filled."""


class RolloutStalled(RuntimeError):
    """Nothing has moved for as long as a call may take, though prompts are in flight."""


@dataclass(frozen=True)
class GroupSettings:
    """How every prompt is answered and judged."""

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
        """Whether the filter of its domain accepts a scored group."""
        keep = self.filters.get(group.prompt.domain)
        return keep is None or keep(group.scores())


@dataclass
class Rejections:
    """What filters turned down, and why nothing else may come."""

    count: int = 0
    mean_scores: list[float] = field(default_factory=list)
    last_error: str | None = None

    def add(self, group: SampleGroup) -> None:
        self.count += 1
        self.mean_scores.append(group.mean_score())
        self.last_error = next((r.error for r in group.rewards if r.error is not None), self.last_error)

    def check(self, wanted: int, accepted: int) -> None:
        """
        Raises:
            RolloutExhausted: more than ``MAX_DRAWS_PER_WANTED`` rejected groups for each wanted one.
        """
        if self.count <= MAX_DRAWS_PER_WANTED * wanted:
            return
        so_far = f"{self.count} groups while {wanted} were wanted and {accepted} accepted"
        scores = [score for score in self.mean_scores if not math.isnan(score)]
        if not scores:
            raise RolloutExhausted(
                f"no sample could be scored in {so_far}; the last failure: {self.last_error}. Check the reward "
                "and the columns that it reads."
            )
        raise RolloutExhausted(
            f"query_filter_config rejected {so_far}; mean scores of rejected groups: {min(scores):.3f} to "
            f"{max(scores):.3f}. Loosen the filter's thresholds, or check the reward and the task's difficulty."
        )


@dataclass
class Progress:
    """What has become of prompts since the last time."""

    generated: list[SampleGroup] = field(default_factory=list)
    """Groups of the built-in loop that have all of their samples and are being scored."""
    accepted: list[SampleGroup] = field(default_factory=list)
    rejected: list[SampleGroup] = field(default_factory=list)


@dataclass(slots=True)
class _Prompt:
    """A prompt in flight."""

    one: OpenPrompt
    context: RolloutContext
    is_scored: bool = False
    """Its samples are complete, and it waits for their rewards."""


class PromptFlow:
    """Prompts in flight, between being drawn and being accepted or rejected: a coroutine each.

    Args:
        first_draw: how many prompts were drawn before; continues the count of draws.
        loop: makes a scored group of a prompt; None: :class:`~roll.rollout.loops.SingleTurn`.
    """

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
        self._prompts: dict[asyncio.Task[tuple[SampleGroup, bool]], _Prompt] = {}
        self._progress = Progress()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self.next_order = first_draw
        self.exhausted = False
        """There are no more prompts to draw."""

    @property
    def num_in_flight(self) -> int:
        """Prompts that are being answered or scored."""
        return len(self._prompts)

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
        for prompt in self._prompts.values():
            if not prompt.is_scored:
                states[prompt.one.order] = {} if self._is_own else self._state_of(prompt)
        return states

    def take(self) -> Progress:
        """What has happened since the last time.

        Raises:
            Exception: of a prompt's coroutine.
        """
        if self._error is not None:
            raise self._error
        progress, self._progress = self._progress, Progress()
        self._changed.clear()
        return progress

    async def progress(self, deadline: float = math.inf) -> Progress:
        """Wait until something happens, then as :meth:`take`: what happens in one pass of the loop comes together.

        Raises:
            RolloutStalled: see :meth:`watched`.
        """
        await self.watched(self._changed, deadline)
        return self.take()

    async def watched(self, event: asyncio.Event, deadline: float) -> None:
        """Wait for ``event``.

        Raises:
            RolloutStalled: neither prompts nor engines nor rewards have moved for ``deadline`` seconds.
        """
        while not event.is_set():
            moved = self._moves
            try:
                async with asyncio.timeout(None if deadline == math.inf else deadline):
                    await event.wait()
            except TimeoutError:
                if moved == self._moves:
                    raise RolloutStalled(self._where_it_stands(deadline)) from None

    async def abort(self, orders: Iterable[int] | None = None) -> None:
        """Cancel these prompts (None: all), wait until their coroutines have ended, and forget them."""
        unwanted = None if orders is None else set(orders)
        tasks = [task for task, p in self._prompts.items() if unwanted is None or p.one.order in unwanted]
        for task in tasks:
            del self._prompts[task]
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CANCELLED_SECONDS)
            if late:
                raise RuntimeError(
                    f"{self._name}.answer goes on {CANCELLED_SECONDS:g} s after it was cancelled: {late}"
                )

    @property
    def _moves(self) -> tuple[int, int]:
        return self._engines.num_turns, self._rewards.num_calls

    def _context(self, one: OpenPrompt, progress: Mapping[str, Any] | None = None) -> RolloutContext:
        settings = self._settings
        params = settings.params_of(one.order)
        return RolloutContext(
            one.order, settings.group_size, params, self._engines, self._rewards, progress, one.prompt
        )

    def _begin(self, prompt: _Prompt, coroutine: Coroutine[Any, Any, tuple[SampleGroup, bool]]) -> None:
        task = asyncio.create_task(coroutine)
        self._prompts[task] = prompt
        if not self._is_own:
            prompt.context._on_scoring = partial(self._generated, prompt)
        task.add_done_callback(self._end)

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
            raise ValueError(f"{self._name}.answer ended without waiting for anything: no sample was generated")
        if group is None:
            return SampleGroup(one.order, one.prompt, joined(str(one.order), [])), False
        if self._is_own:
            self._check(one, group)
        return group, self._settings.keeps(group)

    async def _score(self, group: SampleGroup, context: RolloutContext) -> tuple[SampleGroup, bool]:
        group = await context.compute_rewards(group)
        return group, self._settings.keeps(group)

    def _end(self, task: asyncio.Task[tuple[SampleGroup, bool]]) -> None:
        prompt = self._prompts.pop(task, None)
        error: BaseException | None = None
        if task.cancelled():
            error = RuntimeError(f"{self._name}.answer was cancelled by something that it awaits")
        else:
            error = task.exception()
        if prompt is None:
            return  # aborted: nobody waits for it
        if error is not None:
            self._error = self._error or error
        else:
            group, kept = task.result()
            if self._is_own:
                self._progress.generated.append(group)
            (self._progress.accepted if kept else self._progress.rejected).append(group)
        self._changed.set()

    def _check(self, one: OpenPrompt, group: SampleGroup) -> None:
        """
        Raises:
            ValueError: a group that a loop of the user's own has put together otherwise than it may.
        """
        size = self._settings.group_size
        if len(group.rewards) != group.num_samples or group.num_samples != size or group.order != one.order:
            raise ValueError(
                f"{self._name}.answer gave a group of {group.num_samples} samples with {len(group.rewards)} rewards; "
                f"it must have {size} of each: use context.group and context.compute_rewards"
            )
        if group.prompt.token_ids != one.prompt.token_ids or group.finished.request_id != str(group.order):
            raise ValueError(
                f"{self._name}.answer gave a group that context.group did not make of its prompt; its samples would be "
                "trained behind another context than they were sampled with"
            )

    def _state_of(self, prompt: _Prompt) -> dict[str, Any]:
        in_flight = prompt.context.in_flight
        return progress_state(in_flight[0].request) if in_flight else NO_PROGRESS

    def _where_it_stands(self, seconds: float) -> str:
        """The message of a stalled rollout: how many prompts wait, and where the first of them do."""
        lines = [f"no prompt, engine or reward has moved for {seconds:g} s; {len(self._prompts)} prompts are in flight"]
        for task, prompt in list(self._prompts.items())[:3]:
            outer: Any = task.get_coro()
            frame = getattr(outer.cr_await, "cr_frame", None) or outer.cr_frame  # of the loop, if it is in it
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "its end"
            lines.append(f"  prompt {prompt.one.order} ({prompt.one.prompt.prompt_id}) waits at {place}")
        return "\n".join(lines)

    @property
    def _name(self) -> str:
        return type(self._loop).__name__


def _sample_seed(run_seed: int, order: int) -> int:
    """Seeds of different runs and prompts never meet: 31 bits for the run, 32 for the draw."""
    return (run_seed & 0x7FFFFFFF) << 32 | (order & 0xFFFFFFFF)
