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
from roll.strategies.engines.requests import GenerationRequest, SamplingParams, VersionSpan


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
    _asked: dict[str, list[int]] = field(default_factory=dict)
    """The context of every request."""
    _finished: list[FinishedGroup] = field(default_factory=list)

    def start(
        self, token_ids: Sequence[int], num_samples: int | None = None, params: SamplingParams | None = None
    ) -> Generation:
        """Have ``num_samples`` (None: ``group_size``) responses to ``token_ids`` generated, in the background.

        Each request of a prompt draws from random streams of its own, the first from those of the default loop.
        """
        seed = self.params.seed
        if self._asked:
            seed = random.Random(f"{seed}/{len(self._asked)}").getrandbits(63)
        name = f"{self.order}.{len(self._asked)}"
        self._asked[name] = list(map(int, token_ids))
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

    def group(self, prompt: PromptRow, *parts: FinishedGroup, earlier_rounds: bool = False) -> SampleGroup:
        """The samples of ``parts`` as the group of ``prompt``, each behind the context that it was sampled with.

        A part may answer a context that goes on behind the prompt: with an earlier sample, and whatever the loop puts
        there.  All of it is context; text and finish reason of a sample are those of its last round.

        Args:
            earlier_rounds: train the earlier samples in that context, too, with the log-probs that they were sampled
                with; only what the loop put there stays mere context.

        Raises:
            ValueError: a part whose context does not begin with the prompt's tokens, or that was asked for otherwise.
        """
        whole = [self._behind(prompt, part, earlier_rounds) for part in parts]
        return SampleGroup(self.order, prompt, joined(str(self.order), whole))

    async def compute_rewards(self, group: SampleGroup) -> SampleGroup:
        """``group`` with ``rewards`` from the reward workers of its prompt's domain."""
        scored: SampleGroup = await self._flow.score(self.order, group)
        return scored

    def _behind(self, prompt: PromptRow, part: FinishedGroup, earlier_rounds: bool) -> FinishedGroup:
        """``part`` with all that stands between the prompt and its samples in front of each of them."""
        if part.request_id not in self._asked:
            if part.request_id == str(self.order):
                return part  # of a group that was put together before
            raise ValueError(f"context.group was given {part.request_id!r}, which is no request of this prompt")
        context, count = self._asked[part.request_id], len(prompt.token_ids)
        if context[:count] != list(prompt.token_ids):
            raise ValueError(
                "context.group was given samples of a context that does not begin with the prompt's tokens; they would "
                "be trained behind another context than they were sampled with. Ask with prompt.token_ids in front"
            )
        if len(context) == count:
            return part
        passage = self._earlier(context, count) if earlier_rounds else _Passage.of_given(context[count:])
        return _prolonged(passage, part)

    def _earlier(self, context: list[int], count: int) -> _Passage:
        """The tokens of ``context`` behind the first ``count``, with what is known of those that were sampled."""
        best: tuple[FinishedGroup, int] | None = None
        longest = 0
        for group in self._finished:
            asked = self._asked[group.request_id]
            for index, tokens in enumerate(group.split(group.token_ids)):
                whole = len(asked) + len(tokens)
                if (
                    len(tokens)
                    and whole > longest
                    and len(asked) >= count
                    and context[:whole] == asked + tokens.tolist()
                ):
                    best, longest = (group, index), whole
        if best is None:
            return _Passage.of_given(context[count:])
        group, index = best
        passage = self._earlier(self._asked[group.request_id], count)
        tokens, log_probs = (group.split(flat)[index] for flat in (group.token_ids, group.log_probs))
        passage.add_sampled(tokens, log_probs, group.weight_versions[index])
        passage.add_given(context[longest:])
        return passage

    def _stop(self, request_id: str) -> None:
        del self._open[request_id]
        self._flow.stop([request_id])


@dataclass
class _Passage:
    """Tokens behind a prompt, sampled and given."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    given: list[bool] = field(default_factory=list)
    weight_versions: list[VersionSpan] = field(default_factory=list)

    @staticmethod
    def of_given(tokens: Sequence[int]) -> _Passage:
        return _Passage(list(tokens), [0.0] * len(tokens), [True] * len(tokens))

    def add_given(self, tokens: Sequence[int]) -> None:
        self.token_ids += tokens
        self.log_probs += [0.0] * len(tokens)
        self.given += [True] * len(tokens)

    def add_sampled(self, tokens: np.ndarray, log_probs: np.ndarray, spans: Sequence[VersionSpan]) -> None:
        self.weight_versions += _shifted(spans, len(self.token_ids))
        self.token_ids += tokens.tolist()
        self.log_probs += log_probs.tolist()
        self.given += [False] * len(tokens)


def _shifted(spans: Sequence[VersionSpan], by: int) -> list[VersionSpan]:
    return [(version, start + by, end + by) for version, start, end in spans]


def _prolonged(passage: _Passage, part: FinishedGroup) -> FinishedGroup:
    """The samples of ``part``, each with ``passage`` in front."""
    count, size = len(part.lengths), len(passage.token_ids)

    def in_front(tokens: Sequence[Any], own: np.ndarray) -> np.ndarray:
        head = np.asarray(tokens, dtype=own.dtype)
        return np.concatenate([np.zeros(0, own.dtype), *(piece for one in part.split(own) for piece in (head, one))])

    return replace(
        part,
        token_ids=in_front(passage.token_ids, part.token_ids),
        log_probs=in_front(passage.log_probs, part.log_probs),
        given=in_front(passage.given, np.zeros(len(part.token_ids), dtype=bool)),
        lengths=part.lengths + size,
        weight_versions=[[*passage.weight_versions, *_shifted(part.weight_versions[i], size)] for i in range(count)],
    )


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
            prompt.context._finished.append(finished)
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
        if group.prompt.token_ids != prompt.one.prompt.token_ids or group.finished.request_id != str(group.order):
            raise ValueError(
                f"{self._name}.answer gave a group that context.group did not make of its prompt; its samples would be "
                "trained behind another context than they were sampled with"
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
        given=_joined_given(parts),
    )


def _joined_given(parts: Sequence[FinishedGroup]) -> np.ndarray | None:
    if all(part.given is None for part in parts):
        return None
    return np.concatenate([~part.sampled for part in parts])
