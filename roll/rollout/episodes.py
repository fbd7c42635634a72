"""Episodes on the engines: a coroutine each, in groups of the same task, and what a checkpoint holds of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from roll.agents.chat_ids import ChatTemplate, Thinking
from roll.agents.conversation import Call, ConversationCounts, Conversations
from roll.agents.episode import Agent, Episode, EpisodeGroup, Limits, Model, Sampled, Seconds, Task, run_episode
from roll.environments.off_loop import in_own_process
from roll.protocol.images import EncodedImage
from roll.protocol.vision import VisionInputs
from roll.rollout.engines import EngineClient, Generation
from roll.rollout.flow import GroupFlow, GroupInFlight
from roll.rollout.groups import Drawn
from roll.rollout.replay import State, progress_state, with_progress
from roll.rollout.rewarding import SampleQuarantine
from roll.strategies.engines.requests import GenerationRequest, SamplingParams

DrawTasks = Callable[[int], list[Task]]
"""Gives the next n tasks, or fewer when there are no more."""


@dataclass(frozen=True)
class Player:
    """Settings of working on the tasks of a tag."""

    agent: Agent
    template: ChatTemplate
    limits: Limits
    params: SamplingParams
    """Without a seed; ``max_new_tokens`` is the limit's."""
    tool_format: str = "hermes"
    thinking: Thinking = "keep"


class EngineSampler:
    """The engines, as one episode calls them (:class:`~roll.agents.episode.Sample`).

    Of an agent's sampling parameters only ``stop`` counts: a sample is trained under the distribution that the run
    configures.  Every call has a seed of its own, made of ``name`` and its number.

    Args:
        name: the episode's, unique in the run; the router keeps its calls on one engine by this name.
        recorded: calls of an earlier process (:meth:`state_dict`).  They are answered as they were, as long as the
            agent asks as it did; where it does not, the rest of them is forgotten.
    """

    def __init__(
        self, engines: EngineClient, name: str, params: SamplingParams, recorded: Mapping[str, Any] | None = None
    ) -> None:
        self._engines = engines
        self._name = name
        self._params = params
        self._recorded: Sequence[State] = recorded["answered"] if recorded else ()
        self._begun: Mapping[str, State] = recorded["in_flight"] if recorded else {}
        self._answered: dict[int, State] = {}
        self._in_flight: dict[int, tuple[str, Generation]] = {}
        self._asked = 0

    async def __call__(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        options: Mapping[str, Any],
        vision: VisionInputs | None = None,
    ) -> Sampled:
        number, digest = self._asked, _digest(prompt_ids, vision)
        self._asked += 1
        known = next((one for one in self._recorded if one["number"] == number), None)
        if known is not None and known["prompt"] != digest:
            # Another prompt than before (tools may not be deterministic): the later records are of other prompts, too.
            self._recorded, self._begun, known = (), {}, None
        if known is not None:
            # An answer from the record never waits: other episodes get their turn here.
            await asyncio.sleep(0)
            self._answered[number] = known
            return _sampled(known)
        request = replace(self._request(number, prompt_ids, max_new_tokens, options), vision=vision)
        begun = self._begun.get(str(number))
        if begun is not None and begun["prompt"] == digest:
            request = with_progress(request, begun["progress"])
        generation = self._engines.submit(request)
        self._in_flight[number] = digest, generation
        try:
            finished = await generation
        finally:
            del self._in_flight[number]
        assert finished is not None, "nobody else aborts it"
        versions = np.zeros(len(finished.token_ids), dtype=np.int32)
        for version, start, end in finished.weight_versions[0]:
            versions[start:end] = version
        self._answered[number] = {
            "number": number,
            "prompt": digest,
            "token_ids": finished.token_ids,
            "log_probs": finished.log_probs,
            "versions": versions,
            "finish_reason": finished.finish_reasons[0],
        }
        return _sampled(self._answered[number])

    def close(self) -> None:
        """Abort what is in flight."""
        self._engines.abort([generation for _, generation in self._in_flight.values()])

    def state_dict(self) -> State:
        """Its calls so far: those that were answered, and the partial samples of the others."""
        return {
            "answered": [self._answered[number] for number in sorted(self._answered)],
            "in_flight": {
                str(number): {"prompt": digest, "progress": progress_state(generation.request)}
                for number, (digest, generation) in self._in_flight.items()
            },
        }

    def _request(
        self, number: int, prompt_ids: list[int], max_new_tokens: int, options: Mapping[str, Any]
    ) -> GenerationRequest:
        stop = options.get("stop") or ()
        stops = (*self._params.stop_strings, *((stop,) if isinstance(stop, str) else stop))
        # Not hash(): Python salts that of strings, and a resumed run would sample something else.
        seed = random.Random(f"{self._name}/{number}").getrandbits(63)
        # Near the limit of the context fewer tokens may be left than the minimum, which engines refuse.
        least = min(self._params.min_new_tokens, max_new_tokens)
        params = replace(
            self._params, max_new_tokens=max_new_tokens, min_new_tokens=least, seed=seed, stop_strings=stops
        )
        return GenerationRequest(f"{self._name}.{number}", prompt_ids, params, conversation=self._name)


def _digest(prompt_ids: Sequence[int], vision: VisionInputs | None = None) -> str:
    digest = hashlib.blake2b(np.asarray(prompt_ids, dtype=np.int64).tobytes(), digest_size=12)
    if vision is not None:
        digest.update(" ".join(vision.image_keys).encode())
    return digest.hexdigest()


def _sampled(known: State) -> Sampled:
    token_ids, log_probs, versions = (known[name].tolist() for name in ("token_ids", "log_probs", "versions"))
    return Sampled(token_ids, log_probs, versions, known["finish_reason"])


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of running groups of episodes."""

    group_size: int
    name: str
    """Seeds of calls are made of it, the number of the draw, the member and the call: it holds the run's seed, and
    tells validation from training."""
    redundancy: int = 0
    """Further members; the first ``group_size`` to end without a fault count, the rest is cancelled."""
    max_groups: int = 1 << 30
    """Most groups in flight; further groups wait."""
    retries: int = 1
    """Further attempts at an episode whose environment has failed."""
    keeps: Callable[[EpisodeGroup], bool] = lambda group: True
    """The filter; a group without a single sample is never kept."""


@dataclass(slots=True)
class _Member:
    """One episode of a group."""

    sampler: EngineSampler
    attempt: int = 0
    episode: Episode | None = None
    """None: it is not over."""

    def state(self) -> State:
        if self.episode is not None:
            return {"episode": episode_state(self.episode)}
        return {"attempt": self.attempt, "calls": self.sampler.state_dict()}


class EpisodeFlow(GroupFlow[Task, EpisodeGroup]):
    """Groups of episodes in flight: a coroutine each, and one for each of their episodes. Episodes do not wait for each
    other: each continues when its own response or observation is there.

    Args:
        players: by tag.
        first_draw: how many tasks were drawn before; continues the count of draws.
        quarantine: takes the tasks whose environments fail at every attempt.
    """

    def __init__(
        self,
        engines: EngineClient,
        draw: DrawTasks,
        players: Mapping[str, Player],
        settings: EpisodeSettings,
        first_draw: int,
        quarantine: SampleQuarantine | None = None,
    ) -> None:
        super().__init__("an episode", draw, first_draw)
        self.quarantine = quarantine or SampleQuarantine()
        self._engines = engines
        self._players = players
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.max_groups)
        self._leaving: set[asyncio.Task[Episode]] = set()
        self._num_attempts = 0
        self.counts: Counter[str] = Counter()
        """Episodes since the beginning, by what became of them: ``ended``, ``retried`` (an attempt that failed) and
        ``cancelled`` (not needed any more)."""

    @property
    def _moves(self) -> tuple[int, int]:
        return self._engines.num_turns, self._num_attempts

    def _start_group(self, drawn: Drawn[Task], progress: Mapping[str, Any] | None = None) -> None:
        """Run the task's episodes; environments of an earlier process are led through the recorded responses."""
        members: dict[int, _Member] = {}
        task = drawn.item

        def state() -> State:
            return {"members": {str(index): member.state() for index, member in members.items()}}

        begun = GroupInFlight(drawn, f"{task.tag}, seed {task.seed}", state)
        self._begin(begun, self._run(drawn, members, progress["members"] if progress else {}))

    async def _run(
        self, drawn: Drawn[Task], members: dict[int, _Member], recorded: Mapping[str, State]
    ) -> tuple[EpisodeGroup, bool]:
        async with self._slots:
            episodes = await self._members(drawn, members, recorded)
        played = EpisodeGroup(drawn.order, drawn.item, episodes)
        return played, any(one.calls for one in episodes) and self._settings.keeps(played)

    async def _members(
        self, drawn: Drawn[Task], members: dict[int, _Member], recorded: Mapping[str, State]
    ) -> list[Episode]:
        """The episodes that count, in the order of their numbers."""
        settings = self._settings
        tasks = {
            asyncio.create_task(self._episode(drawn, members, index, recorded.get(str(index)))): index
            for index in range(settings.group_size + settings.redundancy)
        }
        running, sound, failed = set(tasks), dict[int, Episode](), dict[int, Episode]()
        try:
            while running and len(sound) < settings.group_size:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                # In the order of members: a set has none, and who counts among those that end together must not vary.
                for task in sorted(done, key=tasks.__getitem__):
                    episode = task.result()
                    (failed if episode.failed else sound)[tasks[task]] = episode
        finally:
            await self._cancel(running)
        self.counts["ended"] += len(sound) + len(failed)
        # Failed episodes only fill up a group that has too few others.
        chosen = [*sound.items(), *failed.items()][: settings.group_size]
        return [episode for _, episode in sorted(chosen, key=lambda pair: pair[0])]

    async def _cancel(self, running: set[asyncio.Task[Episode]]) -> None:
        """Have episodes end; their environments may take their time to close."""
        for task in running:
            task.cancel()
            # Held until it ends: the event loop has weak references to tasks only.
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            self.counts["cancelled"] += 1
        if running:
            await asyncio.sleep(0)  # their requests are withdrawn in this pass

    async def _episode(
        self, drawn: Drawn[Task], members: dict[int, _Member], index: int, recorded: State | None
    ) -> Episode:
        task, settings = drawn.item, self._settings
        player = self._players[task.tag]
        member = _Member(EngineSampler(self._engines, "", player.params))
        members[index] = member
        if recorded is not None and "episode" in recorded:
            member.episode = episode_from(recorded["episode"], task, player)
            return member.episode
        first = int(recorded["attempt"]) if recorded is not None else 0
        for attempt in range(first, settings.retries + 1):
            calls = recorded["calls"] if recorded is not None and attempt == first else None
            name = f"{settings.name}{drawn.order}.{index}" + (f".{attempt}" if attempt else "")
            member.attempt = attempt
            member.sampler = EngineSampler(self._engines, name, player.params, calls)
            model = Model(member.sampler, player.template, player.tool_format, player.limits, player.thinking)
            try:
                # Environments share processes: one that ends its process fails the others, which must not fail again
                # beside it in their second attempts.
                with in_own_process() if attempt else nullcontext():
                    episode = await run_episode(task, player.agent, model, player.limits)
            finally:
                member.sampler.close()
            self._num_attempts += 1
            if episode.outcome != "environment_error" or attempt == settings.retries:
                break
            self.counts["retried"] += 1
        if episode.outcome == "environment_error" and member.attempt:
            row = {"tag": task.tag, "seed": task.seed, "row": dict(task.row), "attempts": member.attempt + 1}
            self.quarantine.add(f"environment {task.tag}", row, episode.error)
        member.episode = episode
        return episode


def episode_state(episode: Episode) -> State:
    """An episode without its task, as plain values and arrays."""
    conversations = episode.conversations
    images = [image.data for image in conversations.images.values()]
    return ({"images": images} if images else {}) | {
        "outcome": episode.outcome,
        "reward": float(episode.reward),
        "success": episode.success,
        "metrics": dict(episode.metrics),
        "over_turns": sorted(episode.over_turns),
        "error": episode.error,
        "seconds": asdict(episode.seconds),
        "counts": asdict(conversations.counts),
        "messages": json.dumps([[call.messages, call.message] for call in conversations.calls], default=str),
        "calls": [
            {
                "parent": call.parent,
                "new_ids": np.asarray(call.new_ids, np.int32),
                "response_ids": np.asarray(call.response_ids, np.int32),
                "log_probs": np.asarray(call.log_probs, np.float64),
                "versions": np.asarray(call.versions, np.int32),
                "finish_reason": call.finish_reason,
                "reward": float(call.reward),
                "state": call.state,
                "role": call.role,
                "opening": call.opening,
            }
            for call in conversations.calls
        ],
    }


def episode_from(state: Mapping[str, Any], task: Task, player: Player) -> Episode:
    """The inverse of :func:`episode_state`."""
    conversations = Conversations(player.template, player.thinking)
    conversations.counts = ConversationCounts(**state["counts"])
    for entry, (messages, message) in zip(state["calls"], json.loads(state["messages"]), strict=True):
        arrays = {name: entry[name].tolist() for name in ("new_ids", "response_ids", "log_probs", "versions")}
        plain = {name: entry[name] for name in ("parent", "finish_reason", "reward", "state", "role")}
        plain["opening"] = entry.get("opening", 0)
        call = Call(index=len(conversations.calls), messages=messages, message=message, **arrays, **plain)
        conversations.calls.append(call)
    conversations.restore([EncodedImage.of(data.tobytes()) for data in state.get("images", ())])
    plain = {name: state[name] for name in ("outcome", "reward", "success", "metrics", "error")}
    over_turns = set(state.get("over_turns", ()))
    return Episode(task, conversations, over_turns=over_turns, seconds=Seconds(**state["seconds"]), **plain)


@dataclass(frozen=True)
class EpisodeCodec:
    """Groups of episodes, as a :class:`~roll.rollout.replay.ReplayBuffer` holds them."""

    players: Mapping[str, Player]
    no_progress: State = field(default_factory=lambda: {"members": {}})

    def versions(self, group: EpisodeGroup) -> list[list[tuple[int, int]]]:
        tokens = (chain.from_iterable(call.versions for call in episode.calls) for episode in group.episodes)
        return [sorted(Counter(versions).items()) for versions in tokens]

    def is_scored(self, group: EpisodeGroup) -> bool:
        return True

    def item_state(self, item: Task) -> State:
        return {"tag": item.tag, "seed": item.seed, "row": json.dumps(dict(item.row), default=str)}

    def item_from(self, state: Mapping[str, Any]) -> Task:
        return Task(state["tag"], int(state["seed"]), json.loads(state["row"]))

    def group_state(self, group: EpisodeGroup) -> State:
        return self.item_state(group.task) | {"episodes": [episode_state(episode) for episode in group.episodes]}

    def group_from(self, order: int, state: Mapping[str, Any]) -> EpisodeGroup:
        task = self.item_from(state)
        episodes = [episode_from(episode, task, self.players[task.tag]) for episode in state["episodes"]]
        return EpisodeGroup(order, task, episodes)
