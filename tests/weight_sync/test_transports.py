"""Every transport carries every tensor, and every mistake on the way is found and named."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from roll.weight_sync.encoding import BucketHeader, Update, WeightSyncError, iter_buckets
from roll.weight_sync.sender import WeightSender
from roll.weight_sync.storage_transports import ObjectStoreSender, TensorBundle
from roll.weight_sync.transports import Link, Receiver
from tests.weight_sync.local_engines import TRANSPORTS, LocalEngines, World, local_sender

Weights = dict[str, torch.Tensor]


def make_weights(seed: int = 0) -> Weights:
    """Small and large tensors, several types, one that is not contiguous, an empty one and a scalar."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(300, 1000, generator=generator),  # above the size that is sent by itself
        "first.norm": torch.randn(64, generator=generator),
        "second.norm": torch.randn(64, generator=generator),
        "half": torch.randn(33, 17, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(40, 30, generator=generator).t(),
        "steps": torch.randint(0, 99, (7,), generator=generator),
        "empty": torch.zeros(0, 3),
        "scalar": torch.randn((), generator=generator),
    }


def make_world(transport: str, folder: Path) -> World:
    return World(transport, folder, make_weights(), bucket_bytes=4096)


@pytest.fixture(params=TRANSPORTS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = make_world(request.param, tmp_path)
    yield made
    made.links.close()


def test_an_engine_has_let_go_of_a_bucket_when_the_transport_settles() -> None:
    """A mapping of another process's memory ends with the last tensor in it, and must end before the answer."""
    world = make_world("object_store", Path())
    held: list[weakref.ref[torch.Tensor]] = []
    (first, _) = world.links.receivers

    class Watched(Receiver):
        def receive(self, payload: TensorBundle) -> dict[str, torch.Tensor]:
            tensors = {name: tensor.clone() for name, tensor in payload.tensors.items()}
            held.extend(map(weakref.ref, tensors.values()))
            return tensors

        def settle(self) -> None:
            assert [ref for ref in held if ref() is not None] == []

    link = Link(ObjectStoreSender.receiver)
    first._connections[ObjectStoreSender.receiver] = link, Watched()
    world.send(make_weights(1), version=0)
    world.assert_held(make_weights(1), 0)
    assert held
    world.links.close()


def test_updates_arrive(world: World) -> None:
    first, second = make_weights(1), make_weights(2)
    report = world.send(first, version=0)
    world.assert_held(first, 0)
    assert report.num_tensors == len(first)
    assert report.num_bytes == sum(tensor.nbytes for tensor in first.values())
    assert report.num_buckets > 2
    world.send(second, version=1, bucket_bytes=2**30)
    world.assert_held(second, 1)
    assert not list(world.folder.rglob("*.safetensors")), "what was sent is deleted"


def spoilt(tensors: Weights, fault: str) -> Weights:
    first, second = "first.norm", "second.norm"
    if fault == "corrupt":
        return {name: tensor + 1e-6 if name == first else tensor for name, tensor in tensors.items()}
    if fault == "drop":
        return {} if first in tensors else tensors
    if fault == "swap":
        return tensors | ({first: tensors[second], second: tensors[first]} if first in tensors else {})
    return {name: make_weights(1)[name] if name == second else tensor for name, tensor in tensors.items()}


@pytest.mark.default_rows("*object_store*", "*drop*")
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("corrupt", r"in 1 of 8 tensors \(first.norm\)$"),
        ("drop", r"\(embedding, first.norm, second.norm, half, transposed, ...\); 8 of them never arrived"),
        ("swap", r"in 2 of 8 tensors \(first.norm, second.norm\)"),
        ("replay", r"in 1 of 8 tensors \(second.norm\)$"),
    ],
)
def test_wrong_tensors_are_named(world: World, fault: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world.send(make_weights(1), version=0)
    engine = world.engines[1]
    take = engine.update_weights
    monkeypatch.setattr(engine, "update_weights", lambda tensors: take(spoilt(dict(tensors), fault)))
    message = f"weight update 1: engine 1 holds other values than the trainer sent .*{expected}"
    with pytest.raises(WeightSyncError, match=message):
        world.send(make_weights(2), version=1, bucket_bytes=2**30)
    monkeypatch.undo()
    world.send(make_weights(3), version=2)
    world.assert_held(make_weights(3), 2)


def test_a_bucket_of_an_older_update_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = world.links.receivers[1]
    take = receiver.update
    monkeypatch.setattr(receiver, "update", lambda header, payload: take(BucketHeader(3, header.index), payload))
    with pytest.raises(WeightSyncError, match=r"weight update 4: engine 1 .*embedding belongs to weight update 3"):
        world.send(make_weights(), version=4)


def test_an_engine_that_does_not_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.send(make_weights(), version=0)  # forms the connections, which takes a while on a busy machine
    done = threading.Event()
    monkeypatch.setattr(world.engines[1], "update_weights", lambda tensors: done.wait(30))
    with pytest.raises(WeightSyncError, match="weight update 1: engine 1 was not done with 'update_weights' in time"):
        world.send(make_weights(), version=1, deadline=0.5)
    done.set()


def test_an_engine_that_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.engines[1], "update_weights", Mock(side_effect=RuntimeError("no room")))
    buckets = iter_buckets(make_weights().items(), 4096)
    with pytest.raises(WeightSyncError, match="weight update 0: engine 1 failed in 'update_weights': no room"):
        world.sender.send(buckets, world.links, Update(0, 20))
    assert list(buckets), "ranks that gather them can go on to the end"
    monkeypatch.undo()
    world.send(make_weights(5), version=1)
    world.assert_held(make_weights(5), 1)
    assert not list(world.folder.rglob("*.safetensors"))


def test_a_group_is_formed_anew_for_other_engines_and_for_each_transport_a_connection_is_kept(tmp_path: Path) -> None:
    world = make_world("broadcast", tmp_path)
    world.send(make_weights(1), version=0)
    fewer = LocalEngines(world.engines[:1])
    world.sender.send(iter_buckets(make_weights(2).items(), 4096), fewer, Update(1, 20))
    assert torch.equal(world.engines[0].weights["embedding"], make_weights(2)["embedding"])
    assert torch.equal(world.engines[1].weights["embedding"], make_weights(1)["embedding"])
    by_file = WeightSender(local_sender("safetensors", tmp_path))
    by_file.send(iter_buckets(make_weights(3).items(), 4096), world.links, Update(2, 20))
    world.assert_held(make_weights(3), 2)
    world.send(make_weights(4), version=3)
    world.assert_held(make_weights(4), 3)
    world.links.close()
    fewer.close()


def test_files_of_an_interrupted_run_are_deleted_and_one_cut_short_is_named(tmp_path: Path) -> None:
    stale = tmp_path / "weights/update-7"
    stale.mkdir(parents=True)
    (stale / "bucket-00000.safetensors").write_bytes(b"half")
    world = make_world("safetensors", tmp_path)
    world.send(make_weights(), version=8)
    assert list((tmp_path / "weights").iterdir()) == []
    take = world.links.receivers[0].update

    def cut(header: BucketHeader, payload: str) -> None:
        short = tmp_path / "short"
        short.write_bytes(Path(payload).read_bytes()[:-9])
        short.replace(payload)  # not in place, where the other engine may be reading
        take(header, payload)

    world.links.receivers[0].update = cut  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"weight update 9: engine 0 failed in 'update_weights'.*ncomplete"):
        world.send(make_weights(), version=9)
