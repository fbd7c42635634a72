"""Episodes on the engines: a coroutine each, in groups of the same task, and what a checkpoint holds of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from roll.agents.chat_ids import ChatTemplate, Thinking
from roll.agents.episode import Agent, Episode, Limits, Model, Task, run_episode
from roll.environments.off_loop import in_own_process
from roll.protocol.vision import VisionInputs
from roll.rollout.groups import FinishedGroup, Group
from roll.rollout.loops import Calls, RolloutContext, State
from roll.rollout.rewarding import SampleQuarantine
from roll.rollout.scheduling import GroupCodec
from roll.strategies.engines.requests import GenerationRequest, SamplingParams

EpisodeGroup = Group[Task, Episode]


@dataclass(frozen=True)
class Player:
    """Settings of working on the tasks of a tag."""

    agent: Agent
    template: ChatTemplate
    limits: Limits
    params: SamplingParams  # without a seed; ``max_new_tokens`` is the limit's
    tool_format: str = "hermes"
    thinking: Thinking = "keep"


@dataclass(frozen=True)
class EngineSampler:
    """The engines, as one episode calls them (:class:`~roll.agents.episode.Sampler`).

    Of an agent's sampling parameters only ``stop`` counts: a sample is trained under the distribution that the run
    configures.  Every call has a seed of its own, made of ``name`` and its number.
    """

    calls: Calls
    name: str  # the episode's, unique in the run; the router keeps its calls on one engine by this name
    params: SamplingParams

    async def __call__(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        options: Mapping[str, Any],
        vision: VisionInputs | None = None,
    ) -> FinishedGroup:
        name, stop = f"{self.name}.{self.calls.count}", options.get("stop") or ()
        params = replace(
            self.params,
            max_new_tokens=max_new_tokens,
            # Near the limit of the context fewer tokens may be left than the minimum, which engines refuse.
            min_new_tokens=min(self.params.min_new_tokens, max_new_tokens),
            # Not hash(): Python salts that of strings, and a resumed run would sample something else.
            seed=random.Random(f"{self.name}/{self.calls.count}").getrandbits(63),
            stop_strings=(*self.params.stop_strings, *((stop,) if isinstance(stop, str) else stop)),
        )
        request = GenerationRequest(name, prompt_ids, params, conversation=self.name, vision=vision)
        return await self.calls.answer(request)


@dataclass(slots=True)
class _Member:
    calls: Calls
    attempt: int = 0
    episode: Episode | None = None  # None: it is not over

    def state(self) -> State:
        if self.episode is not None:
            return {"episode": self.episode.state_dict()}
        return {"attempt": self.attempt, "calls": self.calls.state_dict()}


@dataclass(frozen=True)
class EpisodeLoop:
    """The rollout loop of episodes: a coroutine for each of a group, in which an agent works on the task. Episodes do
    not wait for each other: each continues when its own response or observation is there.

    ``counts`` of the flow are those of the episodes by what became of them: ``ended``, ``retried`` (an attempt that
    failed) and ``cancelled`` (not needed any more).
    """

    players: Mapping[str, Player]  # by tag
    name: str
    """Seeds of calls are made of it, the number of the draw, the member and the call: it holds the run's seed, and
    tells validation from training."""
    redundancy: int = 0  # further members; the first ``group_size`` to end without a fault count, the rest is cancelled
    max_groups: int = 1 << 30  # most groups in flight; further groups wait
    retries: int = 1  # further attempts at an episode whose environment has failed
    quarantine: SampleQuarantine = field(default_factory=SampleQuarantine)
    """Takes the tasks whose environments fail at every attempt."""
    _leaving: set[asyncio.Task[Episode]] = field(default_factory=set, init=False)

    @cached_property
    def _slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.max_groups)

    async def answer(self, task: Task, context: RolloutContext) -> EpisodeGroup:
        """Run the task's episodes; environments of an earlier process are led through the recorded responses."""
        members: dict[int, _Member] = {}
        recorded = context.recorded.get("members", {})
        context.state = lambda: {"members": recorded | {str(index): one.state() for index, one in members.items()}}
        async with self._slots:
            episodes = await self._members(context, members, recorded)
        return Group(context.order, task, episodes)

    async def _members(
        self, context: RolloutContext, members: dict[int, _Member], recorded: Mapping[str, State]
    ) -> list[Episode]:
        size = context.group_size
        tasks = {
            asyncio.create_task(self._episode(context, members, index, recorded.get(str(index)))): index
            for index in range(size + self.redundancy)
        }
        running, sound, failed = set(tasks), dict[int, Episode](), dict[int, Episode]()
        try:
            while running and len(sound) < size:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                # In the order of members: a set has none, and who counts among those that end together must not vary.
                for task in sorted(done, key=tasks.__getitem__):
                    episode = task.result()
                    (failed if episode.failed else sound)[tasks[task]] = episode
        finally:
            for task in running:
                task.cancel()
                # Held until it ends, and its environment has closed: the event loop has weak references to tasks only.
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
                context.flow.counts["cancelled"] += 1
            if running:
                await asyncio.sleep(0)  # their requests are withdrawn in this pass
        context.flow.counts["ended"] += len(sound) + len(failed)
        # Failed episodes only fill up a group that has too few others.
        chosen = [*sound.items(), *failed.items()][:size]
        return [episode for _, episode in sorted(chosen, key=lambda pair: pair[0])]

    async def _episode(
        self, context: RolloutContext, members: dict[int, _Member], index: int, recorded: State | None
    ) -> Episode:
        task: Task = context.item
        player, engines = self.players[task.tag], context.flow.engines
        member = members[index] = _Member(Calls(engines))
        if recorded is not None and "episode" in recorded:
            member.episode = Episode.from_state(recorded["episode"], task, player.template, player.thinking)
            return member.episode
        first = int(recorded["attempt"]) if recorded is not None else 0
        for attempt in range(first, self.retries + 1):
            name = f"{self.name}{context.order}.{index}" + (f".{attempt}" if attempt else "")
            calls = Calls(engines, recorded["calls"] if recorded is not None and attempt == first else None)
            member.attempt, member.calls = attempt, calls
            sampler = EngineSampler(calls, name, player.params)
            model = Model(sampler, player.template, player.tool_format, player.limits, player.thinking)
            try:
                # Environments share processes: one that ends its process fails the others, which must not fail again
                # beside it in their second attempts.
                with in_own_process() if attempt else nullcontext():
                    episode = await run_episode(task, player.agent, model, player.limits)
            finally:
                calls.abort()
            if episode.outcome != "environment_error" or attempt == self.retries:
                break
            context.flow.counts["retried"] += 1
        if episode.outcome == "environment_error" and member.attempt:
            row = {"tag": task.tag, "seed": task.seed, "row": dict(task.row), "attempts": member.attempt + 1}
            self.quarantine.add(f"environment {task.tag}", row, episode.error)
        member.episode = episode
        return episode


def episode_codec(players: Mapping[str, Player]) -> GroupCodec:
    """The codec of episodes of ``players``, by tag."""

    def member_from(task: Task, state: Mapping[str, Any]) -> Episode:
        player = players[task.tag]
        return Episode.from_state(state, task, player.template, player.thinking)

    return GroupCodec(Task.from_state, member_from)
