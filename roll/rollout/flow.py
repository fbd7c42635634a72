"""What a prompt goes through: to an engine, its samples to the rewards, the scored group through the filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any

from roll.datasets.types import PromptRow
from roll.distributed import PendingCall
from roll.rollout.engines import EnginePool
from roll.rollout.filters import GroupFilter
from roll.rollout.groups import SampleGroup
from roll.rollout.messages import FinishedGroup
from roll.rollout.replay_state import progress_state, with_progress
from roll.rollout.rewarding import RewardRouter
from roll.strategies.engines.requests import GenerationRequest, SamplingParams

DrawPrompts = Callable[[int], list[PromptRow]]
"""Gives the next n prompts, or fewer when there are no more (validation)."""

MAX_DRAWS_PER_WANTED = 50


class RolloutExhausted(RuntimeError):
    """So many groups were rejected by filters, or could not be scored, that a step cannot be filled."""


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
    lane: str = ""
    """Tells the requests of one flow from those of another on the same engines
    (:func:`~roll.rollout.messages.lane_of`)."""

    def name(self, order: int) -> str:
        """The id of the request for the prompt that was drawn as number ``order``."""
        return f"{self.lane}/{order}" if self.lane else str(order)

    def request(self, order: int, prompt: PromptRow) -> GenerationRequest:
        """What an engine is asked for the prompt that was drawn as number ``order``."""
        params = replace(self.params, seed=_sample_seed(self.seed, order))
        return GenerationRequest(self.name(order), prompt.token_ids, params, self.group_size)

    def keeps(self, group: SampleGroup) -> bool:
        """Whether the filter of its domain accepts a scored group."""
        keep = self.filters.get(group.prompt.domain)
        return keep is None or keep(group.scores())


@dataclass(frozen=True)
class OpenPrompt:
    """A prompt that engines are at work on."""

    order: int
    """Position in the order in which prompts were drawn."""
    prompt: PromptRow


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
        scores = [score for score in self.mean_scores if not isnan(score)]
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
    """What a few finished calls brought."""

    generated: list[SampleGroup] = field(default_factory=list)
    """Groups that have all of their samples and are being scored now."""
    accepted: list[SampleGroup] = field(default_factory=list)
    rejected: list[SampleGroup] = field(default_factory=list)


class GroupFlow:
    """Prompts under way, between being drawn and being accepted or rejected.

    Args:
        first_draw: how many prompts were drawn before; continues the count of draws.
    """

    def __init__(
        self, engines: EnginePool, rewards: RewardRouter, draw: DrawPrompts, settings: GroupSettings, first_draw: int
    ) -> None:
        self._engines = engines
        self._rewards = rewards
        self._draw = draw
        self._settings = settings
        self._open: dict[str, OpenPrompt] = {}
        self.next_order = first_draw
        self.dry = False
        """There are no more prompts to draw."""

    @property
    def num_generating(self) -> int:
        return len(self._open)

    @property
    def num_scoring(self) -> int:
        return self._rewards.num_pending_groups

    @property
    def num_under_way(self) -> int:
        """Groups that are being generated or scored."""
        return self.num_generating + self.num_scoring

    def wait(self, timeout: float | None, others: Sequence[PendingCall] = ()) -> list[PendingCall]:
        """Wait until something is done, of the rollout or of ``others``; the calls for :meth:`advance`.

        Raises:
            WorkerDied: the last engine, or another worker. Further what :func:`roll.distributed.wait_any` raises.
        """
        return self._engines.wait([*others, *self._rewards.pending], timeout)

    def start(self, count: int) -> list[OpenPrompt]:
        """Draw ``count`` prompts and give them to the engines; those that there were."""
        begun = self._draw_open(count)
        self._open.update((self._settings.name(one.order), one) for one in begun)
        self._engines.submit(self._settings.request(one.order, one.prompt) for one in begun)
        return begun

    def _draw_open(self, count: int) -> list[OpenPrompt]:
        rows = self._draw(count)
        self.dry = self.dry or len(rows) < count
        begun = [OpenPrompt(self.next_order + index, row) for index, row in enumerate(rows)]
        self.next_order += len(rows)
        return begun

    def take_up(
        self, begun: Sequence[tuple[OpenPrompt, Mapping[str, Any]]], scoring: list[SampleGroup]
    ) -> list[GenerationRequest]:
        """Go on with prompts and groups of an earlier run: samples from where they were, scoring from its beginning.

        Returns:
            What engines are to be given.
        """
        self._open.update((self._settings.name(one.order), one) for one, _ in begun)
        self._rewards.submit(scoring)
        return [with_progress(self._settings.request(one.order, one.prompt), state) for one, state in begun]

    def progress_of(self, requests: Sequence[GenerationRequest]) -> dict[int, dict[str, Any]]:
        """What the prompts under way have so far, by their numbers, from their requests as engines gave them back."""
        return {self._open[request.request_id].order: progress_state(request) for request in requests}

    def advance(self, done: Sequence[PendingCall]) -> Progress:
        """Take what finished calls bring: generated groups go to the rewards, scored ones through the filters."""
        progress = Progress(generated=[self._group_of(group) for group in self._finished(done)])
        if progress.generated:
            self._rewards.submit(progress.generated)
        for call in done:
            for group in self._rewards.take(call):
                kept = self._settings.keeps(group)
                (progress.accepted if kept else progress.rejected).append(group)
        return progress

    def abort(self, orders: Iterable[int] | None = None) -> int:
        """Stop generating these (None: all) and forget them; how many there were."""
        wanted = self._open if orders is None else map(self._settings.name, orders)
        names = [name for name in wanted if name in self._open]
        for name in names:
            del self._open[name]
        self._engines.abort(names)
        return len(names)

    def _finished(self, done: Sequence[PendingCall]) -> list[FinishedGroup]:
        """What engines have finished for this flow, in calls that are done or earlier."""
        lane = self._settings.lane
        return [group for call in done for group in self._engines.take(call, lane)] + self._engines.take_ready(lane)

    def _group_of(self, finished: FinishedGroup) -> SampleGroup:
        one = self._open.pop(finished.request_id)
        return SampleGroup(one.order, one.prompt, finished)


def _sample_seed(run_seed: int, order: int) -> int:
    """Seeds of different runs and prompts never meet: 31 bits for the run, 32 for the draw."""
    return (run_seed & 0x7FFFFFFF) << 32 | (order & 0xFFFFFFFF)
