"""Real gloo between real workers, and what the driver says when one of them is lost."""

from __future__ import annotations

import os
import time

import pytest

from roll.distributed import DeadlineExceeded, WorkerDied, WorkerFailed


@pytest.mark.parametrize("ranks", [1, 4])
def test_all_reduce(make_cluster, ranks):
    cluster = make_cluster("CollectiveWorker", devices=list(range(ranks)))
    cluster.initialize()
    cluster.initialize()  # a second time does nothing
    assert cluster.rank_sum() == [ranks * (ranks + 1) / 2] * ranks
    pids = [address.pid for address in cluster.addresses]
    cluster.shutdown()
    _assert_gone(pids)


@pytest.mark.parametrize(("how", "ranks"), [("die", 3), ("exit", 2)])
def test_death_while_others_wait_in_a_collective(make_cluster, how, ranks):
    cluster = make_cluster("CollectiveWorker", name="actor_train", devices=list(range(ranks)))
    cluster.initialize()
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        cluster.meet(1, how, deadline=120)
    assert time.monotonic() - began < 60, "it does not wait for the deadline"
    error, message = caught.value, str(caught.value)
    assert (error.cluster, error.method, error.rank) == ("actor_train", "meet", 1)
    assert message.startswith(f"actor_train rank 1 (pid {cluster.addresses[1].pid} on 127.0.0.1) died in 'meet'")
    if how == "die":
        assert "these are my last words" in message
    assert len(message.splitlines()) < 30


def test_exception_while_others_wait_in_a_collective(make_cluster):
    cluster = make_cluster("CollectiveWorker", name="critic", devices=[0, 1])
    cluster.initialize()
    began = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        cluster.meet(1, "fail", deadline=120)
    assert time.monotonic() - began < 60
    message = str(caught.value)
    assert "critic rank 1" in message.splitlines()[0]
    assert message.splitlines()[0].endswith("ValueError: the batch has no column 'scores'")
    assert "in _fail" in message
    assert "no answer from rank 0" in message
    assert len(message.splitlines()) < 30


def test_hang_names_ranks_and_shows_where_they_stand(make_cluster):
    cluster = make_cluster("CollectiveWorker", name="actor_train", devices=[0, 1])
    cluster.initialize()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        cluster.meet(1, "hang", deadline=1.5)
    assert 1.5 <= time.monotonic() - began < 30
    message = str(caught.value)
    assert caught.value.silent_ranks == [0, 1]
    assert "'meet' was not done after" in message
    where = message.split("rank 1 (pid")[1]
    assert "in _hang" in where
    assert "in all_reduce" in message.split("rank 1 (pid")[0]


def test_deadline_and_name_of_a_registration(make_cluster):
    cluster = make_cluster("BasicWorker", devices=[0, 1])
    with pytest.raises(DeadlineExceeded, match="'short nap'"):
        cluster.nap(30)


def test_worker_that_cannot_be_built(make_cluster):
    cluster = make_cluster("BrokenAtStart", name="reference", devices=[0, 1])
    with pytest.raises(WorkerFailed, match=r"reference rank 1 .* 'start' .*OSError: cannot find the model folder"):
        cluster.memory_stats()


def test_unknown_worker_class(make_cluster):
    with pytest.raises(WorkerFailed, match="must be the dotted path of a subclass"):
        make_cluster("time").wait_ready()
    with pytest.raises(WorkerFailed, match="NoSuchWorker"):
        make_cluster("NoSuchWorker").wait_ready()


def test_call_to_a_worker_that_is_gone(make_cluster):
    cluster = make_cluster("BasicWorker", devices=[0, 1])
    os.kill(cluster.addresses[1].pid, 9)
    with pytest.raises(WorkerDied, match="rank 1"):
        cluster.memory_stats()


def _assert_gone(pids: list[int]) -> None:
    give_up = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < give_up, f"still there: {pids}"
        time.sleep(0.05)
