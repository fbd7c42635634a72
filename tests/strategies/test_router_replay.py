"""Recorded routes reach the tokens that they belong to in every layout, and give what a plain model gives with them."""

from __future__ import annotations

import pytest
import torch

from roll.models.experts import missing_mark
from roll.models.stored import StoredLayout
from tests import vision_models
from tests.strategies import jobs, moe_cases, vision_cases
from tests.strategies.comparison import assert_same_gradients, by_replica
from tests.strategies.moe_models import EVERYWHERE
from tests.strategies.routed import routed_results, with_routes
from tests.strategies.samples import DYNAMIC, PACKING, make_batch, make_role, plain_model

RELATIVE = {"megatron": 5e-6}
RECOMPUTE = {"model_args": {"disable_gradient_checkpointing": False}}
SHARED = {"use_prefix_sharing": True}
PACKED = {"use_sequence_packing": True}
ULYSSES = {"model_args": {"ulysses_size": 2}}
MEGATRON = {
    "megatron": (1, "megatron", "qwen3_moe", {}),
    "ep2-shared-prompts": (2, "megatron", "mixtral", {"config": {"ep": 2}, **SHARED, **PACKED}),
    "tp2-recomputed": (2, "megatron", "olmoe", {"config": {"tp": 2, "sp": True}, **RECOMPUTE}),
    "vpp2-recomputed": (2, "megatron", "qwen3_moe", {"config": {"pp": 2, "vpp": 2}, **RECOMPUTE}),
    "cp2-packed": (2, "megatron", "qwen2_moe", {"config": {"cp": 2}, **PACKED}),
}
REPLAYED = {
    "shared-prompts": (1, "fsdp2", "mixtral", SHARED | PACKING),
    "dynamic": (1, "fsdp2", "olmoe", DYNAMIC),
    "recomputed-shared": (1, "fsdp2", "qwen2_moe", RECOMPUTE | SHARED),
    "ulysses-shared": (2, "fsdp2", "qwen3_moe", ULYSSES | SHARED),
    "zero3-shared": (2, "zero3", "qwen2_moe", SHARED),
    **MEGATRON,
}
RECORDED = {
    **{f"{family}-rows": (1, "fsdp2", family, {}) for family in EVERYWHERE},
    **{f"{family}-shared": (1, "fsdp2", family, SHARED | PACKING) for family in EVERYWHERE},
    **{f"{family}-ulysses": (2, "fsdp2", family, ULYSSES | SHARED) for family in EVERYWHERE},
    **MEGATRON,
}


@pytest.mark.long_rows("tp2-recomputed")
@pytest.mark.default_rows("recomputed-shared", "tp2-recomputed")
@pytest.mark.parametrize("case", REPLAYED)
def test_replay_equals_a_plain_model_told_what_to_choose(run, family, moe_folder, case):
    world, strategy, name, options = REPLAYED[case]
    folder = (family if strategy == "megatron" else moe_folder)(name)
    batch = with_routes(make_batch(), layers=4 if strategy == "megatron" else 2)
    wanted, results = routed_results(folder, batch), run(jobs.train, world, strategy, folder, batch=batch, **options)
    gradients = wanted["gradients"]
    if strategy == "megatron":
        gradients = StoredLayout(plain_model(folder)).views(gradients)
    assert_same_gradients(results[0]["gradients"], gradients, RELATIVE.get(strategy, 3e-6), floor=1e-2)
    for name, values in wanted["outputs"].items():
        actual = torch.cat([part["outputs"][name] for part in by_replica(results)])
        torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)
    metrics = by_replica(results)[0]["metrics"]
    assert metrics["moe_replay_missing"] == 0.0
    assert metrics["moe_replay_changed"] > 0.5, "random routes are not the live ones"


@pytest.mark.long
def test_replay_with_images(run_ranks, tmp_path):
    """The tokens of images are sent where they went, too."""
    folder = vision_models.save(tmp_path / "model", "qwen3_vl_moe")
    batch = with_routes(vision_cases.make_batch(), vision_cases.GROUP_SIZE, experts=8)
    wanted = routed_results(folder, batch, vision_cases.plain_model, vision_cases.plain_outputs)
    role = make_role(folder, "fsdp2_train", **SHARED | PACKING)
    (result,) = run_ranks(1, jobs.train, role, batch)
    assert_same_gradients(result["gradients"], wanted["gradients"], 1e-5, floor=1e-2)
    for name, values in wanted["outputs"].items():
        torch.testing.assert_close(result["outputs"][name], values, rtol=0, atol=1e-5)
    assert result["metrics"]["moe_replay_missing"] == 0.0 and result["metrics"]["moe_replay_changed"] > 0.5


@pytest.mark.long
@pytest.mark.default_rows("qwen3_moe-shared")
@pytest.mark.parametrize("case", RECORDED)
def test_recorded_routes_are_the_live_ones(run, family, moe_folder, case):
    """R2: every token has a route but the last of each row, and replaying them changes nothing."""
    world, strategy, name, options = RECORDED[case]
    folder = (family if strategy == "megatron" else moe_folder)(name)
    results = run(moe_cases.record_and_replay, world, strategy, folder, **options)
    for recorded, rows, metrics, live in results:
        mark = missing_mark(recorded.dtype)
        for row, mask in enumerate(rows):
            inputs = int(mask.nonzero().max()) if mask.any() else 0
            assert (recorded[row, :inputs] != mark).all() and (recorded[row, inputs:] == mark).all()
        assert metrics["grad_norm"] == pytest.approx(live["grad_norm"], rel=1e-6)
        if "moe_replay_missing" in metrics:
            assert metrics["moe_replay_missing"] == metrics["moe_replay_changed"] == 0.0
    assert "moe_replay_missing" in results[-1][2]


@pytest.mark.long
@pytest.mark.default_rows("fsdp2", "ulysses2", "megatron-cp2")
@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    [
        (1, "fsdp2", {}),
        (2, "fsdp2", ULYSSES),
        (2, "megatron", {"config": {"cp": 2}}),
        (2, "megatron", {"config": {"tp": 2, "sp": True}}),
        (2, "megatron", {"config": {"pp": 2}}),
    ],
    ids=["fsdp2", "ulysses2", "megatron-cp2", "megatron-sp2", "megatron-pp2"],
)
def test_a_missing_record_is_counted_and_said(run, family, moe_folder, world, strategy, options):
    """On whichever rank its token is, and in whichever layer."""
    is_megatron = strategy == "megatron"
    batch = with_routes(make_batch(), layers=4 if is_megatron else 2)
    batch["routed_experts"][:, 2, -1] = missing_mark(batch["routed_experts"].dtype)  # of the last layer
    folder = (family if is_megatron else moe_folder)("qwen3_moe")
    wanted, results = routed_results(folder, batch), run(jobs.train, world, strategy, folder, batch=batch, **options)
    inputs = [int(mask.nonzero().max()) for mask in batch["response_mask"].bool() if mask.any()]
    share = sum(count > 2 for count in inputs) / sum(inputs) / batch["routed_experts"].shape[2]
    assert by_replica(results)[0]["metrics"]["moe_replay_missing"] == pytest.approx(share)
    gradients = StoredLayout(plain_model(folder)).views(wanted["gradients"]) if is_megatron else wanted["gradients"]
    assert_same_gradients(results[0]["gradients"], gradients, RELATIVE.get(strategy, 3e-6), floor=1e-2)
