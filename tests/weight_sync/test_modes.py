"""Updates that bring less than everything leave the engines with everything, and their mistakes are found too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from roll.models.lora import DOWN_PART, UP_PART, merged_weight
from roll.weight_sync.encoding import (
    INDICES_PART,
    VALUES_PART,
    WeightSyncError,
    apply_delta,
    changed_elements,
)
from tests.weight_sync.local_engines import TRANSPORTS, World

Weights = dict[str, torch.Tensor]
SCALINGS = {"q.weight": 0.5}


def make_weights(dtype: torch.dtype = torch.bfloat16) -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (500, 40), "q.weight": (64, 32), "norm": (64,), "scalar": (), "empty": (0, 2)}
    return {name: (0.02 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


def nudged(weights: Weights, share: float, seed: int = 1) -> Weights:
    """A share of the elements of every tensor changed, zeros made negative among them."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in weights.items():
        mask = torch.rand(tensor.shape, generator=generator) < share
        changed[name] = torch.where(mask, tensor * 1.5, tensor)
    changed["embedding"][0, :2] = torch.tensor([0.0, -0.0])
    return changed


def make_world(transport: str, folder: Path, delta: bool = False) -> World:
    return World(transport, folder, make_weights(), bucket_bytes=2**14, delta=delta)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def delta_world(transport: str, tmp_path: Path) -> Iterator[World]:
    world = make_world(transport, tmp_path, delta=True)
    yield world
    world.links.close()


def test_delta(delta_world: World) -> None:
    weights = make_weights()
    whole = delta_world.send(weights, 0)
    for version in (1, 2, 3):
        weights = nudged(weights, 0.05, seed=version)
        report = delta_world.send(weights, version, base=version - 1)
        delta_world.assert_held(weights)
        assert report.num_tensors == whole.num_tensors, "all of them are verified"
        assert 0 < report.num_bytes < 0.25 * whole.num_bytes
    assert delta_world.send(weights, 4, base=3).num_bytes == 0, "nothing has changed"
    everything = {name: tensor + 1 for name, tensor in weights.items()}
    assert delta_world.send(everything, 5, base=4).num_bytes == whole.num_bytes, "indices would only add to it"
    delta_world.assert_held(everything)
    assert delta_world.send(everything, 6).num_bytes == whole.num_bytes, "engines that hold nothing get everything"


@pytest.mark.default_rows("*object_store*", "*drop*")
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("corrupt", r"in 1 of 6 tensors \(q.weight\)$"),
        ("drop", r"\(embedding, q.weight, .*\); \d of them never arrived"),
        ("swap", r"in 2 of 6 tensors \(q.weight, key\)$"),
        ("replay", r"in 1 of 6 tensors \(q.weight\)$"),
    ],
)
def test_faults_of_delta_updates_are_named(
    delta_world: World, fault: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_weights()
    first["key"] = first["q.weight"].flip(0)
    for engine in delta_world.engines:
        engine.weights["key"] = torch.zeros(64, 32, dtype=torch.bfloat16)
    delta_world.send(first, 0)
    second = nudged(first, 0.05)
    delta_world.send(second, 1, base=0)
    receiver = delta_world.links.receivers[1]
    take = receiver._whole_tensors

    def spoilt(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        parts = dict(tensors)
        q, key = [(f"{name}{INDICES_PART}", f"{name}{VALUES_PART}") for name in ("q.weight", "key")]
        if fault == "corrupt":
            parts[q[1]] = parts[q[1]].clone()
            parts[q[1]][0] *= 1.01
        elif fault == "drop":
            parts.clear()
        elif fault == "swap":
            for mine, other in zip(q, key, strict=True):
                parts[mine], parts[other] = parts[other], parts[mine]
        else:
            indices = changed_elements(first["q.weight"].flatten(), second["q.weight"].flatten())
            parts[q[0]], parts[q[1]] = indices, second["q.weight"].flatten()[indices]
        yield from take(parts)

    monkeypatch.setattr(receiver, "_whole_tensors", spoilt)
    with pytest.raises(WeightSyncError, match=f"weight update 2: engine 1 holds other values .*{expected}"):
        delta_world.send(nudged(second, 0.05, seed=9), 2, base=1)


def test_tensors_that_are_not_sent_are_verified(tmp_path: Path) -> None:
    world = make_world("object_store", tmp_path)
    weights = make_weights()
    with pytest.raises(WeightSyncError, match="weight update 1 changes version 0; this engine holds none"):
        world.send(weights, 1, base=0)
    whole = world.send(weights, 0)
    trained = {"norm": weights["norm"] + 1}
    report = world.send(trained, 1, base=0)
    assert (report.num_tensors, report.num_bytes) == (whole.num_tensors, trained["norm"].nbytes)
    world.assert_held(weights | trained)
    with pytest.raises(WeightSyncError, match=r"engine 0 .*weight update 3 changes version 2; this engine holds 1"):
        world.send(trained, 3, base=2)
    world.engines[1].weights["embedding"][3, 4] += 1
    with pytest.raises(WeightSyncError, match=r"weight update 2: engine 1 holds .* in 1 of 5 tensors \(embedding\)$"):
        world.send(trained, 2, base=1)


def adapted(weights: Weights, seed: int) -> tuple[Weights, Weights]:
    """Adapters, and the weights of the model that they are merged into."""
    generator = torch.Generator().manual_seed(seed)
    down, up = torch.randn(4, 32, generator=generator).bfloat16(), torch.randn(64, 4, generator=generator).bfloat16()
    parts = {f"q.weight{DOWN_PART}": down, f"q.weight{UP_PART}": up}
    return parts, weights | {"q.weight": merged_weight(weights["q.weight"], down, up, 0.5)}


def test_adapters_apart(transport: str, tmp_path: Path) -> None:
    world = make_world(transport, tmp_path)
    weights = make_weights()
    first, merged = adapted(weights, 1)
    assert world.send(weights | first, 0, scalings=SCALINGS).num_tensors == 7
    world.assert_held(merged)
    for version in (1, 2):
        parts, merged = adapted(weights, version + 1)
        report = world.send(parts, version, base=version - 1, scalings=SCALINGS)
        world.assert_held(merged)
        assert (report.num_tensors, report.num_bytes) == (7, sum(tensor.nbytes for tensor in parts.values()))
    world.links.receivers[1]._parts["q.weight"][5] += 1
    with pytest.raises(WeightSyncError, match=r"weight update 3: engine 1 .* in 1 of 7 tensors \(q.weight\)$"):
        world.send(parts, 3, base=2, scalings=SCALINGS)
    world.links.close()


def test_a_merged_weight_that_an_engine_does_not_hold_is_found(tmp_path: Path) -> None:
    world = make_world("object_store", tmp_path)
    engine, weights = world.engines[1], make_weights()
    take = engine.update_weights

    def spoil(tensors: Mapping[str, torch.Tensor]) -> None:
        take({name: tensor + 1 if name == "q.weight" else tensor for name, tensor in tensors.items()})

    world.send(weights | adapted(weights, 1)[0], 0, scalings=SCALINGS)
    engine.update_weights = spoil  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"weight update 1: engine 1 .* in 1 of 7 tensors \(q.weight\)$"):
        world.send(adapted(weights, 2)[0], 1, base=0, scalings=SCALINGS)
    world.links.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_changed_elements_are_those_whose_bits_differ(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.weight_sync.encoding._CHUNK", 64)
    before = torch.randint(0, 2, (1000,), generator=torch.Generator().manual_seed(0)).to(dtype)
    after = before.clone()
    for index in (0, 63, 64, 500, 999):
        after[index] = not after[index] if dtype == torch.bool else -after[index] - 1
    assert changed_elements(before, after).tolist() == [0, 63, 64, 500, 999]
    if dtype.is_floating_point:
        after = before.clone()
        after[7], before[7] = -0.0, 0.0
        assert changed_elements(before, after).tolist() == [7]


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="index 100 in a tensor of 100 elements"):
        apply_delta(torch.zeros(10, 10), torch.tensor([100]), torch.tensor([1.0]))
