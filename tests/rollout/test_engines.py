from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from roll.distributed import DeadlineExceeded, WorkerDied, WorkerFailed
from roll.distributed.failures import RankReport
from roll.rollout.engines import EnginePool
from roll.rollout.routing import EngineLoad, build_router
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from tests.rollout.fake_clusters import FakeCall, FakeEngines

PARAMS = SamplingParams(max_new_tokens=4)


def requests(*sizes: int, first: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(str(first + i), [i], PARAMS, size) for i, size in enumerate(sizes)]


def advance(pool: EnginePool, times: int = 1) -> list[str]:
    """Let every engine finish its turn; the ids of the groups that came back."""
    return [group.request_id for _ in range(times) for call in pool.pending for group in pool.take(call)]


def test_requests_go_to_the_engine_with_the_fewest_samples():
    engines = FakeEngines(world_size=2)
    pool = EnginePool(engines, 100)
    pool.submit(requests(8, 2, 2, 2, 4))
    assert pool.num_outstanding == 18
    assert sorted(advance(pool, 2)) == ["0", "1", "2", "3", "4"]
    assert [engines.seen[str(i)][0] for i in range(5)] == [0, 1, 1, 1, 1]


def test_engines_work_until_nothing_is_left():
    pool = EnginePool(FakeEngines(world_size=2, per_turn=1), 100)
    pool.submit(requests(1, 1, 1, 1, 1))
    assert len(advance(pool)) == 2
    assert len(pool.pending) == 2
    assert len(advance(pool, 2)) == 3
    assert pool.pending == []
    assert pool.num_outstanding == 0
    assert pool.busy_seconds == 0.5 * 5, "five turns of half a second"


def test_requests_given_during_a_turn_go_with_the_next():
    engines = FakeEngines()
    pool = EnginePool(engines, 100)
    pool.submit(requests(1))
    pool.submit(requests(1, first=5))
    assert len(pool.pending) == 1
    assert advance(pool) == ["0"]
    assert advance(pool) == ["5"]


def test_aborted_requests_never_come_back():
    engines = FakeEngines(per_turn=1)
    pool = EnginePool(engines, 100)
    pool.submit(requests(1, 1, 1))
    pool.submit(requests(1, first=7))
    pool.abort(["1", "7", "unknown"])
    assert pool.num_outstanding == 2
    assert advance(pool, 4) == ["0", "2"]
    assert engines.aborted == ["1"], "the one that was still on its way is dropped here"
    assert "7" not in engines.seen
    assert pool.pending == []


def test_a_group_that_was_finished_when_it_was_aborted_is_dropped():
    engines = FakeEngines()
    pool = EnginePool(engines, 100)
    pool.submit(requests(1, 1))
    pool.abort(["0"])
    assert advance(pool, 2) == ["1"]


def test_other_calls_give_nothing():
    pool = EnginePool(FakeEngines(), 100)
    assert pool.take(object()) == []


def test_an_engine_has_no_more_requests_in_hand_than_it_may():
    engines = FakeEngines(world_size=2, per_turn=1)
    pool = EnginePool(engines, max_running_requests=2)
    pool.submit(requests(1, 1, 1, 1, 1, 1, 1))
    pool.abort(["5"])
    assert pool.num_outstanding == 6
    done = []
    while pool.pending:
        done += advance(pool)
        assert max(len(held) for held in engines.held) <= 2
    assert sorted(done) == ["0", "1", "2", "3", "4", "6"]
    assert "5" not in engines.seen, "it was still waiting when it was aborted"


@pytest.fixture
def engines_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeEngines]:
    """Fake engines whose calls the pool can wait for."""

    def make(**options: Any) -> FakeEngines:
        engines = FakeEngines(**options)
        monkeypatch.setattr("roll.rollout.engines.wait_any", engines.wait_any)
        return engines

    return make


def ids(recalled: list[GenerationRequest]) -> list[str]:
    return [request.request_id for request in recalled]


def test_recalled_requests_come_back_with_what_they_have_and_go_on_elsewhere(engines_of):
    engines = engines_of(world_size=2, per_turn=0)
    pool = EnginePool(engines, max_running_requests=2)
    pool.submit(requests(2, 2, 2, 2, 2, 2))
    assert advance(pool, 3) == []
    recalled = pool.recall(["4", "1", "0", "unknown"])
    assert ids(recalled) == ["4", "1", "0"], "in the order asked for; 4 was waiting for room"
    # The recall waited for the turn that was in flight; the turn that recalled generated nothing.
    assert [len(r.partial[0].token_ids) if r.partial else 0 for r in recalled] == [0, 4, 4]
    assert pool.num_outstanding == 6
    assert sorted(id_ for held in engines.held for id_ in held) == ["2", "3"]
    engines.per_turn = 10
    pool.submit(recalled)
    assert sorted(advance(pool, 3)) == ["0", "1", "2", "3", "4", "5"]
    assert len(engines.seen["0"][1].partial[0].token_ids) == 4, "the engine was told what the sample has"
    assert pool.num_outstanding == 0


def test_what_is_finished_when_it_is_recalled_is_a_group(engines_of):
    engines = engines_of(per_turn=1)
    pool = EnginePool(engines, 100)
    pool.submit(requests(1, 1))
    assert ids(pool.recall()) == ["1"], "the turn in flight finished 0"
    assert [group.request_id for group in pool.take_ready()] == ["0"]
    assert pool.pending == []
    assert pool.recall() == []


def test_a_request_that_came_back_may_be_given_again_at_once(engines_of):
    engines = engines_of(per_turn=0)
    pool = EnginePool(engines, 100)
    pool.submit(requests(1, 1))
    for _ in range(3):
        advance(pool)
        pool.submit(pool.recall())
    assert len(pool.recall()[0].partial[0].token_ids) == 7
    assert all(not held for held in engines.held)


def test_engines_keep_their_samples_over_a_pause(engines_of):
    engines = engines_of(world_size=2, per_turn=1)
    pool = EnginePool(engines, 100)
    pool.submit(requests(1, 1, 1, 1, 1))
    pool.pause(deadline=1.0)
    assert pool.pending == []
    assert engines.calls == [], "weights may be exchanged"
    pool.submit(requests(1, first=8))
    assert pool.pending == []
    assert sorted(group.request_id for group in pool.take_ready()) == ["0", "1"], "ended while the pause came"
    assert ids(pool.recall(["3"])) == ["3"]
    assert [len(held) for held in engines.held] == [2, 0], "recalled without generating anything"
    assert pool.pending == []
    pool.abort(["4"])
    assert pool.pending == []
    pool.resume()
    assert len(pool.pending) == 2
    assert sorted(advance(pool, 4)) == ["2", "8"]
    assert engines.aborted == ["4"]


@pytest.mark.parametrize("loss", [WorkerDied, WorkerFailed, DeadlineExceeded])
def test_requests_of_a_lost_engine_go_to_the_others_and_nothing_is_lost(engines_of, loss):
    engines = engines_of(world_size=3, per_turn=1, loss=loss)
    pool = EnginePool(engines, 100)
    pool.submit(requests(1, 1, 1, 1, 1, 1, 1, 1, 1))
    done = advance(pool)
    engines.dead = {0, 2}
    other = FakeCall(9, "score", None, lambda: None)
    while pool.pending:
        finished = pool.wait([other], timeout=1.0)
        assert other in finished
        done += [group.request_id for call in finished for group in pool.take(call)]
    assert sorted(done) == [str(i) for i in range(9)], "each once"
    assert (pool.num_deaths, pool.num_engines, pool.num_reissued) == (2, 1, 5), "one of them twice"
    assert engines.left_out == [0, 2]
    pool.submit(requests(1, first=20))
    assert advance(pool) == ["20"]


def test_a_recall_reaches_requests_whose_engine_dies_meanwhile(engines_of):
    engines = engines_of(world_size=2, per_turn=0)
    pool = EnginePool(engines, 100)
    pool.submit(requests(1, 1, 1, 1))
    engines.dead = {1}
    recalled = pool.recall(["0", "1", "2", "3"])
    assert ids(recalled) == ["0", "1", "2", "3"]
    assert [bool(request.partial) for request in recalled] == [True, False, True, False], "1 and 3 start over"
    assert (pool.num_outstanding, pool.pending) == (0, [])


def test_an_engine_may_die_in_a_pause(engines_of):
    engines = engines_of(world_size=2, per_turn=0)
    pool = EnginePool(engines, 100)
    pool.submit(requests(1, 1))
    engines.dead = {0}
    pool.pause()
    assert pool.pending == []
    engines.per_turn = 10
    pool.resume()
    assert advance(pool, 2) == ["1", "0"]


def test_the_death_of_the_last_engine_is_an_error(engines_of):
    engines = engines_of(world_size=2)
    pool = EnginePool(engines, 100)
    pool.submit(requests(1, 1))
    engines.dead = {0, 1}
    with pytest.raises(WorkerDied, match="actor_infer rank 1 died in 'advance'"):
        pool.wait(timeout=1.0)


def test_a_dead_worker_that_is_no_engine_is_an_error(engines_of):
    engines = engines_of()
    pool = EnginePool(engines, 100)
    pool.submit(requests(1))
    other = FakeCall(3, "score", None, lambda: None, WorkerDied("rewards", "score", 0.0, [RankReport(3)], []))
    with pytest.raises(WorkerDied, match="rewards rank 3"):
        pool.wait([other])
    assert pool.num_engines == 1


def test_an_engine_without_room_does_not_keep_the_others_from_work():
    engines = FakeEngines(world_size=2, per_turn=0)
    pool = EnginePool(engines, max_running_requests=2)
    pool.submit(requests(1, 9, 1, 1, 1))
    # By samples alone every further request belongs to engine 0, which has two already.
    assert {id_: engines.seen[id_][0] for id_ in "0123" if advance(pool) == []} == {"0": 0, "1": 1, "2": 0, "3": 1}
    assert "4" not in engines.seen


class ByFirstToken:
    """A router of a user's own: by the prompt, as far as there is room."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def choose(self, request: GenerationRequest, engines: Sequence[EngineLoad]) -> int:
        wanted = request.prompt_token_ids[0] + self.shift
        return next((e.rank for e in engines if e.rank == wanted), engines[-1].rank)


class NotThere:
    def choose(self, request: GenerationRequest, engines: Sequence[EngineLoad]) -> int:
        return 7


def test_a_router_of_your_own_chooses_among_the_engines_with_room():
    engines = FakeEngines(world_size=3, per_turn=0)
    router = build_router("tests.rollout.test_engines.ByFirstToken", {"shift": -1})
    pool = EnginePool(engines, max_running_requests=2, router=router)
    pool.submit(GenerationRequest(str(i), [token], PARAMS) for i, token in enumerate([1, 1, 1, 3, 9, 2]))
    assert advance(pool) == []
    assert [engines.seen[str(i)][0] for i in range(6)] == [0, 0, 2, 2, 1, 1]


def test_routers_that_do_not_work_are_refused():
    with pytest.raises(ValueError, match="does not fit PromptAffinityRouter"):
        build_router("PromptAffinityRouter", {"shift": 1})
    with pytest.raises(ValueError, match="cannot be imported"):
        build_router("tests.rollout.no_such.Router", {})
    with pytest.raises(ValueError, match="no method choose"):
        build_router("tests.rollout.fake_clusters.FakeRewards", {"score": None})
    pool = EnginePool(FakeEngines(), 2, router=NotThere())
    with pytest.raises(ValueError, match="the router chose engine 7 for request '0'; those with room are 0"):
        pool.submit(requests(1))


def test_a_dead_engine_is_started_again_and_takes_part_when_it_is_ready(engines_of):
    engines = engines_of(world_size=2, per_turn=1)
    pool = EnginePool(engines, 100, max_restarts=2)
    pool.submit(requests(1, 1, 1, 1))
    engines.dead = {0}
    done = [group.request_id for call in pool.wait() for group in pool.take(call)]
    pool.readmit()
    assert (pool.num_engines, len(engines.restarts), engines.left_out) == (1, 1, [0]), "it is not ready"
    engines.restarts[0].is_done = True
    engines.restarts[0].error = WorkerDied("actor_infer", "initialize", 0.0, [RankReport(0)], [])
    pool.readmit()
    assert (pool.num_engines, len(engines.restarts)) == (1, 2), "it failed, and is tried once more"
    engines.restarts[1].is_done = True
    pool.readmit()
    assert (pool.num_engines, engines.left_out) == (2, [])
    pool.submit(requests(1, 1, 1, 1, first=10))
    while pool.pending:
        done += advance(pool)
    assert sorted(done) == ["0", "1", "10", "11", "12", "13", "2", "3"]
    assert engines.seen["10"][0] == 0, "the engine that is back has the least to do"
    engines.dead = {0}
    pool.submit(requests(1, 1, first=20))
    pool.wait()
    assert len(engines.restarts) == 2, "twice is all that it may"
