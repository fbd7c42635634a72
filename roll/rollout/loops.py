"""A rollout loop of the user's own: what becomes of a prompt, as a coroutine on the engines and rewards of the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from roll.algorithms.registry import Registry
from roll.datasets.types import PromptRow
from roll.distributed import PendingCall
from roll.rollout.engines import EnginePool
from roll.rollout.flow import DrawPrompts, GroupFlow, GroupSettings, OpenPrompt, Progress
from roll.rollout.groups import SampleGroup
from roll.rollout.messages import FinishedGroup
from roll.rollout.rewarding import RewardRouter
from roll.strategies.generation import GenerationRequest, SamplingParams


class RolloutLoop(Protocol):
    """Made once a run, without arguments; ``answer`` is called for every training prompt, many at a time."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        """A scored group of ``context.group_size`` samples, or None for a prompt that is to be replaced by another.

        It may await what ``context`` gives, and nothing else.
        """
        ...


rollout_loops: Registry[Callable[[], RolloutLoop]] = Registry("user_defined_rollout_loop_cls")


class _Awaited:
    """Something that engines or rewards are at work on."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None

    def __await__(self) -> Generator[_Awaited, None, Any]:
        while not self.done:
            yield self
        return self.value

    def finish(self, value: Any) -> None:
        self.done, self.value = True, value


class Generation(_Awaited):
    """A request to the engines. Awaiting it gives its :class:`FinishedGroup`, or None if it was aborted."""

    def __init__(self, request: GenerationRequest, abort: Callable[[str], None]) -> None:
        super().__init__()
        self.request = request
        self._abort = abort

    def abort(self) -> None:
        """Stop it; what it has so far is thrown away."""
        if not self.done:
            self._abort(self.request.request_id)
            self.finish(None)


@dataclass(eq=False)
class RolloutContext:
    """What a loop has for one prompt."""

    order: int
    """Position in the order in which prompts were drawn."""
    group_size: int
    """Samples that the group must have."""
    params: SamplingParams
    """How training samples."""
    _flow: LoopFlow
    _open: dict[str, Generation] = field(default_factory=dict)
    _num_requests: int = 0

    def start(
        self, token_ids: Sequence[int], num_samples: int | None = None, params: SamplingParams | None = None
    ) -> Generation:
        """Have ``num_samples`` (None: ``group_size``) responses to ``token_ids`` generated, in the background.

        Each request of a prompt draws from random streams of its own, the first from those of the default loop.
        """
        seed = self.params.seed
        if self._num_requests:
            seed = random.Random(f"{seed}/{self._num_requests}").getrandbits(63)
        name = f"{self.order}.{self._num_requests}"
        self._num_requests += 1
        own = replace(params or self.params, seed=seed)
        generation = Generation(GenerationRequest(name, token_ids, own, num_samples or self.group_size), self._stop)
        self._open[name] = generation
        self._flow.ask(generation.request)
        return generation

    async def generate(
        self, token_ids: Sequence[int], num_samples: int | None = None, params: SamplingParams | None = None
    ) -> FinishedGroup:
        """The responses that :meth:`start` asks for."""
        finished: FinishedGroup = await self.start(token_ids, num_samples, params)
        return finished

    def group(self, prompt: PromptRow, *parts: FinishedGroup) -> SampleGroup:
        """The samples of ``parts`` as the group of ``prompt``, which they all answer."""
        return SampleGroup(self.order, prompt, joined(str(self.order), parts))

    async def compute_rewards(self, group: SampleGroup) -> SampleGroup:
        """``group`` with ``rewards`` from the reward workers of its prompt's domain."""
        scored: SampleGroup = await self._flow.score(self.order, group)
        return scored

    def _stop(self, request_id: str) -> None:
        del self._open[request_id]
        self._flow.stop([request_id])


@dataclass(eq=False)
class _Prompt:
    """A prompt whose coroutine is under way."""

    one: OpenPrompt
    context: RolloutContext
    coroutine: Coroutine[_Awaited, None, SampleGroup | None]


class LoopFlow(GroupFlow):
    """As :class:`GroupFlow`, each prompt by a loop of the user's own."""

    def __init__(
        self,
        engines: EnginePool,
        rewards: RewardRouter,
        draw: DrawPrompts,
        settings: GroupSettings,
        first_draw: int,
        loop: RolloutLoop,
    ) -> None:
        super().__init__(engines, rewards, draw, settings, first_draw)
        self._loop = loop
        self._prompts: dict[int, _Prompt] = {}
        self._scores: dict[int, tuple[int, _Awaited]] = {}
        """By the identity of the group that is being scored: its prompt's number, and who waits."""
        self._outbox: list[GenerationRequest] = []

    @property
    def num_generating(self) -> int:
        return len(self._prompts)

    @property
    def num_under_way(self) -> int:
        return len(self._prompts)

    def start(self, count: int) -> list[OpenPrompt]:
        begun = self._draw_open(count)
        for one in begun:
            self._begin(one)
        self._send()
        return begun

    def take_up(
        self, begun: Sequence[tuple[OpenPrompt, Mapping[str, Any]]], scoring: list[SampleGroup]
    ) -> list[GenerationRequest]:
        """Coroutines do not outlive their process: prompts begin anew."""
        assert not scoring, "a loop's groups are scored when they are complete"
        for one, _ in begun:
            self._begin(one)
        requests, self._outbox = self._outbox, []
        return requests

    def progress_of(self, requests: Sequence[GenerationRequest]) -> dict[int, dict[str, Any]]:
        return {order: {} for order in self._prompts}

    def advance(self, done: Sequence[PendingCall]) -> Progress:
        progress = Progress()
        for finished in self._finished(done):
            prompt = self._prompts.get(int(finished.request_id.partition(".")[0]))
            if prompt is None or finished.request_id not in prompt.context._open:
                continue  # a loop that went on just now has given it up
            prompt.context._open.pop(finished.request_id).finish(finished)
            self._go_on(prompt, progress)
        for group in [group for call in done for group in self._rewards.take(call)]:
            order, waiting = self._scores.pop(id(group), (-1, None))
            if waiting is not None:
                waiting.finish(group)
                self._go_on(self._prompts[order], progress)
        self._send()
        return progress

    def abort(self, orders: Iterable[int] | None = None) -> int:
        prompts = [self._prompts.pop(order) for order in list(self._prompts if orders is None else orders)]
        for prompt in prompts:
            prompt.coroutine.close()
            self.stop(list(prompt.context._open))
        gone = {prompt.one.order for prompt in prompts}
        self._scores = {key: entry for key, entry in self._scores.items() if entry[0] not in gone}
        return len(prompts)

    # For contexts

    def ask(self, request: GenerationRequest) -> None:
        self._outbox.append(request)

    def stop(self, request_ids: Sequence[str]) -> None:
        self._outbox = [request for request in self._outbox if request.request_id not in request_ids]
        self._engines.abort(request_ids)

    def score(self, order: int, group: SampleGroup) -> _Awaited:
        waiting = _Awaited()
        self._scores[id(group)] = (order, waiting)
        self._rewards.submit([group])
        return waiting

    def _begin(self, one: OpenPrompt) -> None:
        params = self._settings.request(one.order, one.prompt).params
        context = RolloutContext(one.order, self._settings.group_size, params, self)
        prompt = _Prompt(one, context, self._loop.answer(one.prompt, context))
        self._prompts[one.order] = prompt
        self._go_on(prompt, None)

    def _go_on(self, prompt: _Prompt, progress: Progress | None) -> None:
        """Run the coroutine until it waits for something that is not done; at its end the group is judged."""
        try:
            waits_for = prompt.coroutine.send(None)
        except StopIteration as end:
            self._end(prompt, end.value, progress)
            return
        if not isinstance(waits_for, _Awaited):
            raise TypeError(f"{self._name}.answer awaits {waits_for!r}; it may await only what its context gives")

    def _end(self, prompt: _Prompt, group: SampleGroup | None, progress: Progress | None) -> None:
        self.stop(list(prompt.context._open))
        del self._prompts[prompt.one.order]
        if progress is None:
            raise ValueError(f"{self._name}.answer ended without waiting for anything: no sample was generated")
        if group is None:
            none = SampleGroup(prompt.one.order, prompt.one.prompt, joined(str(prompt.one.order), []))
            progress.generated.append(none)
            progress.rejected.append(none)
            return
        size = self._settings.group_size
        if len(group.rewards) != group.num_samples or group.num_samples != size or group.order != prompt.one.order:
            raise ValueError(
                f"{self._name}.answer gave a group of {group.num_samples} samples with {len(group.rewards)} rewards; "
                f"it must have {size} of each: use context.group and context.compute_rewards"
            )
        progress.generated.append(group)
        (progress.accepted if self._settings.keeps(group) else progress.rejected).append(group)

    def _send(self) -> None:
        requests, self._outbox = self._outbox, []
        if requests:
            self._engines.submit(requests)

    @property
    def _name(self) -> str:
        return type(self._loop).__name__


def make_flow(
    engines: EnginePool,
    rewards: RewardRouter,
    draw: DrawPrompts,
    settings: GroupSettings,
    first_draw: int,
    loop: RolloutLoop | None = None,
) -> GroupFlow:
    """The way of prompts through engines, rewards and filters: the default one, or by a loop of the user's own."""
    if loop is None:
        return GroupFlow(engines, rewards, draw, settings, first_draw)
    return LoopFlow(engines, rewards, draw, settings, first_draw, loop)


def joined(request_id: str, parts: Sequence[FinishedGroup]) -> FinishedGroup:
    """The samples of several requests as those of one."""
    return FinishedGroup(
        request_id=request_id,
        token_ids=np.concatenate([np.zeros(0, dtype=np.int32), *(part.token_ids for part in parts)]),
        log_probs=np.concatenate([np.zeros(0, dtype=np.float32), *(part.log_probs for part in parts)]),
        lengths=np.concatenate([np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)]),
        finish_reasons=[reason for part in parts for reason in part.finish_reasons],
        texts=[text for part in parts for text in part.texts],
        weight_versions=[spans for part in parts for spans in part.weight_versions],
    )
