"""Mixture-of-experts models under Megatron compute what a plain model computes, however experts are dealt out."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from roll.models.stored import StoredLayout
from tests.strategies import jobs
from tests.strategies.comparison import assert_same_bits, assert_same_gradients, assert_step_equals
from tests.strategies.samples import DYNAMIC, make_batch, plain_model, plain_outputs, policy_loss

pytestmark = pytest.mark.long

pytest.importorskip("megatron.core", reason="needs megatron-core")

RELATIVE, FLOOR = 5e-6, 1e-2  # as in test_numbers, with one more sum over the experts of a token
RECOMPUTE = {"disable_gradient_checkpointing": False}
PACKED = {"use_sequence_packing": True}

LAYOUTS = [
    pytest.param(1, {"dispatcher": "allgather"}, "qwen2_moe", {}, id="shared-expert-allgather"),
    pytest.param(1, {}, "mixtral", {"model_args": RECOMPUTE}, id="mixtral-recomputed"),
    pytest.param(1, {}, "olmoe", PACKED, id="olmoe-packed"),
    pytest.param(2, {"ep": 2}, "qwen2_moe", PACKED, id="ep2-packed"),
    pytest.param(2, {"tp": 2, "sp": True}, "qwen2_moe", {}, id="tp2"),
    pytest.param(2, {"tp": 2, "sp": True, "etp": 1}, "qwen3_moe", {}, id="tp2-etp1"),
    pytest.param(2, {"tp": 2, "sp": True, "etp": 1, "ep": 2}, "mixtral", {}, id="tp2-ep2-etp1"),
    pytest.param(2, {"pp": 2, "vpp": 2}, "qwen3_moe", {}, id="vpp2"),
    pytest.param(2, {"cp": 2, "ep": 2}, "qwen3_moe", {}, id="cp2-ep2"),
    pytest.param(4, {"ep": 2, "pp": 2, "dist_opt": True}, "qwen3_moe", {"model_args": RECOMPUTE}, id="ep2-pp2"),
    pytest.param(4, {"ep": 2, "dist_opt": True}, "qwen2_moe", {}, id="ep2-dp4-one-without-rows"),
    pytest.param(4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, "qwen3_moe", {}, id="tp2-ep2-etp2"),
]


@pytest.mark.default_rows("ep2-packed", "tp2")
@pytest.mark.parametrize(("world", "sizes", "model", "options"), LAYOUTS)
def test_gradient_and_outputs_equal_the_plain_model(run, expected, world, sizes, model, options):
    results = run(jobs.train, world, "megatron", model, config=sizes, **options)
    assert_step_equals(results, expected(model), relative=RELATIVE, gradients="stored_gradients", floor=FLOOR)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param({"ep": 2}, {"use_prefix_sharing": True, **PACKED}, id="ep2-shared-prompts"),
        pytest.param({"ep": 2, "dispatcher": "allgather"}, DYNAMIC, id="ep2-allgather-dynamic"),
        pytest.param({"pp": 2, "vpp": 2}, {"use_prefix_sharing": True, **PACKED}, id="vpp2-shared-prompts"),
    ],
)
def test_layouts_of_rows_change_nothing(run, expected, sizes, options):
    results = run(jobs.train, 2, "megatron", "mixtral", config=sizes, **options)
    assert_same_gradients(results[0]["gradients"], expected("mixtral")["stored_gradients"], RELATIVE, floor=FLOOR)


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
def test_weights_are_sent_stored_and_exported_for_transformers(run, family, tmp_path, world, sizes, model):
    limit = 8192
    first, *others = run(jobs.buckets, world, "megatron_infer", model, limit, config=sizes, batch=None)
    sent = {name: tensor for bucket in first for name, tensor in bucket.items()}
    stored = load_file(family(model) / "model.safetensors")
    assert_same_bits(sent, stored)
    assert all(len(bucket) == 1 or sum(t.nbytes for t in bucket.values()) <= limit for bucket in first)
    assert not any(any(other) for other in others)
    run(jobs.export, world, "megatron_infer", model, tmp_path, config=sizes, batch=None)
    assert_same_bits(load_file(tmp_path / "model.safetensors"), stored)


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
def test_balance_loss_is_the_mean_over_micro_batches(run, family, world, sizes):
    """Megatron's own: of a layer, E sum_e f_e P_e over the tokens of a micro-batch, without its padding."""
    coefficient = 0.5
    config = {**sizes, "moe_aux_loss_coeff": coefficient}
    batch = make_batch()
    results = run(jobs.train, world, "megatron", "qwen3_moe", config=config, micro_batch=1)
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
    assert_same_gradients(results[0]["gradients"], wanted, RELATIVE, floor=FLOOR)
