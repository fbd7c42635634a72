"""Rollout loops, which make a scored group of a prompt or task: the built-in one, or a user's own.

A loop's coroutine, or that of an episode's agent, does not outlive its process. A resumed run begins it again and leads
it to where it was: requests that were complete are answered from the record, and an engine continues the samples of the
others.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

from roll.algorithms.registry import Registry
from roll.datasets.types import PromptRow
from roll.rollout.engines import EngineClient
from roll.rollout.groups import FinishedGroup, Group, SampleGroup
from roll.rollout.rewarding import RewardClient
from roll.rollout.routing import Generation
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams

State = dict[str, Any]


class RolloutLoop(Protocol):
    """Made once a run, without arguments if it is a user's; ``answer`` is called for every training prompt (or task of
    :class:`~roll.rollout.episodes.EpisodeLoop`), many at a time."""

    async def answer(self, prompt: Any, context: RolloutContext) -> Any:
        """A scored group of ``context.group_size`` samples, or None for a prompt that is to be replaced by another.

        It may await anything: generations and rewards of ``context``, sleeps, subprocesses, HTTP, other coroutines.
        All prompts in flight share one event loop, so nothing may block it. A prompt that is not needed any more is
        cancelled.
        """
        ...


class SingleTurn:
    """The loop of runs without one of their own: one request for all samples of a prompt, then their rewards."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        finished = await context.generate(prompt.token_ids)
        return await context.compute_rewards(context.group(prompt, finished))


rollout_loops: Registry[Callable[[], RolloutLoop]] = Registry("user_defined_rollout_loop_cls")


@dataclass(frozen=True)
class GroupSettings:
    """Settings of every group."""

    group_size: int  # samples of each prompt, or episodes of each task
    params: SamplingParams | None = None  # None: the loop brings its own
    seed: int = 0
    """The run's. With the draw number of a prompt it gives the seed of the prompt's samples, so that a resumed run
    samples what an uninterrupted run would have."""
    keeps: Callable[[Any], bool] = lambda group: True  # the filter of scored groups
    filter_key: str = "query_filter_config"  # key of the configuration that the filter comes from, for messages

    def params_of(self, order: int) -> SamplingParams:
        """The sampling parameters with the seed of the prompt that was drawn as number ``order``."""
        assert self.params is not None
        # Seeds of different runs and prompts never meet: 31 bits for the run, 32 for the draw.
        return replace(self.params, seed=(self.seed & 0x7FFFFFFF) << 32 | (order & 0xFFFFFFFF))


class Flow(Protocol):
    """The part of a flow that its groups share (:class:`~roll.rollout.flow.GroupFlow`)."""

    engines: EngineClient
    rewards: RewardClient | None
    settings: GroupSettings
    counts: Counter[str]


@dataclass(eq=False, slots=True)
class RolloutContext:
    """A group in the making: the engines and rewards of the run, for one prompt or task."""

    flow: Flow
    order: int  # position in the order in which prompts or tasks were drawn
    item: Any  # the prompt or task
    version: int = 0  # the weights that it was begun with: no token is older
    recorded: Mapping[str, Any] = field(default_factory=dict)  # :attr:`state` in an earlier process
    is_scoring: bool = False  # its samples are there, and wait for rewards
    params: SamplingParams = field(init=False)
    """Sampling parameters of training, with the seed of the prompt; not for tasks, whose players have their own."""
    calls: Calls = field(init=False)
    state: Callable[[], State] = field(init=False)  # the samples so far, as plain values and arrays

    def __post_init__(self) -> None:
        settings = self.flow.settings
        if settings.params is not None:
            self.params = settings.params_of(self.order)
        self.calls = Calls(self.flow.engines, self.recorded)
        self.state = self.calls.state_dict

    @property
    def oldest(self) -> int:
        """Version of the weights of its oldest token, as far as is known."""
        if not self.is_scoring:
            return self.version
        finished = (call.value.weight_versions for call in self.calls.made.values() if call.value is not None)
        return min((span[0] for samples in finished for spans in samples for span in spans), default=self.version)

    @property
    def group_size(self) -> int:
        """Samples that the group must have."""
        return self.flow.settings.group_size

    def start(
        self, token_ids: Sequence[int], num_samples: int | None = None, params: SamplingParams | None = None
    ) -> Generation:
        """Have ``num_samples`` (None: ``group_size``) responses to ``token_ids`` generated, in the background.

        Each request of a prompt draws from random streams of its own, the first from those of the default loop. One
        that begins with the prompt's tokens has its images.
        """
        own, number = self.params, self.calls.count
        if number:
            own = replace(params or own, seed=random.Random(f"{own.seed}/{number}").getrandbits(63))
        elif params is not None:
            own = replace(params, seed=own.seed)
        vision = self.item.vision
        if vision is not None and list(token_ids[: len(self.item.token_ids)]) != self.item.token_ids:
            vision = None
        self.is_scoring = False
        name, count = f"{self.order}.{number}", num_samples or self.flow.settings.group_size
        return self.calls.submit(GenerationRequest(name, token_ids, own, count, vision=vision))

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
            ValueError: a part whose context does not begin with the prompt's tokens.
        """
        for part in parts:
            # By identity first: the common case, in which comparing thousands of ids for each prompt would cost driver
            # time.
            if part.context is prompt.token_ids is self.item.token_ids:
                continue
            begin = list(part.context[: len(prompt.token_ids)])
            if not begin == prompt.token_ids == self.item.token_ids:
                raise ValueError(
                    "context.group was given samples of a context that does not begin with the prompt's tokens; they "
                    "would be trained after another context than they were sampled with. Ask with prompt.token_ids in "
                    "front"
                )
        return Group(self.order, prompt, [one for part in parts for one in part.samples(prompt)])

    async def compute_rewards(self, group: SampleGroup) -> SampleGroup:
        """``group`` with ``rewards`` from the reward workers of its prompt's domain."""
        assert self.flow.rewards is not None, "episodes bring their rewards"
        self.is_scoring = True
        return await self.flow.rewards.score(group)


class Calls:
    """The requests of one coroutine, by name.

    Args:
        recorded: those of an earlier process (:meth:`state_dict`). They are answered as they were, as long as the
            coroutine asks as it did; where it does not, the rest of them is forgotten.
    """

    __slots__ = ("_engines", "_recorded", "_settled", "count", "made")

    def __init__(self, engines: EngineClient, recorded: Mapping[str, Any] | None = None) -> None:
        self._engines = engines
        self._recorded: State = dict(recorded or {})
        self._settled: State = {}
        self.made: dict[str, Generation] = {}  # Requests, but for those of :meth:`answer` that are over
        self.count = 0

    def submit(self, request: GenerationRequest) -> Generation:
        """Have a request generated in the background, unless the record has its answer."""
        name, self.count = request.request_id, self.count + 1
        known = self._recorded.pop(name, None)
        if known is not None and known["prompt"] != _digest(request):
            # Another prompt than before (tools may not be deterministic): the later records are of other prompts, too.
            self._recorded, known = {}, None
        if known is not None and "finished" in known:
            value = FinishedGroup.from_state(known["finished"], request.prompt_token_ids)
            # Over already: there is nothing that its abort would discard.
            generation = Generation(lambda _: None, name, request, done=True, value=value)
        else:
            generation = self._engines.submit(request if known is None else with_progress(request, known["progress"]))
        self.made[name] = generation
        return generation

    async def answer(self, request: GenerationRequest) -> FinishedGroup:
        """Have a request generated; of a conversation with many calls only digests of the prompts are kept."""
        generation = self.submit(request)
        if generation.done:  # from the record, which never waits: other coroutines get their turn here
            await asyncio.sleep(0)
        finished = await generation
        assert finished is not None, "nobody else aborts it"
        self._settled |= _call_state(self.made.pop(request.request_id))
        return finished

    def abort(self) -> None:
        """Discard what is not finished."""
        if left := [generation for generation in self.made.values() if not generation.done]:
            self._engines.abort(left)

    def state_dict(self) -> State:
        """Every request with its samples, as an engine last got or gave them: plain values and arrays."""
        state = self._recorded | self._settled
        for generation in self.made.values():
            state |= _call_state(generation)
        return state


def _call_state(generation: Generation) -> State:
    """The record of a request by its name; empty for one that was aborted."""
    request, value = generation.request, generation.value
    entry: State = {"prompt": _digest(request)}
    if not generation.done:
        samples = {"partial": request.partial.values(), "finished": request.finished}
        entry["progress"] = {name: [_sample_state(sample) for sample in found] for name, found in samples.items()}
    elif value is not None:
        entry["finished"] = value.state_dict()
    else:
        return {}
    return {generation.name: entry}


def _digest(request: GenerationRequest) -> str:
    digest = hashlib.blake2b(np.asarray(request.prompt_token_ids, dtype=np.int64).tobytes(), digest_size=12)
    if request.vision is not None:
        digest.update(" ".join(request.vision.image_keys).encode())
    return digest.hexdigest()


def with_progress(request: GenerationRequest, state: Mapping[str, Any]) -> GenerationRequest:
    """``request`` with the samples that it had; sampling parameters are the configuration's."""

    def samples(entries: Sequence[State]) -> list[GenerationOutput]:
        lists = [entry | {name: entry[name].tolist() for name in _ARRAYS} for entry in entries]
        return [GenerationOutput(request.request_id, **entry) for entry in lists]

    partial = {one.sample_index: one for one in samples(state["partial"])}
    return replace(request, partial=partial, finished=tuple(samples(state["finished"])))


_ARRAYS = {"token_ids": np.int32, "log_probs": np.float32}


def _sample_state(sample: GenerationOutput) -> State:
    state = {item.name: getattr(sample, item.name) for item in fields(sample) if item.name != "request_id"}
    return state | {name: np.asarray(state[name], dtype) for name, dtype in _ARRAYS.items()}
