"""Mixture-of-experts models under Megatron compute what a plain model computes, however experts are dealt out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roll.models.stored import StoredLayout
from tests.strategies.megatron.layouts import by_replica
from tests.strategies.routed import routed_results, with_routes
from tests.strategies.samples import DYNAMIC, make_batch, plain_model, plain_outputs, policy_loss

cases = pytest.importorskip("tests.strategies.megatron.cases", reason="needs megatron-core")

RunCase = Callable[..., list[Any]]
Expected = Callable[[str], dict[str, Any]]
RELATIVE = 5e-6  # as in test_numbers, with one more sum over the experts of a token
RECOMPUTE = {"disable_gradient_checkpointing": False}
PACKED = {"use_sequence_packing": True}

LAYOUTS = [
    pytest.param(1, {}, "qwen3_moe", {}, id="1-rank"),
    pytest.param(1, {"dispatcher": "allgather"}, "qwen2_moe", {}, id="shared-expert-allgather"),
    pytest.param(1, {}, "mixtral", {"model_args": RECOMPUTE}, id="mixtral-recomputed"),
    pytest.param(1, {}, "olmoe", PACKED, id="olmoe-packed"),
    pytest.param(2, {}, "qwen3_moe", {}, id="dp2"),
    pytest.param(2, {"ep": 2}, "qwen3_moe", {}, id="ep2"),
    pytest.param(2, {"ep": 2, "dispatcher": "allgather"}, "qwen3_moe", {}, id="ep2-allgather"),
    pytest.param(2, {"ep": 2, "dist_opt": True}, "mixtral", {"micro_batch": 2}, id="ep2-distributed-optimizer"),
    pytest.param(2, {"ep": 2}, "qwen2_moe", PACKED, id="ep2-packed"),
    pytest.param(2, {"tp": 2, "sp": True}, "qwen2_moe", {}, id="tp2"),
    pytest.param(2, {"tp": 2, "sp": True}, "olmoe", {}, id="olmoe-tp2"),
    pytest.param(2, {"tp": 2, "sp": True, "etp": 1}, "qwen3_moe", {}, id="tp2-etp1"),
    pytest.param(2, {"tp": 2, "sp": True, "etp": 1, "ep": 2}, "mixtral", {}, id="tp2-ep2-etp1"),
    pytest.param(2, {"etp": 2}, "qwen3_moe", {}, id="etp2-of-replicas"),
    pytest.param(2, {"pp": 2}, "qwen3_moe", {}, id="pp2"),
    pytest.param(2, {"pp": 2, "vpp": 2}, "qwen3_moe", {}, id="vpp2"),
    pytest.param(2, {"cp": 2, "ep": 2}, "qwen3_moe", {}, id="cp2-ep2"),
    pytest.param(4, {"ep": 2, "pp": 2, "dist_opt": True}, "qwen3_moe", {"model_args": RECOMPUTE}, id="ep2-pp2"),
    pytest.param(4, {"ep": 2, "dist_opt": True}, "qwen2_moe", {}, id="ep2-dp4-one-without-rows"),
    pytest.param(4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, "qwen3_moe", {}, id="tp2-ep2-etp2"),
]


def assert_same_gradients(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys(), actual.keys() ^ wanted.keys()
    for name, gradient in wanted.items():
        difference = (actual[name] - gradient).abs().max()
        assert float(difference) <= RELATIVE * max(float(gradient.abs().max()), 1e-2), name


@pytest.mark.default_rows("ep2", "tp2", "olmoe-packed")
@pytest.mark.parametrize(("world", "sizes", "model", "options"), LAYOUTS)
def test_gradient_and_outputs_equal_the_plain_model(
    run_case: RunCase, expected: Expected, world: int, sizes: dict[str, Any], model: str, options: dict[str, Any]
) -> None:
    results = run_case(cases.train, world, sizes, model, **options)
    wanted = expected(model)
    assert_same_gradients(results[0]["gradients"], wanted["stored_gradients"])
    assert all(result["metrics"]["grad_norm"] == pytest.approx(wanted["norm"], rel=2e-6) for result in results)
    for name, values in wanted["outputs"].items():
        actual = torch.cat([result["outputs"][name] for result in by_replica(results)])
        torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)


@pytest.mark.default_rows("ep2-shared-prompts")
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param({"ep": 2}, {"use_prefix_sharing": True, **PACKED}, id="ep2-shared-prompts"),
        pytest.param({"ep": 2, "dispatcher": "allgather"}, DYNAMIC, id="ep2-allgather-dynamic"),
        pytest.param({"pp": 2, "vpp": 2}, {"use_prefix_sharing": True, **PACKED}, id="vpp2-shared-prompts"),
    ],
)
def test_layouts_of_rows_change_nothing(
    run_case: RunCase, expected: Expected, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    results = run_case(cases.train, 2, sizes, "mixtral", **options)
    assert_same_gradients(results[0]["gradients"], expected("mixtral")["stored_gradients"])


@pytest.mark.default_rows("mixtral-ep2")
@pytest.mark.parametrize(
    ("world", "sizes", "model"),
    [
        pytest.param(2, {"ep": 2}, "mixtral", id="mixtral-ep2"),
        pytest.param(4, {"ep": 2, "pp": 2}, "qwen2_moe", id="qwen2_moe-ep2-pp2"),
        pytest.param(4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, "qwen3_moe", id="qwen3_moe-tp2-ep2-etp2"),
        pytest.param(2, {"tp": 2, "sp": True}, "olmoe", id="olmoe-tp2"),
    ],
)
def test_weights_are_sent_stored_and_exported_for_transformers(
    run_case: RunCase, family: Callable[[str], Path], tmp_path: Path, world: int, sizes: dict[str, Any], model: str
) -> None:
    limit = 8192
    first, *others = run_case(cases.buckets, world, sizes, model, args=(limit,), strategy="megatron_infer")
    sent = {name: tensor for bucket in first for name, tensor in bucket.items()}
    stored = load_file(family(model) / "model.safetensors")
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in stored.items())
    assert all(len(bucket) == 1 or sum(t.nbytes for t in bucket.values()) <= limit for bucket in first)
    assert not any(any(other) for other in others)
    run_case(cases.export, world, sizes, model, args=(tmp_path,), strategy="megatron_infer")
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


@pytest.mark.default_rows("ep2-bf16")
@pytest.mark.parametrize(
    ("world", "sizes", "dtype", "others"),
    [
        pytest.param(2, {"ep": 2, "dist_opt": True}, "bf16", [], id="ep2-bf16"),
        pytest.param(
            4,
            {"ep": 2, "pp": 2},
            "fp32",
            [
                (1, {}),
                (2, {"tp": 2, "sp": True}),
                (2, {"ep": 2, "dist_opt": True}),
                (2, {"tp": 2, "sp": True, "etp": 1}),
            ],
            id="ep2-pp2-fp32",
        ),
    ],
)
def test_resumed_equals_uninterrupted_under_the_same_and_other_layouts(
    run_case: RunCase,
    tmp_path: Path,
    world: int,
    sizes: dict[str, Any],
    dtype: str,
    others: list[tuple[int, dict[str, Any]]],
) -> None:
    whole = run_case(cases.train_and_save, world, sizes, "qwen2_moe", args=(tmp_path, 2), dtype=dtype)[0]
    resumed = run_case(cases.load_and_train, world, sizes, "qwen2_moe", args=(tmp_path, 2), dtype=dtype)[0]
    assert resumed["metrics"] == whole["metrics"]
    for kind in ("weights", "state"):
        assert resumed[kind].keys() == whole[kind].keys()
        assert all(torch.equal(resumed[kind][name], tensor) for name, tensor in whole[kind].items())
    for other_world, other in others:
        resumed = run_case(cases.load_and_train, other_world, other, "qwen2_moe", args=(tmp_path, 2), dtype=dtype)[0]
        assert resumed["metrics"]["grad_norm"] == pytest.approx(whole["metrics"]["grad_norm"], rel=1e-3)
        for name, weight in whole["weights"].items():
            # Only the order of sums differs; AdamW's division by small second moments enlarges that.
            torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=1e-4)


@pytest.mark.default_rows("ep2")
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        pytest.param(1, {}, id="1-rank"),
        pytest.param(2, {"ep": 2}, id="ep2"),
        pytest.param(2, {"tp": 2, "sp": True}, id="tp2"),
        pytest.param(2, {"pp": 2}, id="pp2"),
    ],
)
def test_balance_loss_is_the_mean_over_micro_batches(
    run_case: RunCase, family: Callable[[str], Path], world: int, sizes: dict[str, Any]
) -> None:
    """Megatron's own: of a layer, E sum_e f_e P_e over the tokens of a micro-batch, without its padding."""
    coefficient = 0.5
    config = {**sizes, "moe_aux_loss_coeff": coefficient}
    batch = make_batch()
    results = run_case(cases.train, world, config, "qwen3_moe", micro_batch=1)
    model = plain_model(family("qwen3_moe"))
    policy_loss(plain_outputs(model, batch), batch)[0].backward()
    rows = [row for row in range(len(batch["input_ids"])) if batch["response_mask"][row].any()]
    for row in rows:
        length = int(batch["response_mask"][row].nonzero().max())
        logits = model(batch["input_ids"][row : row + 1, :length], output_router_logits=True).router_logits
        for layer in logits:
            probs = layer.softmax(-1)
            chosen = torch.zeros_like(probs).scatter(1, probs.topk(2, -1).indices, 1.0)
            loss = 6 * (chosen.mean(0) / 2 * probs.mean(0)).sum()
            (coefficient / len(rows) * loss).backward(retain_graph=True)
    wanted = StoredLayout(model).views({name: p.grad for name, p in model.named_parameters()})
    assert_same_gradients(results[0]["gradients"], wanted)


REPLAYS = [
    pytest.param(1, {}, "qwen3_moe", {}, id="1-rank"),
    pytest.param(2, {"ep": 2}, "mixtral", {"use_prefix_sharing": True, **PACKED}, id="ep2-shared-prompts"),
    pytest.param(2, {"tp": 2, "sp": True}, "olmoe", {"model_args": RECOMPUTE}, id="tp2-recomputed"),
    pytest.param(2, {"pp": 2, "vpp": 2}, "qwen3_moe", {"model_args": RECOMPUTE}, id="vpp2-recomputed"),
    pytest.param(2, {"cp": 2}, "qwen2_moe", PACKED, id="cp2-packed"),
]


@pytest.mark.default_rows("tp2-recomputed")
@pytest.mark.parametrize(("world", "sizes", "model", "options"), REPLAYS)
def test_replay_equals_a_plain_model_told_what_to_choose(
    run_case: RunCase,
    family: Callable[[str], Path],
    world: int,
    sizes: dict[str, Any],
    model: str,
    options: dict[str, Any],
) -> None:
    batch = with_routes(make_batch(), layers=4)
    results = run_case(cases.train, world, sizes, model, batch=batch, **options)
    wanted = routed_results(family(model), batch)
    stored = StoredLayout(plain_model(family(model))).views(wanted["gradients"])
    assert_same_gradients(results[0]["gradients"], stored)
    metrics = by_replica(results)[0]["metrics"]
    assert metrics["moe_replay_missing"] == 0.0 and metrics["moe_replay_changed"] > 0.5


@pytest.mark.default_rows("vpp2-recomputed")
@pytest.mark.parametrize(("world", "sizes", "model", "options"), REPLAYS)
def test_recorded_routes_are_the_live_ones(
    run_case: RunCase, world: int, sizes: dict[str, Any], model: str, options: dict[str, Any]
) -> None:
    for recorded, metrics, rows in run_case(cases.record_and_replay, world, sizes, model, **options):
        for row, mask in enumerate(rows):
            inputs = int(mask.nonzero().max()) if mask.any() else 0
            assert (recorded[row, :inputs] != 255).all() and (recorded[row, inputs:] == 255).all()
        if "moe_replay_missing" in metrics:
            assert metrics["moe_replay_missing"] == metrics["moe_replay_changed"] == 0.0
