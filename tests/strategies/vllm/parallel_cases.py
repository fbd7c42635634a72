"""Functions that the tests of engines of several ranks run in the engine process."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from roll.models.stored import StoredLayout
from roll.weight_sync.encoding import tensor_checksum, verify_checksums
from tests.strategies import engine_cases, engine_models
from tests.strategies.engine_cases import KEY, message
from tests.strategies.vllm import cases


def two_ranks(folder: Path, kind: str) -> dict[str, Any]:
    """An engine of two ranks, its matrices or its layers sharded: greedy samples after 0, 1 and 10 updates, those of
    ``hf_infer`` and of the model, then updates that go wrong on one rank."""
    found: dict[str, Any] = {}
    model = engine_models.load(folder)
    with cases.engine(folder, **{kind: 2}) as started:
        with engine_cases.engine(folder, "hf_infer") as embedded:
            found["greedy"] = engine_cases.greedy_after_updates(started, embedded, model)
        old = copy.deepcopy(model)
        engine_models.jolt(model, 11)
        found["in flight"] = engine_cases.update_in_flight(started, engine_cases.steps(12), old, model, 11)
        engine_models.jolt(model, 12)
        found["spoilt on the way"] = complaint(started, model, 13, change=1e-3)
        started._engine.collective_rpc(spoil_on_the_last_rank, args=(False,))
        found["spoilt by a rank"] = complaint(started, model, 14)
        started.start_weight_update(15)
        found["unknown"] = message(lambda: started.update_weights({"model.no_such.weight": torch.zeros(2)}))
        started.finish_weight_update()
    return found


def experts_of_two_ranks(folder: Path) -> dict[str, Any]:
    """An engine of two ranks that share every matrix of every expert: samples after 0, 1 and 2 updates, the tensors
    that a rank did not read back, and an update of which one rank spoils an expert."""
    model = engine_models.load(folder)
    with cases.engine(folder, tensor_parallel_size=2) as started:
        found: dict[str, Any] = {"updates": engine_cases.experts_after_updates(started, model)}
        found["unread"] = started._engine.collective_rpc(tensors_not_read_back)
        started._engine.collective_rpc(spoil_on_the_last_rank, args=(True,))
        sent = StoredLayout(model).on_the_way().views(model.state_dict())
        started.start_weight_update(3)
        started.update_weights(sent)
        held = started.finish_weight_update()
    meant = {name: tensor_checksum(tensor) for name, tensor in sent.items()}
    return found | {"spoilt": message(lambda: verify_checksums(meant, held, engine=3, version=3))}


def tensors_not_read_back(worker: Any) -> list[str]:
    return list(worker._roll_verifier._received)


def spoil_on_the_last_rank(worker: Any, of_an_expert: bool) -> None:
    """From now on one element of that rank's part changes while it is loaded: of the last expert's up matrix, or of
    every fused query, key and value."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    from roll.strategies.vllm.verification import ReloadVerifier

    compare = ReloadVerifier._compare_loaded

    def spoilt(self: ReloadVerifier, layer: Any) -> None:
        if of_an_expert and hasattr(layer, "w13_weight"):
            layer.w13_weight.data[-1, -1, 0] += 1
        if not of_an_expert and isinstance(layer, QKVParallelLinear):
            layer.weight.data[-1, 0] += 1
        compare(self, layer)

    if worker.rank == 1:
        ReloadVerifier._compare_loaded = spoilt  # type: ignore[method-assign]


def complaint(started: Any, model: Any, version: int, change: float = 0.0) -> str:
    """Of an update of which one element changes before it gets to the engine: all ranks that hold it hold another."""
    sent = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    sent[KEY][3, 5] += change
    started.start_weight_update(version)
    started.update_weights(sent)
    held = started.finish_weight_update()
    meant = {name: tensor_checksum(tensor) for name, tensor in model.named_parameters()}
    return message(lambda: verify_checksums(meant, held, engine=3, version=version))


def parts_of_ranks() -> dict[str, Any]:
    """The rows and columns that ranks hold, by the sizes of layers like vLLM's."""
    from roll.strategies.vllm.verification import held_part, meant_part

    whole = torch.arange(24.0).reshape(6, 4)
    of_two = [SimpleNamespace(tp_rank=rank, tp_size=2) for rank in range(2)]
    of_four = SimpleNamespace(tp_rank=3, tp_size=4)  # two ranks share each of two heads
    own = SimpleNamespace(org_vocab_start_index=4, org_vocab_end_index=6)
    padded = torch.zeros(4, 4)
    fused = SimpleNamespace(output_partition_sizes=[2, 3])
    return {
        "rows": [meant_part(layer, whole, torch.empty(3, 4)).tolist() for layer in of_two],
        "columns": [meant_part(layer, whole, torch.empty(6, 2)).tolist() for layer in of_two],
        "shared": meant_part(of_four, whole, torch.empty(3, 4)).tolist(),
        "whole": meant_part(of_two[1], whole, torch.empty(6, 4)) is whole,
        "vocabulary": meant_part(SimpleNamespace(shard_indices=own), whole, padded).tolist(),
        "vocabulary held": len(held_part(SimpleNamespace(shard_indices=own), padded, None, 6)),
        "fused": held_part(fused, whole, 1, 99).tolist(),
    }
