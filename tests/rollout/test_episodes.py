"""Groups of episodes on engines without a model: seeds, redundancy, faults, conversations at home, resumption; and the
columns of a batch of them: every sampled token in one row, rewards on their turns, episodes cut short."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.simulation.clock import Clock
from roll.agents.chat_ids import ChatTemplate
from roll.agents.conversation import Call, Conversations
from roll.agents.environment_agent import EnvironmentAgent, EnvironmentOptions
from roll.agents.episode import Episode, Limits, Outcome, Task
from roll.checkpoint.state import load_state, save_state
from roll.config.plan.plan import RunAhead
from roll.distributed import DriverLoop
from roll.environments.base import Environment
from roll.environments.frozen_lake import FrozenLake
from roll.environments.off_loop import EnvironmentProcesses, RemoteEnvironment, call_off_loop, in_own_process
from roll.rollout.engines import EngineClient
from roll.rollout.episodes import EpisodeGroup, EpisodeLoop, Player, build_episode_batch, episode_codec, episode_score
from roll.rollout.flow import GroupFlow, RolloutExhausted, RolloutResult, collected
from roll.rollout.loops import GroupSettings
from roll.rollout.routing import ConversationAffinityRouter
from roll.rollout.scheduling import AsyncScheduler
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from tests.agents.templates import CHATML
from tests.agents.tiny import make_tokenizer
from tests.environments.plain import Plain
from tests.rollout.fake_clusters import outstanding
from tests.rollout.token_engines import TokenEngines
from tests.support.episodes import make_episode, random_groups, said

SIZE = 3


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    return ChatTemplate(tokenizer)


class Lakes:
    """A flow on engines that say a move drawn from the seed of the call, on a simulated clock."""

    def __init__(
        self,
        template: ChatTemplate,
        make: Any = None,
        seed: int = 0,
        thought: str = "",
        keeps: Any = None,
        **options: Any,
    ) -> None:
        moves = [[*template.encode(thought + move), *template.end_tokens] for move in ("Left", "Right", "Up", "Down")]

        def respond(seed: int, index: int) -> list[int]:
            return moves[random.Random(seed).randrange(4)]

        self.rng = random.Random(seed)
        self.engines = TokenEngines(2, self.rng, respond=respond)
        self.driver = DriverLoop(Clock())
        self.client = EngineClient(self.engines, 64, router=ConversationAffinityRouter())
        agent = EnvironmentAgent("lake", make or FrozenLake, EnvironmentOptions(max_steps=6))
        longest = max(map(len, moves)) + 1
        params = SamplingParams(max_new_tokens=longest)
        self.players = {"lake": Player(agent, template, Limits(turns=6, new_tokens=longest), params)}
        self.drawn = 0
        settings = GroupSettings(SIZE) if keeps is None else GroupSettings(SIZE, keeps=keeps)
        self.loop = EpisodeLoop(self.players, "7/", **options)
        self.flow = GroupFlow(self.client, None, self.draw, settings, loop=self.loop)

    def draw(self, count: int) -> list[Task]:
        self.drawn += count
        return [Task("lake", seed) for seed in range(self.drawn - count, self.drawn)]

    def collect(self, count: int, additional: int = 0) -> RolloutResult:
        return self.driver.run(collected(self.flow, count, additional, 1e6))

    def close(self) -> None:
        self.driver.close()


@pytest.fixture
def lakes(template: ChatTemplate) -> Any:
    made: list[Lakes] = []

    def make(*args: Any, **settings: Any) -> Lakes:
        if made:
            made[-1].close()
        made.append(Lakes(template, *args, **settings))
        return made[-1]

    yield make
    made[-1].close()


def contents(groups: list[EpisodeGroup]) -> Any:
    """Everything sampled and earned."""
    return [
        (
            group.order,
            [[(call.new_ids, call.response_ids, call.reward) for call in one.calls] for one in group.members],
        )
        for group in groups
    ]


def test_episodes_depend_on_seeds_alone(lakes: Any) -> None:
    """Not on which engine answers when, nor on how many groups are in flight."""
    found = [contents(lakes(seed=seed, max_groups=most).collect(5).groups) for seed, most in ((0, 9), (1, 9), (2, 2))]
    assert found[0] == found[1] == found[2]
    episodes = [calls for _, members in found[0] for calls in members]
    assert len(episodes) == 5 * SIZE and len({str(calls) for calls in episodes}) > 10
    firsts = {order: {str(calls[0][0]) for calls in members} for order, members in found[0]}
    assert all(len(prompts) == 1 for prompts in firsts.values()), "members of a group start equal"


def test_a_conversation_stays_with_its_engine(lakes: Any) -> None:
    one = lakes()
    homes: dict[str | None, set[int]] = defaultdict(set)
    submit = one.engines.submit

    def note(rank: int, method: Any, command: Any) -> Any:
        for request in command.add:
            homes[request.conversation].add(rank)
        return submit(rank, method, command)

    one.engines.submit = note
    one.collect(6)
    assert len(homes) == 6 * SIZE
    assert all(len(ranks) == 1 for ranks in homes.values())
    assert {rank for ranks in homes.values() for rank in ranks} == {0, 1}


def test_a_lost_home_is_left() -> None:
    class Load:
        def __init__(self, rank: int, samples: int) -> None:
            self.rank, self.num_requests, self.num_samples = rank, samples, samples

    router = ConversationAffinityRouter(max_conversations=2)
    ask = lambda name, *loads: router.choose(  # noqa: E731
        GenerationRequest("r", [1], SamplingParams(1), conversation=name), [Load(*load) for load in loads]
    )
    assert ask("a", (0, 1), (1, 0)) == 1
    assert ask("a", (0, 0), (1, 9)) == 1
    assert ask("a", (0, 0)) == 0
    assert ask("a", (0, 9), (1, 0)) == 0, "it has a new home"
    assert ask(None, (0, 9), (1, 0)) == 1
    ask("b", (0, 1), (1, 0))
    ask("c", (0, 1), (1, 0))
    assert ask("a", (0, 9), (1, 0)) == 1, "forgotten"


class Troubled(FrozenLake):
    """Every third environment fails in one way or another; the next attempt gets another one."""

    instant = True
    made = 0
    faults = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        Troubled.made += 1
        self.number = Troubled.made

    def reset(self, seed: int) -> Any:
        if self.number % self.faults == 0:
            raise RuntimeError("no server")
        return super().reset(seed)

    def step(self, action: str) -> Any:
        if self.number % self.faults == 1:
            raise OSError("connection lost")
        return super().step(action)


def test_failed_environments_are_tried_again_and_counted(lakes: Any) -> None:
    Troubled.made = 0
    one = lakes(Troubled, retries=4)
    groups = one.collect(4).groups
    assert all(not episode.failed for group in groups for episode in group.members)
    assert one.flow.counts["ended"] == 4 * SIZE and one.flow.counts["retried"] > 0
    Troubled.faults = 1
    one = lakes(Troubled, retries=1)
    with pytest.raises(RolloutExhausted, match=r"connection lost|no server"):
        one.collect(1)
    assert one.loop.quarantine.num_samples >= 1, "failed at both attempts"
    Troubled.faults = 3


class SlowSometimes(FrozenLake):
    """One environment in four takes an hour for every step; on the simulated clock."""

    made = 0
    instant = False

    def __post_init__(self) -> None:
        super().__post_init__()
        SlowSometimes.made += 1
        self.slow = SlowSometimes.made % 4 == 0

    async def step(self, action: str) -> Any:  # type: ignore[override]
        await asyncio.sleep(3600.0 if self.slow else 0.1)
        return super().step(action)


def test_redundant_members_make_up_for_slow_ones(lakes: Any) -> None:
    SlowSometimes.made = 0
    one = lakes(SlowSometimes, redundancy=1)
    groups = one.collect(4).groups
    assert [len(group.members) for group in groups] == [SIZE] * 4
    assert all(not episode.failed for group in groups for episode in group.members)
    assert one.flow.counts == Counter(ended=4 * SIZE, cancelled=4)
    one.driver.run(one.client.drain())
    assert outstanding(one.client) == 0
    SlowSometimes.made = 0
    one = lakes(SlowSometimes, retries=0)
    failed = [episode for group in one.collect(4).groups for episode in group.members if episode.failed]
    assert len(failed) == SIZE and "took more than 60 s" in failed[0].error


class Ahead:
    """An asynchronous run of ``steps`` steps, stopped and continued in another process after each of ``stops``."""

    def __init__(self, lakes: Any, folder: Path, in_flight: bool = True) -> None:
        self.lakes, self.folder, self.in_flight = lakes, folder, in_flight
        self.begin()

    def begin(self, state: Any = None) -> None:
        self.one = self.lakes()
        ahead, codec = RunAhead.of(1.0, 3, 0), episode_codec(self.one.players)
        self.scheduler = AsyncScheduler(self.one.flow, ahead, codec, 6, 1e6, in_flight=self.in_flight)
        self.one.driver.spawn(self.scheduler.keep_going())
        if state is not None:
            self.one.drawn = self.one.flow.next_order = state["drawn"]
            self.one.driver.run(self.scheduler.load_state_dict(state["ahead"]))

    def step(self, step: int) -> list[EpisodeGroup]:
        self.one.driver.run(self.scheduler.pause())
        self.one.engines.exchange(step)
        self.scheduler.exchanged(step)
        groups = self.one.driver.run(self.scheduler.collect(step))
        self.one.driver.run(asyncio.sleep(0.3))  # others compute, and episodes go on
        return groups

    def restart(self, step: int) -> None:
        state = {"ahead": self.one.driver.run(self.scheduler.state_dict()), "drawn": self.one.drawn}
        save_state(self.folder / str(step), state)
        self.begin(load_state(self.folder / str(step)))


def test_resumed_episodes_are_those_of_an_uninterrupted_run(lakes: Any, tmp_path: Path) -> None:
    whole = Ahead(lakes, tmp_path / "whole")
    expected = [contents(whole.step(step)) for step in range(6)]
    versions = []
    resumed = Ahead(lakes, tmp_path / "resumed")
    for step in range(6):
        groups = resumed.step(step)
        found = dict(contents(groups))
        known = {order: members for each in expected for order, members in each}
        assert all(known[order] == members for order, members in found.items() if order in known)
        versions += [set(call.versions) for group in groups for one in group.members for call in one.calls]
        resumed.scheduler.check()
        resumed.restart(step)
    counts = resumed.scheduler.counts()
    assert counts["drawn"] == counts["trained"] == 18, "nothing lost, nothing doubled"
    assert len(set.union(*versions)) == 6


@pytest.mark.parametrize("way", ["paused", "recalled", "lost"])
def test_turns_that_are_cut_go_on_from_their_ids(lakes: Any, way: str) -> None:
    """Weights change in the middle of turns; engines keep what they have begun, or give it back for others, or one is
    lost with all that it has begun. Episodes say what they would have said, and each token has its weights' version."""
    thought = "hello world hello world tool tool "
    expected = contents(lakes(thought=thought).collect(4).groups)
    one = lakes(thought=thought)
    one.engines.version = 0

    async def cut() -> Any:
        collecting = asyncio.create_task(collected(one.flow, 4, 0, 1e6))
        while not collecting.done():
            await asyncio.sleep(0.25)
            await one.client.pause()
            one.engines.exchange(one.engines.version + 1)
            if way == "recalled":
                one.client.resubmit(await one.client.recall())
            if way == "lost" and one.engines.version == 3:
                one.engines.dead.add(0)
            await one.client.resume()
        return collecting.result()

    groups = one.driver.run(cut()).groups
    assert contents(groups) == expected
    calls = [call for group in groups for episode in group.members for call in episode.calls]
    assert all(call.versions == sorted(call.versions) for call in calls)
    assert sum(len(set(call.versions)) > 1 for call in calls) > len(calls) / 4, "many turns saw several versions"
    assert not any(episode.failed for group in groups for episode in group.members)
    assert one.flow.counts["retried"] == 0, "no episode is begun again for an engine's sake"
    columns = build_episode_batch(groups, "trajectory", 0).batch
    trained = columns["weight_versions"][columns["response_mask"]].tolist()
    assert trained == [version for call in calls for version in call.versions]


def test_without_partial_rollout_no_episode_sees_two_versions(lakes: Any, tmp_path: Path) -> None:
    whole = Ahead(lakes, tmp_path, in_flight=False)
    groups = [group for step in range(4) for group in whole.step(step)]
    assert len({version for group in groups for call in group.members[0].calls for version in call.versions}) > 1
    for group in groups:
        assert len({version for one in group.members for call in one.calls for version in call.versions}) == 1


def test_a_dead_process_is_replaced() -> None:
    async def run() -> None:
        processes = EnvironmentProcesses(Plain, per_process=2)
        try:
            one, other, third = (processes.make() for _ in range(3))
            assert await asyncio.gather(one.reset(1), other.reset(2), third.reset(3)) == [(s, {}) for s in "123"]
            assert await call_off_loop(other.step, "x") == ("x", 1.0, True, False, {})
            with pytest.raises(RuntimeError, match=r"has ended, exit code 3"):
                await one.step("die")
            with pytest.raises(RuntimeError, match="has ended"):
                await other.step("x")
            assert await third.step("y") == ("y", 1.0, True, False, {}), "in another process"
            await third.close()
            again: RemoteEnvironment = processes.make()
            assert (await again.reset(5))[0] == "5"
            assert processes.num_deaths == 1
            with in_own_process():
                alone = processes.make()
            neighbour = processes.make()
            await asyncio.gather(alone.reset(6), neighbour.reset(7), again.reset(8))
            with pytest.raises(RuntimeError, match="has ended"):
                await alone.step("die")
            assert await neighbour.step("y") == await again.step("y") == ("y", 1.0, True, False, {})
        finally:
            processes.close()

    asyncio.run(run())


def test_calls_off_the_loop_keep_their_errors() -> None:
    async def run() -> None:
        plain: Environment = Plain()
        assert await asyncio.gather(*(call_off_loop(plain.reset, n) for n in range(20)))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await call_off_loop(next, iter(()))
        with pytest.raises(ZeroDivisionError):
            await call_off_loop(lambda: 1 // 0)

    asyncio.run(run())


PAD = 999


def batch_of(*episodes: Episode, rule: Any = "trajectory", **options: Any) -> Any:
    return build_episode_batch([EpisodeGroup(0, Task("env", 1), list(episodes))], rule, PAD, **options)


def test_a_tree_is_one_row_a_branch_and_one_trajectory() -> None:
    """Calls 0 and 1 in one conversation, 2 goes on from 0 another way, 3 begins anew."""
    episode = make_episode(
        said([1, 2], [3, 4], reward=0.5),
        said([5], [6], parent=0, reward=1.0),
        said([7, 8], [9], parent=0),
        said([10], [11, 12], reward=2.0),
    )
    batch = batch_of(episode, make_episode(said([1], [2])))
    columns = batch.batch
    assert columns["input_ids"].tolist() == [
        [1, 2, 3, 4, 5, 6, PAD][:7],
        [1, 2, 3, 4, 7, 8, 9],
        [10, 11, 12, PAD, PAD, PAD, PAD],
        [1, 2, PAD, PAD, PAD, PAD, PAD],
    ]
    assert columns["response_mask"].int().tolist() == [
        [0, 0, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
    ]
    assert columns["turn_ids"].tolist()[:3] == [
        [-1, -1, 0, 0, -1, 1, -1],
        [-1, -1, -1, -1, -1, -1, 2],
        [-1, 3, 3, -1, -1, -1, -1],
    ]
    assert columns["turn_rewards"].tolist()[:3] == [[0, 0, 0, 0.5, 0, 1, 0], [0] * 7, [0, 0, 2, 0, 0, 0, 0]]
    assert columns["scores"].tolist() == [3.5, 3.5, 3.5, 0.0]
    assert columns["trajectory_ids"].tolist() == columns["episode_ids"].tolist() == [0, 0, 0, 1]
    assert columns["step_index"].tolist() == [0, 2, 3, 0]
    assert columns["group_ids"].tolist() == [0, 0, 0, 0]


def test_each_sampled_token_is_trained_once_under_both_rules() -> None:
    groups = random_groups(np.random.default_rng(0), groups=3, episodes=4)
    expected = sorted(
        (order, turn, token, log_prob)
        for order, episode in enumerate(episode for group in groups for episode in group.members)
        for turn, call in enumerate(episode.calls)
        for token, log_prob in zip(call.response_ids, np.float32(call.log_probs).tolist(), strict=True)
    )
    for rule in ("trajectory", "step"):
        columns = build_episode_batch(groups, rule, PAD).batch
        rows, places = columns["response_mask"].nonzero(as_tuple=True)
        per_token = (columns["turn_ids"], columns["input_ids"], columns["rollout_log_probs"])
        found = zip(columns["episode_ids"][rows].tolist(), *(c[rows, places].tolist() for c in per_token), strict=True)
        assert sorted(found) == expected
        total = sum(call.reward for group in groups for episode in group.members for call in episode.calls)
        assert float(columns["turn_rewards"].sum()) == pytest.approx(total, abs=1e-4)
        assert torch.equal(columns["turn_ids"] >= 0, columns["response_mask"])


def test_states_are_told_apart_by_task_and_a_missing_one_is_alone() -> None:
    def group(order: int, seed: int, *states: str) -> EpisodeGroup:
        return EpisodeGroup(
            order, Task("env", seed), [make_episode(said([1], [2], state=state), seed=seed) for state in states]
        )

    groups = [group(0, 1, "a", "a", "b"), group(1, 1, "a"), group(2, 2, "a"), group(3, 2, "", "")]
    states = build_episode_batch(groups, "step", PAD).batch["state_ids"][:, 1].tolist()
    assert states[0] == states[1] == states[3] and len({states[0], *states[2:3], *states[4:]}) == 5
    assert build_episode_batch(groups, "step", PAD).batch["task_ids"].tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_roles_are_trajectories_with_rewards_of_their_own() -> None:
    """Two speak in one conversation; a branch of both is a row of each, and only roles that learn have rows."""
    episode = make_episode(
        said([1], [2], role="proposer", reward=1.0),
        said([3], [4], parent=0, role="solver", reward=-1.0),
        said([5], [6], role="judge", reward=9.0),
    )
    batch = batch_of(episode)
    assert batch.non_tensor_batch["role"].tolist() == ["proposer", "solver", "judge"]
    assert batch.batch["scores"].tolist() == [1.0, -1.0, 9.0]
    assert batch.batch["trajectory_ids"].tolist() == [0, 1, 2] and batch.batch["episode_ids"].tolist() == [0, 0, 0]
    assert batch.batch["response_mask"].int().tolist()[:2] == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert batch_of(episode, roles=("solver",)).batch["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert batch_of(episode, roles=("critic",)).batch["scores"].isnan().tolist() == [True]


@pytest.mark.parametrize("outcome", ["environment_error", "agent_error"])
def test_a_failed_episode(outcome: Outcome) -> None:
    failed = make_episode(said([1], [2], reward=2.0), outcome=outcome)
    batch = batch_of(failed)
    assert batch.batch["scores"].isnan().tolist() == [True]
    assert batch.batch["turn_rewards"].sum() == 0
    assert not batch.batch["terminated"][0] and not batch.batch["truncated"][0]


def test_a_truncated_episode_may_get_a_token_behind_its_last_turn() -> None:
    ended, cut = (
        make_episode(said([1], [2]), said([3], [4], parent=0), outcome=o) for o in ("terminated", "turn_limit")
    )
    batch = batch_of(ended, cut, bootstrap=True)
    assert batch.batch["bootstrap_mask"].int().tolist() == [[0] * 5, [0, 0, 0, 0, 1]]
    assert batch.batch["attention_mask"].int().tolist() == [[1, 1, 1, 1, 0]] * 2
    assert batch.batch["truncated"].tolist() == [False, True] and batch.batch["terminated"].tolist() == [True, False]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "length"]
    assert batch_of(ended, cut).batch["input_ids"].shape == (2, 4)


def test_the_reward_of_a_call_without_a_token_goes_to_the_turn_before() -> None:
    batch = batch_of(make_episode(said([1], [2]), said([3], [], parent=0, reward=3.0), said([4], [5], parent=1)))
    assert batch.batch["turn_rewards"].tolist() == [[0, 3, 0, 0, 0]]


def test_an_episode_that_never_began_is_a_row_without_a_score() -> None:
    """Its first prompt was too long: no call, no fault of the run."""
    nothing = make_episode(outcome="context_limit")
    batch = batch_of(nothing, make_episode(said([1], [2], reward=1.0)))
    assert batch.batch["scores"].isnan().tolist() == [True, False]
    assert (
        batch.batch["attention_mask"].int().tolist() == [[1, 0], [1, 1]] and not batch.batch["response_mask"][0].any()
    )
    assert batch.batch["episode_ids"].tolist() == [0, 1]
    assert np.isnan(episode_score(nothing))


def test_a_call_in_flight_is_in_no_row() -> None:
    episode = make_episode(said([1], [2]))
    episode.conversations.calls.append(Call(1, 0, [3], []))
    assert isinstance(episode.conversations, Conversations)
    assert batch_of(episode).batch["input_ids"].tolist() == [[1, 2]]
