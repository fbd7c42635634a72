from roll.rollout.engines import EnginePool
from roll.strategies.generation import GenerationRequest, SamplingParams
from tests.rollout.fake_clusters import FakeEngines

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
