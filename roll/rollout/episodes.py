"""Episodes on the engines: a coroutine each, in groups of the same task, what a checkpoint holds of them, and the
columns of a training batch of such groups.

A row is a sample of an episode: a branch of its tree of calls (``trajectory``), or one call after its prompt
(``step``).  Either way each sampled token is trained in exactly one row.  A *trajectory* is what has a reward and a
baseline: the calls of one episode, or of one role where an episode has several.  The rows of an episode are adjacent
and go into one optimizer step.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, compress
from operator import and_
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from roll.agents.chat_ids import ChatTemplate, Thinking
from roll.agents.conversation import Branch, Call
from roll.agents.episode import Agent, Episode, Limits, Model, Task, run_episode
from roll.environments.off_loop import in_own_process
from roll.protocol import DataProto
from roll.protocol.vision import IMAGES, VisionInputs
from roll.rollout.groups import FinishedGroup, Group, Row, response_columns
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


SampleRule = Literal["trajectory", "step"]
TRUNCATED = ("truncated", "turn_limit", "context_limit", "time_limit")
"""Outcomes of an episode that a limit ended, not the task's own rules."""


@dataclass(slots=True)
class _Row(Row[Call]):
    """A row and what it belongs to."""

    group: int
    episode: int
    trajectory: int
    task: int
    role: str
    source: Episode
    score: float


def build_episode_batch(
    groups: Sequence[EpisodeGroup],
    rule: SampleRule | Mapping[str, SampleRule],
    pad_token_id: int,
    *,
    roles: Collection[str] | None = None,
    bootstrap: bool = False,
) -> DataProto:
    """One row a sample, right-padded to the longest of the batch; episodes in order, their rows adjacent.

    An episode of which nothing is trained (its first prompt was too long; its roles do not learn) is a row of one
    padding token without a score: it takes part in no mean, and the number of episodes stays that of the step.

    Args:
        rule: for all episodes, or by the tag of their task.
        roles: roles whose calls are trained; None: all. Calls of other roles are context.
        bootstrap: add ``bootstrap_mask`` bool (B, L), the position after the last turn of a truncated trajectory: the
            value there is that of the state in which it was left. It may lie one past the longest row.

    Returns:
        The columns of :func:`~roll.rollout.groups.build_batch` (``scores`` being the reward of the whole trajectory,
        ``prompt_id`` the group's, ``domain`` and ``tag`` the task's tag, ``finish_reason`` ``length`` for a truncated
        episode), and with shape (B, L): ``turn_ids`` int32, index of the call that sampled a trained token, -1
        elsewhere; ``turn_rewards`` float32, the reward of a turn on its last token; ``state_ids`` int32, equal for
        turns of the same task, role and state, -1 outside trained tokens.  With shape (B,): ``episode_ids``,
        ``trajectory_ids``, ``task_ids`` and ``step_index`` (first trained turn of the row) int64, ``terminated`` and
        ``truncated`` bool; objects ``role`` and ``outcome``, and ``images`` where a row has some.
    """
    rows = list(_rows(groups, rule, roles))
    left_at = _left_at(rows) if bootstrap else np.full(len(rows), -1)
    calls = [call for row in rows for call in row.trained]
    sizes = np.array([len(call.response_ids) for call in calls], dtype=np.int64)
    # A turn's reward is due on its last token.
    rewards = np.zeros(sizes.sum(), np.float32)
    rewards[np.cumsum(sizes) - 1] = [reward for row in rows for reward in _turn_rewards(row)]
    tensors = response_columns(
        rows,
        pad_token_id,
        int(left_at.max()) + 1,
        turn_ids=(np.repeat([call.index for call in calls], sizes), np.int32, -1),
        turn_rewards=(rewards, np.float32, 0),
        state_ids=(np.repeat(_state_ids(rows), sizes), np.int32, -1),
    )
    tensors["scores"] = torch.tensor([row.score for row in rows], dtype=torch.float32)
    columns = {
        f"{name}_ids": [getattr(row, name) for row in rows] for name in ("group", "episode", "trajectory", "task")
    }
    columns["step_index"] = [row.trained[0].index if row.trained else 0 for row in rows]
    columns["terminated"] = [row.source.outcome == "terminated" for row in rows]
    columns["truncated"] = [row.source.outcome in TRUNCATED for row in rows]
    tensors |= {name: torch.tensor(values) for name, values in columns.items()}
    if bootstrap:
        tensors["bootstrap_mask"] = torch.from_numpy(np.arange(tensors["input_ids"].shape[1]) == left_at[:, None])
    return DataProto.from_dict(tensors, non_tensors=_object_columns(rows, groups))


def episode_score(episode: Episode, role: str | None = None) -> float:
    """The reward of an episode (of one role's calls in it); NaN where it has none: nothing was said, or a fault of its
    environment or agent has ended it."""
    if episode.failed or not any(call.response_ids for call in episode.calls if role in (None, call.role)):
        return float("nan")
    return float(episode.reward_of(role))


def _rows(
    groups: Sequence[EpisodeGroup],
    rule: SampleRule | Mapping[str, SampleRule],
    roles: Collection[str] | None,
) -> Iterator[_Row]:
    tasks: dict[str, int] = {}
    episodes = trajectories = 0
    for number, group in enumerate(groups):
        key = json.dumps([group.item.tag, group.item.seed, group.item.row], sort_keys=True, default=str)
        # By content: a task that was drawn twice is one, whose states are compared over both groups.
        task = tasks.setdefault(key, len(tasks))
        of_group = rule if isinstance(rule, str) else rule[group.item.tag]
        for episode in group.members:
            found = _samples(episode, of_group, roles)
            seen = dict.fromkeys(role for role, *_ in found)
            index = {role: trajectories + place for place, role in enumerate(seen)}
            for role, is_trained, branch in found:
                score = episode_score(episode, role) if is_trained else float("nan")
                source = number, episodes, index[role], task, role, episode
                yield _Row(branch.calls, is_trained, *source, score)
            trajectories += len(seen)
            episodes += 1


def _samples(episode: Episode, rule: SampleRule, roles: Collection[str] | None) -> list[tuple[str, list[bool], Branch]]:
    """Role and trained calls of each row, role by role; a branch in which several speak is a row of each."""
    branches = episode.conversations.branches() if rule == "trajectory" else episode.conversations.steps()
    found = []
    for branch in branches:
        for role in dict.fromkeys(call.role for call in compress(branch.calls, branch.is_trained)):
            if roles is None or role in roles:
                own = [call.role == role for call in branch.calls]
                found.append((role, [*map(and_, own, branch.is_trained)], branch))
    order = list(dict.fromkeys(role for role, *_ in found))
    found.sort(key=lambda one: order.index(one[0]))
    return found or [("", [], Branch([], []))]


def _left_at(rows: Sequence[_Row]) -> NDArray[np.int64]:
    """int64 (rows,): in the row with the last turn of a truncated trajectory the position after it, elsewhere -1."""
    last: dict[int, tuple[int, int]] = {}
    for place, row in enumerate(rows):
        if row.source.outcome in TRUNCATED and row.trained:
            last[row.trajectory] = max(last.get(row.trajectory, (-1, -1)), (row.trained[-1].index, place))
    left_at = np.full(len(rows), -1)
    for _, place in last.values():
        row = rows[place]
        ends = accumulate(len(one.new_ids) + len(one.response_ids) for one in row.responses)
        left_at[place] = max(compress(ends, row.is_trained))
    return left_at


def _turn_rewards(row: _Row) -> list[float]:
    """The rewards of the row's turns.

    The reward of a call in which nothing was sampled counts for the turn before it, or for the first one.
    """
    if row.source.failed:
        return [0.0] * len(row.trained)
    earned: dict[int, float] = {}
    own = [call for call in row.source.calls if call.role == row.role]
    target = next((call.index for call in own if call.response_ids), None)
    for call in own:
        target = call.index if call.response_ids else target
        if target is not None:
            earned[target] = earned.get(target, 0.0) + call.reward
    return [earned[call.index] for call in row.trained]


def _state_ids(rows: Sequence[_Row]) -> list[int]:
    """By trained call of all rows: states by task and role; a call without a state is alone in its own."""
    known: dict[tuple[object, ...], int] = {}
    keys = (
        (row.task, row.role, call.state) if call.state else (row.episode, "call", call.index)
        for row in rows
        for call in row.trained
    )
    return [known.setdefault(key, len(known)) for key in keys]


def _object_columns(rows: Sequence[_Row], groups: Sequence[EpisodeGroup]) -> dict[str, Sequence[object]]:
    orders = [groups[row.group].order for row in rows]
    first = {row.group: row.episode for row in reversed(rows)}
    places = [f"{row.episode - first[row.group]}-{number}" for number, row in enumerate(rows)]
    objects: dict[str, Sequence[object]] = {
        "prompt_id": [f"{order}" for order in orders],
        "domain": [row.source.task.tag for row in rows],
        "tag": [row.source.task.tag for row in rows],
        "sample_id": [f"{order}-{place}" for order, place in zip(orders, places, strict=True)],
        "finish_reason": ["length" if row.source.outcome in TRUNCATED else "stop" for row in rows],
        "role": [row.role for row in rows],
        "outcome": [row.source.outcome for row in rows],
    }
    known: dict[tuple[str, ...], VisionInputs | None] = {(): None}
    images = []
    for row in rows:  # rows with the same images hold the same object
        seen = [image for call in row.responses for image in call.images]
        key = tuple(image.digest for image in seen)
        if key not in known:
            known[key] = row.source.conversations.inputs(seen)
        images.append(known[key])
    return objects | ({IMAGES: images} if any(images) else {})
