from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from roll.distributed import DeadlineExceeded, RemoteError, WorkerDied, WorkerFailed
from roll.distributed.failures import RankReport
from roll.rollout.engines import EngineClient, EngineWorker
from roll.rollout.groups import FinishedGroup
from roll.rollout.routing import EngineAccount, Generation, build_router
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from tests.rollout.fake_clusters import FakeCall, FakeEngines, let_be_done, on_clock, outstanding, settle

PARAMS = SamplingParams(max_new_tokens=4)


class Desk:
    """An engine client, and what has come back."""

    def __init__(self, engines: FakeEngines, max_running_requests: int = 100, **options) -> None:
        self.engines = engines
        self.client = EngineClient(engines, max_running_requests, **options)
        self.generations: dict[str, Generation] = {}
        self.done: list[str] = []
        self._waits: list[asyncio.Future[None]] = []

    def submit(self, *sizes: int, first: int = 0) -> list[Generation]:
        made = [GenerationRequest(str(first + i), [i], PARAMS, size) for i, size in enumerate(sizes)]
        return [self.give(request) for request in made]

    def give(self, request: GenerationRequest) -> Generation:
        generation = self.client.submit(request)
        self.generations[request.request_id] = generation
        self._waits.append(asyncio.ensure_future(self._note(generation)))
        return generation

    async def _note(self, generation: Generation) -> None:
        with suppress(RemoteError, ValueError):
            if (group := await generation) is not None:
                self.done.append(group.request_id)

    def abort(self, *names: str) -> None:
        self.client.abort([self.generations[name] for name in names])

    async def recall(self, *names: str) -> list[Generation]:
        """Engines answer meanwhile."""
        wanted = [self.generations[name] for name in names] if names else None
        recall = asyncio.ensure_future(self.client.recall(wanted))
        await settle()
        while not recall.done():
            await let_be_done(self.engines.calls)
        return await recall

    async def advance(self, times: int = 1) -> list[str]:
        """Let every engine finish its turn; the ids of the groups that came back."""
        await settle()
        before = len(self.done)
        for _ in range(times):
            await let_be_done(self.engines.calls)
        await settle()
        return self.done[before:]


def names(generations: list[Generation]) -> list[str]:
    return [generation.name for generation in generations]


@on_clock
async def test_requests_go_to_the_engine_with_the_fewest_samples_until_nothing_is_left():
    desk = Desk(FakeEngines(world_size=2, per_turn=1))
    desk.submit(8, 2, 2, 2, 4)
    assert outstanding(desk.client) == 18
    assert len(await desk.advance()) == 2 and len(desk.engines.calls) == 1
    assert len(await desk.advance(3)) == 3 and desk.engines.calls == []
    assert [desk.engines.seen[str(i)][0] for i in range(5)] == [0, 1, 1, 1, 1]
    assert (outstanding(desk.client), desk.client.busy_seconds) == (0, 0.5 * 5), "five turns of half a second"


@on_clock
async def test_what_follows_a_response_goes_with_the_very_next_turn():
    """Also behind a gather: nothing is held up by a turn that began a moment too early."""
    desk = Desk(FakeEngines(per_turn=2))

    async def talk(first: int) -> None:
        for turn in range(3):
            both = (desk.client.submit(GenerationRequest(f"{first}-{turn}-{i}", [i], PARAMS)) for i in range(2))
            await asyncio.gather(*both)

    talking = asyncio.ensure_future(talk(0))
    await settle()
    for turn in range(3):
        assert [len(call.argument.add) for call in desk.engines.calls] == [2], turn
        await let_be_done(desk.engines.calls)
    await talking
    assert desk.client.num_turns == 3


@on_clock
async def test_aborted_requests_never_come_back():
    desk = Desk(FakeEngines(per_turn=1))
    desk.submit(1, 1, 1)
    await settle()
    desk.submit(1, first=7)
    desk.abort("1", "7")
    assert outstanding(desk.client) == 2
    assert await desk.advance(4) == ["0", "2"]
    assert desk.engines.aborted == ["1"], "the one that was still on its way is dropped here"
    assert "7" not in desk.engines.seen
    assert desk.engines.calls == []
    assert await desk.generations["1"] is None


@on_clock
async def test_whoever_is_cancelled_aborts_its_request():
    desk = Desk(FakeEngines(per_turn=0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(desk.client.submit(GenerationRequest("0", [0], PARAMS)), 1.0)
    desk.submit(1, first=1)
    await desk.advance()
    waiting = [asyncio.ensure_future(wait_for(desk.generations["1"])) for _ in range(2)]
    await settle()
    waiting[0].cancel()
    assert await waiting[1] is None, "who else waits for it hears of it"
    assert outstanding(desk.client) == 0
    await desk.advance(3)
    assert sorted(desk.engines.aborted) == ["0", "1"]
    assert desk.engines.calls == []


async def wait_for(generation: Generation) -> FinishedGroup | None:
    return await generation


@on_clock
async def test_a_group_that_was_finished_when_it_was_aborted_is_dropped():
    desk = Desk(FakeEngines())
    desk.submit(1, 1)
    await settle()
    desk.abort("0")
    desk.submit(1)  # the same id once more: not answered by the old one
    assert await desk.advance() == ["1"]
    assert await desk.advance() == ["0"]


@on_clock
async def test_an_engine_has_no_more_requests_in_hand_than_it_may():
    desk = Desk(FakeEngines(world_size=2, per_turn=1), max_running_requests=2)
    desk.submit(1, 1, 1, 1, 1, 1, 1)
    await settle()
    desk.abort("5")
    assert outstanding(desk.client) == 6
    while desk.engines.calls:
        await desk.advance()
        assert max(len(held) for held in desk.engines.held) <= 2
    assert sorted(desk.done) == ["0", "1", "2", "3", "4", "6"]
    assert "5" not in desk.engines.seen, "it was still waiting when it was aborted"


@on_clock
async def test_recalled_requests_come_back_with_what_they_have_and_go_on_elsewhere():
    desk = Desk(FakeEngines(world_size=2, per_turn=0), max_running_requests=2)
    desk.submit(2, 2, 2, 2, 2, 2)
    assert await desk.advance(3) == []
    recalled = await desk.recall("4", "1", "0")
    assert names(recalled) == ["4", "1", "0"], "in the order asked for; 4 was waiting for room"
    # The recall waited for the turn that was in flight; the turn that recalled generated nothing.
    partial = [one.request.partial for one in recalled]
    assert [len(p[0].token_ids) if p else 0 for p in partial] == [0, 4, 4]
    assert outstanding(desk.client) == 6
    assert sorted(id_.partition("#")[0] for held in desk.engines.held for id_ in held) == ["2", "3"]
    desk.engines.per_turn = 10
    desk.client.resubmit(recalled)
    assert sorted(await desk.advance(3)) == ["0", "1", "2", "3", "4", "5"]
    assert len(desk.engines.seen["0"][1].partial[0].token_ids) == 4, "the engine was told what the sample has"
    assert outstanding(desk.client) == 0


@on_clock
async def test_what_is_finished_when_it_is_recalled_is_a_group_and_the_rest_may_be_given_again_at_once():
    desk = Desk(FakeEngines(per_turn=1))
    desk.submit(1, 1, 1)
    await settle()
    recalled = await desk.recall()
    assert (desk.done, names(recalled)) == (["0"], ["1", "2"]), "the turn in flight finished 0"
    assert desk.engines.calls == [] and await desk.recall() == []
    desk.engines.per_turn = 0
    for _ in range(3):
        desk.client.resubmit(recalled)
        await desk.advance()
        recalled = await desk.recall()
    first, _ = recalled
    assert len(first.request.partial[0].token_ids) == 7
    assert all(not held for held in desk.engines.held)
    first.abort()
    desk.client.resubmit(recalled)
    assert outstanding(desk.client) == 1, "what was aborted while it was nowhere does not return"


@on_clock
async def test_engines_keep_their_samples_over_a_pause():
    desk = Desk(FakeEngines(world_size=2, per_turn=1))
    client, engines = desk.client, desk.engines
    desk.submit(1, 1, 1, 1, 1)
    await settle()
    pause = asyncio.ensure_future(client.pause())
    await desk.advance()
    await pause
    assert engines.calls == [], "weights may be exchanged"
    desk.submit(1, first=8)
    await settle()
    assert engines.calls == []
    assert sorted(desk.done) == ["0", "1"], "ended while the pause came"
    assert names(await desk.recall("3")) == ["3"]
    assert [len(held) for held in engines.held] == [2, 0], "recalled without generating anything"
    assert engines.calls == []
    desk.abort("4")
    await settle()
    assert engines.calls == []
    await client.resume()
    await settle()
    assert len(engines.calls) == 2
    assert sorted(await desk.advance(4)) == ["2", "8"]
    assert engines.aborted == ["4"]


@pytest.mark.parametrize("loss", [WorkerDied, WorkerFailed, DeadlineExceeded])
@on_clock
async def test_an_engine_is_lost_with_hundreds_of_requests_in_flight(loss):
    """Whoever waits hears nothing of it; some of them are cancelled at the same time."""
    rng = random.Random(3)
    engines = FakeEngines(world_size=4, per_turn=5, rng=rng, loss=loss)
    client = EngineClient(engines, max_running_requests=64)
    waiting = {
        str(i): asyncio.ensure_future(client.submit(GenerationRequest(str(i), [i % 50], PARAMS, 2))) for i in range(600)
    }
    await asyncio.sleep(0.2)
    engines.dead = {1}
    cancelled = rng.sample(sorted(waiting), 100)
    for name in cancelled:
        waiting[name].cancel()
    await asyncio.sleep(0.3)
    engines.dead |= {3}
    await asyncio.gather(*waiting.values(), return_exceptions=True)
    gone = {name for name, one in waiting.items() if one.cancelled()}
    assert gone <= set(cancelled) and len(gone) > 80, "some were finished already"
    for name, one in waiting.items():
        if name not in gone:
            group = one.result()
            assert (group.request_id, group.token_ids.tolist()) == (name, [int(name) % 50] * 3)
    assert (client.num_deaths, outstanding(client), sorted(engines.left_out)) == (2, 0, [1, 3])
    assert client.num_reissued > 60


@on_clock
async def test_a_recall_reaches_requests_whose_engine_dies_meanwhile():
    desk = Desk(FakeEngines(world_size=2, per_turn=0))
    desk.submit(1, 1, 1, 1)
    await settle()
    desk.engines.dead = {1}
    recalled = await desk.recall("0", "1", "2", "3")
    assert names(recalled) == ["0", "1", "2", "3"]
    partial = [bool(one.request.partial) for one in recalled]
    assert partial == [True, False, True, False], "1 and 3 start over"
    assert (outstanding(desk.client), desk.engines.calls) == (0, [])


@on_clock
async def test_the_death_of_the_last_engine_is_an_error_of_all_who_wait():
    desk = Desk(FakeEngines(world_size=2))
    (first, second) = desk.submit(1, 1)
    await settle()
    desk.engines.dead = {0, 1}
    pause = asyncio.ensure_future(desk.client.pause())
    await desk.advance()
    for waiting in (first, second, pause, desk.client.recall(), *desk.submit(1, first=9)):
        with pytest.raises(WorkerDied, match="actor_infer rank 1 died in 'advance'"):
            await waiting


@on_clock
async def test_an_engine_without_room_does_not_keep_the_others_from_work():
    desk = Desk(FakeEngines(world_size=2, per_turn=0), max_running_requests=2)
    desk.submit(1, 9, 1, 1, 1)
    # By samples alone every further request belongs to engine 0, which has two already.
    await desk.advance(4)
    assert {id_: desk.engines.seen[id_][0] for id_ in "0123"} == {"0": 0, "1": 1, "2": 0, "3": 1}
    assert "4" not in desk.engines.seen


class ByFirstToken:
    """A router of a user's own: by the prompt, as far as there is room."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def choose(self, request: GenerationRequest, engines: Sequence[EngineAccount]) -> int:
        wanted = request.prompt_token_ids[0] + self.shift
        return next((e.rank for e in engines if e.rank == wanted), engines[-1].rank)


class NotThere:
    def choose(self, request: GenerationRequest, engines: Sequence[EngineAccount]) -> int:
        return 7


@on_clock
async def test_a_router_of_your_own_chooses_among_the_engines_with_room():
    router = build_router("tests.rollout.test_engines.ByFirstToken", {"shift": -1})
    desk = Desk(FakeEngines(world_size=3, per_turn=0), max_running_requests=2, router=router)
    for i, token in enumerate([1, 1, 1, 3, 9, 2]):
        desk.give(GenerationRequest(str(i), [token], PARAMS))
    assert await desk.advance() == []
    assert [desk.engines.seen[str(i)][0] for i in range(6)] == [0, 0, 2, 2, 1, 1]


@on_clock
async def test_routers_that_do_not_work_are_refused():
    with pytest.raises(ValueError, match="does not fit PromptAffinityRouter"):
        build_router("PromptAffinityRouter", {"shift": 1})
    with pytest.raises(ValueError, match="cannot be imported"):
        build_router("tests.rollout.no_such.Router", {})
    with pytest.raises(ValueError, match="no method choose"):
        build_router("tests.rollout.fake_clusters.FakeRewards", {"score": None})
    (generation,) = Desk(FakeEngines(), 2, router=NotThere()).submit(1)
    with pytest.raises(ValueError, match="the router chose engine 7 for request '0'; those with room are 0"):
        await generation


@on_clock
async def test_a_dead_engine_is_started_again_and_takes_part_when_it_is_ready():
    desk = Desk(FakeEngines(world_size=2, per_turn=1), max_restarts=2)
    client, engines = desk.client, desk.engines
    desk.submit(1, 1, 1, 1)
    await settle()
    engines.dead = {0}
    await desk.advance()
    client.readmit()
    assert (client.num_engines, len(engines.restarts), engines.left_out) == (1, 1, [0]), "it is not ready"
    engines.restarts[0].is_done = True
    engines.restarts[0].error = WorkerDied("actor_infer", "initialize", 0.0, [RankReport(0)], [])
    client.readmit()
    assert (client.num_engines, len(engines.restarts)) == (1, 2), "it failed, and is tried once more"
    engines.restarts[1].is_done = True
    client.readmit()
    assert (client.num_engines, engines.left_out) == (2, [])
    desk.submit(1, 1, 1, 1, first=10)
    await settle()
    while engines.calls:
        await desk.advance()
    assert sorted(desk.done) == ["0", "1", "10", "11", "12", "13", "2", "3"]
    assert engines.seen["10"][0] == 0, "the engine that is back has the least to do"
    engines.dead = {0}
    desk.submit(1, 1, first=20)
    await desk.advance()
    assert len(engines.restarts) == 2, "twice is all that it may"


class LostForGood(FakeEngines):
    """None of them starts again."""

    def restart(self, rank):
        restart = super().restart(rank)
        restart.error = WorkerDied("actor_infer", "initialize", 0.0, [RankReport(rank)], [])
        return restart


def test_the_last_engine_is_lost_while_another_fails_to_start():
    """Nobody waits for ever, in whichever pass of the event loop it happens."""

    @on_clock
    async def play(passes: int) -> None:
        desk = Desk(LostForGood(world_size=2), max_restarts=1, fixed_weights=True)
        desk.client._restarts_left[1] = 0
        waiting = desk.submit(1, 1)
        await settle()
        desk.engines.dead = {0, 1}
        first, second = desk.engines.calls
        first.release()
        await settle(passes)
        second.release()
        await settle(40)
        assert desk.client.failure is not None
        for generation in waiting:
            with pytest.raises(WorkerDied):
                await generation

    for passes in range(16):
        play(passes)


class ScoringEngines(FakeEngines):
    """Score prompts at once."""

    def submit(self, rank, method, argument):
        if method is not EngineWorker.prompt_score:
            return super().submit(rank, method, argument)
        call = FakeCall(rank, method.__name__, argument, lambda: "scored")
        call.release()
        return call


@on_clock
async def test_a_prompt_to_be_scored_waits_for_an_engine_that_is_being_started_again():
    desk = Desk(ScoringEngines(), max_restarts=1, fixed_weights=True)
    desk.submit(1)
    await settle()
    desk.engines.dead = {0}
    for call in list(desk.engines.calls):
        call.release()
    await settle(3)
    assert desk.client.num_engines == 0
    assert await desk.client.prompt_score([1, 2], 1) == "scored"


@on_clock
async def test_the_last_engine_may_come_back_where_weights_never_change():
    """Those who wait, wait for it; when it cannot be started any more, the loss is theirs."""
    desk = Desk(FakeEngines(per_turn=1), max_restarts=1, fixed_weights=True)
    desk.submit(1, 1)
    await settle()
    desk.engines.dead = {0}
    await desk.advance()
    await settle(40)
    assert (desk.client.num_engines, desk.client.num_deaths, desk.client.failure) == (1, 1, None)
    assert await desk.advance(2) == ["0", "1"]
    (again,) = desk.submit(1, first=9)
    await settle()
    desk.engines.dead = {0}
    await desk.advance()
    with pytest.raises(WorkerDied):
        await again
