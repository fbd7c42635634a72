"""Turns of episodes that share their beginnings train as rows alone do, under every strategy."""

from __future__ import annotations

import pytest
import torch

from roll.config.roles import SequencePackingArguments
from roll.models.stored import StoredLayout
from tests.strategies import jobs, moe_cases
from tests.strategies.comparison import (
    assert_same_gradients,
    assert_step_equals,
    by_replica,
    plain_results,
)
from tests.strategies.routed import routed_results, with_routes
from tests.strategies.samples import make_turns, plain_model, plain_outputs, policy_loss, split_rows
from tests.strategies.test_moe_balance import COEFFICIENT, balance_of

TREE = {"use_prefix_sharing": True, "micro_batch": 12, "infer_batch_size": 12}
RECOMPUTED = {"model_args": {"disable_gradient_checkpointing": False}}
ULYSSES = {"model_args": {"ulysses_size": 2}}
PACKED = {
    "use_sequence_packing": True,
    "sequence_packing_args": SequencePackingArguments(
        algorithm="load_balance", max_packed_sequence_length_train=180, max_packed_sequence_length_forward=300
    ),
}
RELATIVE = {"megatron": 3e-6}
CASES = {
    "fsdp2-1-rank": (1, "fsdp2", "tied", {}),
    "fsdp2-some-rows": (1, "fsdp2", "tied", {"micro_batch": 3}),
    "fsdp2-packed-recomputed": (2, "fsdp2", "tied", PACKED | RECOMPUTED),
    "fsdp": (2, "fsdp", "tied", {}),
    "zero3": (2, "zero3", "tied", RECOMPUTED),
    "ulysses": (2, "fsdp2", "tied", ULYSSES),
    "ulysses-window-packed": (2, "fsdp2", "mistral", ULYSSES | PACKED),
    "tp2-sp": (2, "megatron", "qwen3", {"config": {"tp": 2, "sp": True}}),
    "cp2": (2, "megatron", "qwen2", {"config": {"cp": 2}}),
    "vpp2-recomputed": (2, "megatron", "qwen3", {"config": {"pp": 2, "vpp": 2}, **RECOMPUTED}),
}


@pytest.mark.long_rows("zero3", "ulysses-window-packed", "tp2-sp")
@pytest.mark.default_rows("fsdp2-packed-recomputed", "zero3", "ulysses-window-packed", "tp2-sp")
@pytest.mark.parametrize("case", CASES)
def test_gradient_and_outputs_equal_the_plain_model(run, family, case):
    world, strategy, model, options = CASES[case]
    batch = make_turns()
    results = run(jobs.train, world, strategy, model, batch=batch, **(TREE | options))
    assert_step_equals(results, plain_results(family(model), batch), relative=RELATIVE.get(strategy, 2e-6))
    if case in ("fsdp2-1-rank", "fsdp", "ulysses", "tp2-sp"):  # one micro-batch a rank
        parts = split_rows(batch, (7, 5)) if case == "fsdp" else [batch]
        for part, result in zip(parts, by_replica(results), strict=True):
            last = [int(mask.nonzero().max()) for mask in part["response_mask"]]
            beginnings = [
                row[: end + 1]
                for row, length in zip(part["input_ids"].tolist(), last, strict=True)
                for end in range(length)
            ]
            distinct = len(set(map(tuple, beginnings)))
            assert distinct <= result["metrics"]["tokens_per_micro_batch"] <= distinct + 1 < len(beginnings) / 2


@pytest.mark.long
def test_every_row_has_its_share_in_the_balance_loss(run, moe_folder):
    """In float64 over all rows alone: a token counts once for each of its rows."""
    folder, batch = moe_folder("qwen3_moe"), make_turns()
    model = plain_model(folder).double()
    model.set_experts_implementation("eager")  # grouped products have no float64
    loss, gauges = balance_of(model, batch)
    (policy_loss(plain_outputs(model, batch), batch)[0] + COEFFICIENT * loss).backward()
    wanted = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    for result in run(
        jobs.train, 2, "fsdp2", folder, batch=batch, **TREE | {"model_args": {"moe_aux_loss_coef": COEFFICIENT}}
    ):
        assert_same_gradients(result["gradients"], wanted, 4e-6)
        assert {name: result["metrics"][name] for name in gauges} == pytest.approx(gauges, rel=1e-6)


@pytest.mark.long
@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp", "megatron"])
def test_routes_of_shared_beginnings_are_replayed_and_recorded(run, family, moe_folder, strategy):
    folder = family("qwen3_moe") if strategy == "megatron" else moe_folder("qwen3_moe")
    batch = with_routes(make_turns(), group_size=1, layers=4 if strategy == "megatron" else 2)
    routes, known = batch["routed_experts"], {}
    for row, ids in enumerate(batch["input_ids"].tolist()):  # what rows have in common goes the same way
        for column in range(int(batch["response_mask"][row].nonzero().max())):
            routes[row, column] = known.setdefault(tuple(ids[: column + 1]), routes[row, column].clone())
    wanted, results = routed_results(folder, batch), run(jobs.train, 1, strategy, folder, batch=batch, **TREE)
    gradients = wanted["gradients"]
    if strategy == "megatron":
        gradients = StoredLayout(plain_model(folder)).views(gradients)
    assert_same_gradients(results[0]["gradients"], gradients, 5e-6, floor=1e-2)
    torch.testing.assert_close(results[0]["outputs"]["log_probs"], wanted["outputs"]["log_probs"], rtol=0, atol=1e-5)
    assert results[0]["metrics"]["moe_replay_missing"] == 0.0
    ((recorded, _, metrics, live),) = run(moe_cases.record_and_replay, 1, strategy, folder, batch=make_turns(), **TREE)
    ((alone, *_),) = run(moe_cases.record_and_replay, 1, strategy, folder, batch=make_turns(), use_remove_padding=True)
    assert torch.equal(recorded, alone)
    assert metrics["moe_replay_missing"] == metrics["moe_replay_changed"] == 0.0
    assert metrics["grad_norm"] == pytest.approx(live["grad_norm"], rel=1e-6)
