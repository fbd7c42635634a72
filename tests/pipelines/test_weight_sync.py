"""Engines that do not hold what the trainer sent are found out and named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.config.run import TransportName
from roll.distributed import Cluster, ResourceManager, ray_runtime
from roll.weight_sync.encoding import SyncReport, Update, WeightSyncError, iter_buckets
from roll.weight_sync.sender import RayEngines, WeightSender, build_transport
from roll.workers.generation import GenerationWorker
from tests.pipelines.faulty_workers import FaultyEngine
from tests.support.tiny_runs import HERE, TinyWorld

pytestmark = pytest.mark.e2e

FIRST_NORM, SECOND_NORM = "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"


@pytest.fixture(scope="module")
def engines(shared_ray: str, world: TinyWorld) -> Iterator[Cluster]:
    role = WorkerConfig(
        name="actor_infer",
        model_args=ModelArguments(model_name_or_path=str(world.model), dtype="fp32"),
        strategy_args=StrategyArguments("hf_infer", {"max_num_seqs": 4, "max_model_len": 64}),
        device_mapping=[0, 1],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", shared_ray)
        with ray_runtime(2):
            resources = ResourceManager(2)
            cluster = Cluster("actor_infer", f"{HERE}.faulty_workers.FaultyEngine", resources, role, rpc_timeout=60)
            cluster.call_all(GenerationWorker.initialize).result()
            yield cluster
            cluster.shutdown(graceful=False)
            resources.close()


@pytest.fixture(scope="module")
def weights(world: TinyWorld) -> dict[str, torch.Tensor]:
    """The model's own, moved a little, so that no tensor is constant and none is what the engines hold already."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    named = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32).named_parameters()
    return {name: p.detach() + 0.01 * torch.randn(p.shape, generator=generator) for name, p in named}


@pytest.fixture(scope="module")
def senders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WeightSender]:
    """By transport; they stay, with their connections, as a trainer's does."""
    folder = str(tmp_path_factory.mktemp("weights"))
    names: tuple[TransportName, ...] = ("object_store", "broadcast", "safetensors")
    return {name: WeightSender(build_transport(name, folder, "gloo", "127.0.0.1")) for name in names}


def send(
    sender: WeightSender,
    engines: Cluster,
    weights: dict[str, torch.Tensor],
    faults: list[str],
    patience: float | None = None,
) -> SyncReport:
    """To as many engines as there are faults."""
    for rank, fault in enumerate(faults):
        engines.submit(rank, FaultyEngine.be_faulty, fault).result()
    receivers = RayEngines(dict(enumerate(engines.workers[: len(faults)])))
    return sender.send(iter_buckets(weights.items(), 2**17), receivers, Update(3, 60, patience=patience))


@pytest.mark.parametrize(
    ("transport", "fault"), [("object_store", "swap"), ("broadcast", "corrupt"), ("safetensors", "drop")]
)
def test_right_weights_pass_and_a_faulty_engine_and_its_tensors_are_named(
    senders: dict[str, WeightSender],
    engines: Cluster,
    weights: dict[str, torch.Tensor],
    transport: str,
    fault: str,
) -> None:
    """``tests/weight_sync`` has every fault by every transport, without processes."""
    report = send(senders[transport], engines, weights, ["", ""])
    assert report.num_tensors == len(weights)
    assert report.num_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert report.num_buckets > 2, "the case needs several buckets"
    new = {name: tensor * 1.5 for name, tensor in weights.items()}
    wrong = f"{FIRST_NORM}, {SECOND_NORM}" if fault == "swap" else FIRST_NORM
    with pytest.raises(WeightSyncError, match=rf"update 3: engine 1 holds other .* of \d+ tensors \({wrong}\)"):
        send(senders[transport], engines, new, ["", fault])
    assert send(senders[transport], engines, weights, ["", ""]).num_tensors == len(weights), "the next puts it right"


def test_an_engine_that_fails_is_named(senders: Any, engines: Cluster, weights: dict[str, torch.Tensor]) -> None:
    expected = "engine 1 failed in 'update_weights': RuntimeError: the engine has no room for this"
    with pytest.raises(WeightSyncError, match=f"weight update 3: {expected}") as failure:
        send(senders["object_store"], engines, weights, ["", "raise"])
    assert failure.value.lost == (1,)
    for rank in range(2):  # the update stands half done; a run would have ended
        engines.submit(rank, GenerationWorker.finish_weight_update).result()


@pytest.mark.long
def test_an_engine_that_dies_is_named_and_left_out(senders: Any, engines: Cluster, weights: dict[str, Any]) -> None:
    """Over a connection with two ends, where the others fail with it."""
    with pytest.raises(WeightSyncError, match="weight update 3: engine 1 died in 'update_weights'") as failure:
        send(senders["broadcast"], engines, weights, ["", "die"])
    assert failure.value.lost == (1,), "not the other one, whose connection broke"
    engines.submit(0, GenerationWorker.finish_weight_update).result()
    assert send(senders["broadcast"], engines, weights, [""]).num_tensors == len(weights)


@pytest.mark.long
def test_an_engine_that_hangs_is_named_before_the_deadline(
    senders: Any, engines: Cluster, weights: dict[str, Any]
) -> None:
    """The last one here: no engine is left."""
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="engine 0 was not done with 'update_weights' in time") as failure:
        send(senders["object_store"], engines, weights, ["hang"], patience=3)
    assert failure.value.lost == (0,)
    assert 3 <= time.monotonic() - began < 30
