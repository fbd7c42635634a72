"""Real clusters, which share one Ray: placement, calls, collectives, batches, and what is said of a lost worker."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time

import pytest
import ray
import torch

from roll.config.roles import WorkerConfig
from roll.distributed import (
    Cluster,
    DeadlineExceeded,
    DriverLoop,
    PendingCall,
    Worker,
    WorkerDied,
    WorkerFailed,
    wait_any,
)
from roll.distributed.dispatch import chunked, joined
from roll.distributed.guard import is_alive
from roll.protocol import DataProto
from tests.distributed.conftest import worker_path
from tests.distributed.light_workers import BasicWorker, IndependentWorker, Note
from tests.distributed.workers import CollectiveWorker, DataWorker
from tests.support.processes import have_ended


@pytest.fixture(scope="module")
def pair(resources):
    """Two ranks that many tests call, one after the other."""
    role = WorkerConfig(device_mapping=[0, 1], system_envs={"ROLL_TEST_ROLE": "mine"})
    cluster = Cluster("actor", worker_path("BasicWorker"), resources, role)
    yield cluster
    cluster.shutdown(graceful=False)


def test_every_worker_knows_its_place(make_cluster):
    """Also where roles overlap, have several devices a worker, or none."""
    cluster = make_cluster("BasicWorker", devices=[2, 0, 1], seed=7, settings=Note("hello"))
    described = cluster.call_all(BasicWorker.describe).result()
    assert [d["rank"] for d in described] == [0, 1, 2]
    assert [d["devices"] for d in described] == [(2,), (0,), (1,)]
    assert {(d["world_size"], d["seed"], d["note"]) for d in described} == {(3, 7, "hello")}
    assert len({address.pid for address in cluster.addresses}) == 3
    several = make_cluster("BasicWorker", name="several", devices=[3, 1, 0, 2], num_gpus_per_worker=2)
    assert [d["devices"] for d in several.call_all(BasicWorker.describe).result()] == [(3, 1), (0, 2)]
    without = make_cluster("BasicWorker", name="without", world_size=2)
    assert [d["devices"] for d in without.call_all(BasicWorker.describe).result()] == [(), ()]


@pytest.mark.long
def test_environment_of_workers(pair):
    for rank, described in enumerate(pair.call_all(BasicWorker.describe).result()):
        wanted = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "CLUSTER_NAME": "actor",
            "WORKER_NAME": f"actor-{rank}",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "ROLL_TEST_GLOBAL": "everywhere",
            "ROLL_TEST_ROLE": "mine",
        }
        assert wanted.items() <= described["environment"].items()


@pytest.mark.long
def test_a_rank_that_died_is_left_out_and_comes_back_as_a_new_process(make_cluster):
    cluster = make_cluster("IndependentWorker", devices=[2, 0, 1])
    cluster.call_all(IndependentWorker.initialize).result()
    before = [address.pid for address in cluster.addresses]
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(WorkerDied) as death:
        cluster.call_all(IndependentWorker.state).result()
    cluster.leave_out(death.value.rank)
    assert cluster.live_ranks == [0, 2]
    assert cluster.call_all(IndependentWorker.state).result() == [(0, True), (2, True)]
    cluster.restart(1).result(timeout=60)
    assert cluster.call_all(IndependentWorker.state).result() == [(0, True), (2, True)], "not yet"
    cluster.rejoin(1)
    assert cluster.call_all(IndependentWorker.state).result() == [(0, True), (1, True), (2, True)]
    after = [address.pid for address in cluster.addresses]
    assert after[1] != before[1] and (after[0], after[2]) == (before[0], before[2])
    assert cluster.call_all(BasicWorker.describe).result()[1]["devices"] == (0,)
    # One that has not come up, whose address is not known yet, is ended before the next starts.
    cluster.leave_out(2)
    cluster.restart(2)
    slow, _ = cluster._replacements[2]
    cluster.restart(2).result(timeout=60)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(slow.address.remote(), timeout=60)
    cluster.rejoin(2)
    assert cluster.call_all(IndependentWorker.state).result() == [(0, True), (1, True), (2, True)]


@pytest.mark.long
def test_a_process_that_could_not_be_initialised_makes_room_for_the_next(make_cluster, tmp_path):
    """It may hold the memory of the device, with all that it has started."""
    cluster = make_cluster("BrokenAtRestart", devices=[0], settings=Note(str(tmp_path / "processes")))
    cluster.call_all(IndependentWorker.initialize).result()
    cluster.leave_out(0)
    with pytest.raises(WorkerFailed, match="somebody else has the device"):
        cluster.restart(0).result(timeout=60)
    second = list(map(int, (tmp_path / "processes").read_text().split()))[2:]
    assert all(map(is_alive, second))
    cluster.restart(0).result(timeout=60)
    assert not any(map(is_alive, second))
    cluster.rejoin(0)
    assert cluster.call_all(IndependentWorker.state).result() == [(0, True)]


@pytest.mark.parametrize(("devices", "size"), [([0, 4], 1), ([-1], 1), ([0, 1, 0], 1), ([0, 1, 2], 2), ([], 1)])
def test_wrong_device_lists(make_cluster, devices, size):
    with pytest.raises(ValueError, match=rf"^actor\.device_mapping: {re.escape(str(devices))} must name ids of 0 to 3"):
        make_cluster("BasicWorker", name="actor", devices=devices, num_gpus_per_worker=size)


@pytest.mark.long
def test_a_call_may_be_made_while_the_workers_start(make_cluster):
    cluster = make_cluster("BasicWorker", name="threads", devices=[0], max_concurrency=4)
    results = cluster.call_once_built(BasicWorker.echo, "x")
    assert cluster._registrations is None, "it has not waited"
    assert results() == [["x"]]
    broken = make_cluster("BrokenAtStart", name="broken", devices=[0, 1])
    results = broken.call_once_built(BasicWorker.echo, "x")
    with pytest.raises(WorkerFailed, match="cannot find the model folder") as failure:
        results()
    assert (failure.value.method, failure.value.rank) == ("start", 1)


def test_plain_dispatch_modes(pair):
    assert pair.call_all(BasicWorker.echo, "x", times=2).result() == [["x", "x"], ["x", "x"]]
    assert pair.call_each(BasicWorker.add, [1, 2], right=[10, 20]).result() == [11, 22]
    assert pair.call(BasicWorker.who).result() == 0
    with pytest.raises(ValueError, match=r"argument 0: .* 2 ranks, got 3 entries"):
        pair.call_each(BasicWorker.add, [1, 2, 3], right=[0, 0])


def test_non_blocking_calls_and_references(pair):
    call = pair.call_all(BasicWorker.echo, [1, 2])
    assert call.result() == [[[1, 2]], [[1, 2]]]
    assert call.done()
    # A reference stands for its value in a further call.
    first = pair.submit(0, BasicWorker.unregistered, 5)
    assert pair.submit(1, BasicWorker.unregistered, first.refs[0]).result() == 6


@pytest.mark.long
def test_wait_any_returns_what_is_done(make_cluster):
    slow = make_cluster("BasicWorker", name="slow", devices=[0])
    quick = make_cluster("BasicWorker", name="quick", devices=[0])
    napping = slow.submit(0, BasicWorker.nap, 60.0)
    answers = [quick.submit(0, BasicWorker.unregistered, i) for i in range(3)]
    seen = {}
    while not seen.keys() >= set(answers):  # on a busy machine the nap may end first
        pending = [call for call in [napping, *answers] if call not in seen]
        for call in wait_any(pending):
            seen[call] = call.result()
    assert [seen[call] for call in answers] == [0, 1, 2]
    late = quick.submit(0, BasicWorker.nap, 0.1)
    assert wait_any([napping, late]) == [late]
    with pytest.raises(ValueError, match="no call is pending"):
        wait_any([])


async def awaited(calls: list[PendingCall]) -> list[object]:
    return await asyncio.gather(*calls, return_exceptions=True)


def test_calls_are_awaited_many_at_a_time_without_threads(pair):
    calls = [pair.submit(i % 2, BasicWorker.unregistered, i) for i in range(200)]
    both = pair.call_all(BasicWorker.echo, [1, 2])
    threads = threading.active_count()
    assert asyncio.run(awaited([*calls, both])) == [*(i + i % 2 for i in range(200)), [[[1, 2]], [[1, 2]]]]
    assert threading.active_count() <= threads + 1
    assert asyncio.run(awaited([calls[0], both])) == [0, both.result()], "once more, and when it is answered"


@pytest.mark.long
def test_an_awaited_call_fails_as_a_blocking_one(make_cluster):
    failing = make_cluster("BasicWorker", name="failing", devices=[0, 1])
    dying = make_cluster("BasicWorker", name="dying", devices=[0])
    raised = failing.submit(0, BasicWorker.unregistered, "text")
    late = failing.submit(1, BasicWorker.nap, 60.0).within(0.5)
    napping = dying.submit(0, BasicWorker.nap, 60.0)
    os.kill(dying.addresses[0].pid, signal.SIGKILL)
    failed, overdue, died = asyncio.run(awaited([raised, late, napping]))
    assert isinstance(failed, WorkerFailed) and "TypeError" in str(failed)
    assert isinstance(overdue, DeadlineExceeded) and overdue.silent_ranks == [1]
    assert isinstance(died, WorkerDied) and died.cluster == "dying"
    for call, error in ((raised, failed), (late, overdue), (napping, died)):
        assert call.error is error
        with pytest.raises(type(error)):
            call.result()
    with pytest.raises(DeadlineExceeded, match="'short nap'"):  # deadline and name of its registration
        failing.call_all(BasicWorker.nap, 30).result()


@pytest.mark.long
def test_coroutines_go_on_while_the_driver_waits_for_a_result(pair):
    driver, seen = DriverLoop(), []

    async def go_on() -> None:
        for i in range(3):
            seen.append(await pair.submit(1, BasicWorker.unregistered, i))

    async def fail() -> None:
        await pair.submit(1, BasicWorker.unregistered, 0)
        raise LookupError("of a coroutine")

    try:
        driver.spawn(go_on())
        pair.submit(0, BasicWorker.nap, 1.0).result()
        assert seen == [1, 2, 3]
        driver.spawn(fail())
        with pytest.raises(LookupError, match="of a coroutine"):
            pair.submit(0, BasicWorker.nap, 60.0).result()
        left = driver.spawn(asyncio.sleep(60))
    finally:
        driver.close()
    assert left.cancelled()
    assert pair.submit(1, BasicWorker.unregistered, 1).result() == 2, "without a loop as well"


def test_calls_that_the_ranks_do_not_know(pair):
    def ecco(worker: BasicWorker) -> None: ...

    with pytest.raises(AttributeError, match=r"'actor' register no method 'ecco'; did you mean 'echo'"):
        pair.call_all(ecco)
    with pytest.raises(TypeError, match=r"'echo' of 'actor' is registered with Dispatch.ONE_TO_ALL: use cluster.call_"):
        pair.call(BasicWorker.echo, 1)
    with pytest.raises(TypeError, match=r"Dispatch\.RANK_ZERO: use cluster\.call$"):
        pair.call_all(BasicWorker.who)


@pytest.mark.long
def test_settings_of_another_kind(make_cluster):
    cluster = make_cluster("BasicWorker", name="scorer", settings=WorkerConfig())
    with pytest.raises(
        WorkerFailed, match="scorer: BasicWorker was started with settings of the type WorkerConfig; it"
    ):
        cluster.wait_ready()


@pytest.mark.long
def test_class_instead_of_path(resources):
    class Local(BasicWorker):
        def unregistered(self, value: int) -> int:
            return 1000 + value

    cluster = Cluster("local", Local, resources, WorkerConfig())
    assert cluster.world_size == 1
    assert cluster.submit(0, BasicWorker.unregistered, 1).result() == 1001
    pids = [address.pid for address in cluster.addresses]
    cluster.shutdown()
    assert have_ended(pids)


@pytest.mark.long
def test_a_process(make_cluster, worker_logs):
    """Its log, its memory, and garbage, which is collected again after the first call."""
    cluster = make_cluster("BasicWorker", name="chatty", devices=[0])
    assert cluster.call_all(BasicWorker.collects_garbage).result() == [False]
    assert cluster.call_all(BasicWorker.collects_garbage).result() == [True]
    assert cluster.call_all(Worker.peak_memory).result()[0] > 1 << 20
    assert cluster.addresses[0].log_file == str(worker_logs / "chatty-0.log")


@pytest.mark.long
@pytest.mark.default_rows("die-*")
@pytest.mark.parametrize(("how", "ranks"), [("die", 2), ("exit", 2)])
def test_death_while_others_wait_in_a_collective(make_cluster, how, ranks):
    cluster = make_cluster("CollectiveWorker", name="actor_train", devices=list(range(ranks)))
    cluster.call_all(CollectiveWorker.initialize).result()
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        cluster.call_all(CollectiveWorker.meet, 1, how).within(120).result()
    assert time.monotonic() - began < 60, "it does not wait for the deadline"
    error, message = caught.value, str(caught.value)
    assert (error.cluster, error.method, error.rank) == ("actor_train", "meet", 1)
    assert message.startswith(f"actor_train rank 1 (pid {cluster.addresses[1].pid} on 127.0.0.1) died in 'meet'")
    if how == "die":
        assert "these are my last words" in message
    assert len(message.splitlines()) < 30


def test_exception_while_others_wait_in_a_collective(make_cluster):
    cluster = make_cluster("CollectiveWorker", name="critic", devices=[0, 1])
    cluster.call_all(CollectiveWorker.initialize).result()
    began = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        cluster.call_all(CollectiveWorker.meet, 1, "fail").within(120).result()
    assert time.monotonic() - began < 60
    message = str(caught.value)
    assert "critic rank 1" in message.splitlines()[0]
    assert message.splitlines()[0].endswith("ValueError: the batch has no column 'scores'")
    assert "in _fail" in message
    assert "no answer from rank 0" in message
    assert len(message.splitlines()) < 30


@pytest.mark.long
def test_all_reduce_and_a_hang_that_names_ranks_and_shows_where_they_stand(make_cluster, worker_logs):
    cluster = make_cluster("CollectiveWorker", name="sums", devices=[0, 1])
    for _ in range(2):  # a second time does nothing
        cluster.call_all(CollectiveWorker.initialize).result()
    assert cluster.call_all(CollectiveWorker.rank_sum).result() == [3.0, 3.0]
    assert "[sums-0]" in (worker_logs / "sums-0.log").read_text()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        cluster.call_all(CollectiveWorker.meet, 1, "hang").within(1.5).result()
    assert 1.5 <= time.monotonic() - began < 30
    message = str(caught.value)
    assert caught.value.silent_ranks == [0, 1]
    assert "'meet' was not done after" in message
    where = message.split("rank 1 (pid")[1]
    assert "in _hang" in where
    assert "in all_reduce" in message.split("rank 1 (pid")[0]


@pytest.mark.long
def test_a_process_that_cannot_start_is_explained_by_what_it_wrote(make_cluster, monkeypatch):
    monkeypatch.setattr("roll.distributed.cluster._START_SECONDS", 8.0)
    cluster = make_cluster("BasicWorker", system_envs={"PYTHONHOME": "/nowhere"})
    with pytest.raises(DeadlineExceeded, match=r"rank 0 has no process yet(.|\n)*No module named 'encodings'"):
        cluster.wait_ready()


@pytest.mark.long
def test_unknown_worker_class(make_cluster):
    with pytest.raises(WorkerFailed, match="must be the dotted path of a subclass"):
        make_cluster("time").wait_ready()
    with pytest.raises(WorkerFailed, match="NoSuchWorker"):
        make_cluster("NoSuchWorker").wait_ready()


def _batch(rows: int, width: int = 5) -> DataProto:
    generator = torch.Generator().manual_seed(rows)
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(1, 100, (rows, width), generator=generator),
            "attention_mask": torch.ones(rows, width, dtype=torch.bool),
            "response_mask": torch.rand(rows, width, generator=generator) > 0.4,
            "unread": torch.zeros(rows, width),
        },
        meta_info={"note": 7},
    )


@pytest.fixture(scope="module")
def grid(resources):
    """Two replicas of two ranks."""
    made = Cluster("grid", worker_path("GridWorker"), resources, WorkerConfig(device_mapping=list(range(4))))
    yield made
    made.shutdown(graceful=False)


@pytest.mark.long_rows("1")
@pytest.mark.parametrize("rows", [1, 2, 6, 7])
def test_result_and_metrics_do_not_depend_on_ranks(grid, rows):
    """Padding weighs nothing."""
    batch = _batch(rows)
    ids, mask = batch.batch["input_ids"], batch.batch["response_mask"]
    result = grid.call(DataWorker.double, batch, factor=3).result()
    assert torch.equal(result.batch["doubled"], ids * 3) and torch.equal(result.batch["mask"], mask)
    metrics, first_tokens = grid.call(DataWorker.measure, batch).result()
    assert metrics["mean"].value() == pytest.approx(float((ids * mask).sum()) / int(mask.sum()), rel=1e-12)
    assert first_tokens == ids[:, 0].tolist()


def test_data_sources_answer_and_get_the_data(grid):
    batch = _batch(4)
    assert grid.call(DataWorker.rows, _batch(6)).result() == ([0, 2], [3, 3])
    assert grid.call_all(DataWorker.all_rows, _batch(6)).result() == [6, 6, 6, 6]
    result = grid.call(DataWorker.columns_here, batch).result()
    assert torch.equal(result.batch["ids"], batch.batch["input_ids"])
    with_data, without = sorted(batch.batch.keys()), []
    assert grid.call_all(DataWorker.last_seen).result() == [with_data, without, with_data, without]
    with pytest.raises(ValueError, match=r"same number of rows, got \[2, 3\]"):
        grid.call(DataWorker.double, _batch(2), factor=_batch(3))


def test_padding_rows_keep_attention_and_lose_other_masks():
    chunks = chunked(_batch(4), 3)
    assert [len(chunk) for chunk in chunks] == [2, 2, 2]
    assert not chunks[2].batch["response_mask"].any()
    assert chunks[2].batch["attention_mask"].all()
    assert _batch(4).batch["response_mask"].any(), "the batch itself is unchanged"


@pytest.mark.long
def test_joining_other_results():
    assert joined([None, None], 4, 0) is None
    assert joined(["a", "b"], 4, 0) == ["a", "b"]
    assert joined([[1, 2], [3, 4]], 4, 1) == [1, 2, 3]
    assert joined([[1], [2]], 4, 1) == [1, 2], "a list that has no entry a row is not shortened"
