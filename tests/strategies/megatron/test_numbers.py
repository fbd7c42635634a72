"""Megatron computes what a plain model computes, however the model, the rows and the sequence are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.roles import SequencePackingArguments
from roll.strategies.training.optimizer import INITIAL_SCALE
from tests.strategies.megatron.layouts import by_replica
from tests.strategies.megatron.models import plain_value_results
from tests.strategies.samples import make_batch, plain_model, plain_outputs, policy_loss

cases = pytest.importorskip("tests.strategies.megatron.cases", reason="needs megatron-core")

# float32 sums of a few hundred terms through four layers, taken in another order: a few units in the last place of the
# largest element (the same plain model in float64 differs from itself in float32 by as much).
RELATIVE = 3e-6

RunCase = Callable[..., list[Any]]
Expected = Callable[[str], dict[str, Any]]
RECOMPUTE = {"disable_gradient_checkpointing": False}
PACKED = {"use_sequence_packing": True}
BALANCED = PACKED | {
    "sequence_packing_args": SequencePackingArguments(
        algorithm="load_balance", max_packed_sequence_length_train=40, max_packed_sequence_length_forward=64
    )
}
DYNAMIC = {
    "use_dynamic_batching_in_train": True,
    "max_tokens_per_microbatch_in_train": 64,
    "use_dynamic_batching_in_infer": True,
    "max_tokens_per_microbatch_in_infer": 96,
}

LAYOUTS = [
    pytest.param(1, {}, "qwen2", {}, id="1-rank"),
    pytest.param(1, {}, "llama", {"micro_batch": 1}, id="llama-micro-batch-1"),
    pytest.param(2, {}, "qwen3", {}, id="dp2"),
    pytest.param(4, {}, "qwen2", {}, id="dp4-one-without-rows"),
    pytest.param(2, {"dist_opt": True}, "qwen2", {}, id="dp2-distributed-optimizer"),
    pytest.param(2, {"dist_opt": True, "overlap_grad_reduce": True, "ddp_bucket_size": 500}, "qwen3", {}, id="overlap"),
    pytest.param(2, {"tp": 2}, "qwen2", {}, id="tp2"),
    pytest.param(2, {"tp": 2}, "qwen3", {}, id="qwen3-tp2"),
    pytest.param(2, {"tp": 2, "sp": True}, "qwen3", {}, id="qwen3-tp2-sp"),
    pytest.param(2, {"pp": 2}, "qwen2", {}, id="pp2-tied"),
    pytest.param(2, {"pp": 2}, "llama", {}, id="llama-pp2"),
    pytest.param(2, {"pp": 2, "pipeline_model_parallel_layout": "Et|tttL"}, "qwen3", {}, id="pp2-own-split"),
    pytest.param(2, {"cp": 2}, "llama", {}, id="cp2"),
    pytest.param(2, {"pp": 2, "vpp": 2}, "qwen2", {}, id="vpp2-tied"),
    pytest.param(4, {"pp": 4}, "qwen2", {}, id="pp4-tied"),
    pytest.param(4, {"tp": 2, "dist_opt": True}, "qwen2", {}, id="tp2-dp2-distributed-optimizer"),
    pytest.param(4, {"tp": 2, "cp": 2, "sp": True}, "qwen3", {}, id="tp2-cp2-sp"),
    pytest.param(4, {"cp": 2, "dist_opt": True}, "qwen2", {}, id="cp2-dp2-distributed-optimizer"),
    pytest.param(4, {"pp": 2, "cp": 2}, "qwen2", {}, id="pp2-cp2"),
    pytest.param(4, {"tp": 2, "pp": 2, "sp": True}, "qwen2", {}, id="tp2-pp2-sp"),
    pytest.param(4, {"pp": 2, "dist_opt": True}, "qwen2", {}, id="pp2-dp2-distributed-optimizer-tied"),
    pytest.param(4, {"pp": 2, "vpp": 2, "dist_opt": True}, "qwen2", {}, id="vpp2-dp2-distributed-optimizer"),
    pytest.param(4, {"pp": 2, "vpp": 2, "tp": 2, "sp": True}, "llama", {}, id="vpp2-tp2-sp"),
    pytest.param(1, {}, "qwen2", PACKED, id="packed"),
    pytest.param(2, {"tp": 2, "sp": True}, "qwen3", PACKED, id="tp2-sp-packed"),
    pytest.param(2, {"cp": 2}, "llama", PACKED, id="cp2-packed"),
    pytest.param(2, {"pp": 2}, "qwen2", PACKED | {"model_args": RECOMPUTE}, id="pp2-packed-recomputed"),
    pytest.param(2, {"pp": 2, "vpp": 2}, "qwen2", PACKED, id="vpp2-packed"),
    pytest.param(2, {}, "qwen2", BALANCED, id="dp2-balanced-packs"),
    pytest.param(2, {}, "qwen3", DYNAMIC, id="dp2-dynamic"),
    pytest.param(2, {"cp": 2}, "qwen2", {"use_prefix_sharing": True}, id="cp2-shared-prompts"),
    pytest.param(
        4,
        {"pp": 2, "tp": 2, "sp": True},
        "qwen3",
        {"use_prefix_sharing": True, "model_args": RECOMPUTE},
        id="tp2-pp2-sp-shared-prompts",
    ),
]


def assert_same_gradients(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        limit = RELATIVE * float(gradient.abs().max()) + 1e-9
        torch.testing.assert_close(
            actual[name], gradient, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.default_rows(
    "1-rank",
    "dp2-distributed-optimizer",
    "qwen3-tp2-sp",
    "llama-pp2",
    "pp2-tied",
    "cp2",
    "vpp2-tied",
    "tp2-sp-packed",
    "dp2-dynamic",
    "tp2-pp2-sp-shared-prompts",
)
@pytest.mark.parametrize(("world", "sizes", "model", "options"), LAYOUTS)
def test_gradient_and_outputs_equal_the_plain_model(
    run_case: RunCase, expected: Expected, world: int, sizes: dict[str, Any], model: str, options: dict[str, Any]
) -> None:
    results = run_case(cases.train, world, sizes, model, **options)
    wanted = expected(model)
    assert_same_gradients(results[0]["gradients"], wanted["gradients"])
    assert all(result["metrics"]["grad_norm"] == pytest.approx(wanted["norm"], rel=1e-6) for result in results)
    assert all(result["metrics"]["lr"] == 1e-2 for result in results)
    for name, values in wanted["outputs"].items():
        actual = torch.cat([result["outputs"][name] for result in by_replica(results)])
        torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)
        assert torch.equal(actual == 0, values == 0)
    for result in results:
        same = next(other for other in by_replica(results) if other["rank_info"].dp_rank == result["rank_info"].dp_rank)
        assert all(torch.equal(result["outputs"][name], values) for name, values in same["outputs"].items())
        assert float(result["denominator"]) == result["rank_info"].dp_size


@pytest.mark.default_rows("full-sp", "block-pp2")
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        pytest.param(1, {}, id="full"),
        pytest.param(2, {"tp": 2, "sp": True, "recompute_granularity": "full"}, id="full-sp"),
        pytest.param(1, {"recompute_granularity": "selective"}, id="selective"),
        pytest.param(
            2,
            {"pp": 2, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
            id="block-pp2",
        ),
        pytest.param(2, {"cp": 2}, id="full-cp2"),
        pytest.param(2, {"pp": 2, "vpp": 2}, id="full-vpp2"),
    ],
)
def test_recomputation_changes_nothing(
    run_case: RunCase, expected: Expected, world: int, sizes: dict[str, Any]
) -> None:
    results = run_case(cases.train, world, sizes, "qwen3", model_args=RECOMPUTE)
    assert_same_gradients(results[0]["gradients"], expected("qwen3")["gradients"])


def test_metrics_of_the_loss_come_from_the_last_stage(run_case: RunCase, expected: Expected) -> None:
    first, last = run_case(cases.train, 2, {"pp": 2}, micro_batch=5)
    entropy = expected("qwen2")["outputs"]["entropy"]
    assert last["metrics"]["entropy"] == pytest.approx(float(entropy.sum() / (entropy != 0).sum()), rel=1e-5)
    assert last["metrics"]["rows"] == pytest.approx((5 + 5 + 2) / 3)
    assert first["metrics"].keys() == {"grad_norm", "lr"}


@pytest.mark.default_rows("0.05-1-rank", "None-tp2-sp", "0.05-pp2-dp2-distributed-optimizer")
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        pytest.param(1, {}, id="1-rank"),
        pytest.param(2, {"tp": 2, "sp": True}, id="tp2-sp"),
        pytest.param(4, {"pp": 2, "dist_opt": True}, id="pp2-dp2-distributed-optimizer"),
    ],
)
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_optimizer_steps_equal_plain_adamw(
    run_case: RunCase,
    family: Callable[[str], Any],
    world: int,
    sizes: dict[str, Any],
    max_grad_norm: float | None,
) -> None:
    # Epsilon keeps AdamW's first steps smooth: with 1e-8 an element whose gradient is rounding noise moves as far as
    # any other, in either direction.
    training = {"adam_epsilon": 1e-3, "lr_scheduler_type": "linear", "warmup_steps": 2}
    result = run_case(cases.train, world, sizes, args=(3, max_grad_norm), training=training)[0]
    model, batch = plain_model(family("qwen2")), make_batch()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, eps=1e-3, foreach=False)
    for rate in (0.5e-2, 1e-2, 1e-2):
        optimizer.zero_grad()
        policy_loss(plain_outputs(model, batch), batch)[0].backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    assert result["metrics"]["lr"] == pytest.approx(rate)
    assert result["weights"].keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result["weights"][name], parameter.detach(), rtol=0, atol=3e-6)


@pytest.mark.default_rows("sizes0", "sizes3")
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"dist_opt": True}])
def test_rows_with_nothing_to_learn_give_no_gradient(run_case: RunCase, sizes: dict[str, Any]) -> None:
    batch = make_batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    for result in run_case(cases.train, 2, sizes, batch=batch):
        assert not any(gradient.any() for gradient in result["gradients"].values())
        assert result["metrics"]["grad_norm"] == 0.0
        assert not result["outputs"]["log_probs"].any()
        assert all(bool(weight.isfinite().all()) for weight in result["weights"].values())


def test_a_gradient_that_is_not_finite_is_dropped(run_case: RunCase, family: Callable[[str], Any]) -> None:
    batch = make_batch()
    batch["advantages"] = batch["advantages"].clone()
    batch["advantages"][batch["response_mask"]] = torch.inf
    results = run_case(cases.train, 2, {"tp": 2}, batch=batch)
    assert all(result["metrics"]["skipped_updates"] == 1.0 for result in results)
    for name, parameter in plain_model(family("qwen2")).named_parameters():
        assert torch.equal(results[0]["weights"][name], parameter.detach())


@pytest.mark.default_rows("sizes0")
@pytest.mark.parametrize("sizes", [{"dist_opt": True}, {"tp": 2, "sp": True}, {"pp": 2}])
def test_bf16_computes_in_bf16_and_keeps_float32_weights(
    run_case: RunCase, expected: Expected, family: Callable[[str], Any], tmp_path: Any, sizes: dict[str, Any]
) -> None:
    results = run_case(cases.train, 2, sizes, "qwen3", dtype="bf16")
    log_probs = torch.cat([result["outputs"]["log_probs"] for result in by_replica(results)])
    difference = (log_probs - expected("qwen3")["outputs"]["log_probs"]).abs().max()
    # bf16 has 8 bits: 0.4% of hidden states of order 1, through two dozen products. Equality would mean float32.
    assert 1e-4 < float(difference) < 0.1
    assert results[0]["metrics"]["grad_norm"] == pytest.approx(expected("qwen3")["norm"], rel=0.03)
    assert {weight.dtype for weight in results[0]["weights"].values()} == {torch.bfloat16}
    # A rate of zero leaves the master weights as the files have them, in full precision.
    still = {"learning_rate": 0.0, "weight_decay": 0.0}
    state = run_case(cases.train_and_save, 2, sizes, "qwen3", args=(tmp_path, 1), dtype="bf16", training=still)[0][
        "state"
    ]
    for name, parameter in plain_model(family("qwen3")).named_parameters():
        assert torch.equal(state[f"weight/{name}"], parameter.detach())


@pytest.mark.default_rows("sizes0", "sizes3")
@pytest.mark.parametrize("sizes", [{"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {"pp": 2, "vpp": 2}])
def test_fp16_scales_the_loss_however_the_model_is_cut(
    run_case: RunCase, expected: Expected, sizes: dict[str, Any]
) -> None:
    results = run_case(cases.train, 2, sizes, "qwen3", dtype="fp16")
    wanted = expected("qwen3")
    assert {result["metrics"]["loss_scale"] for result in results} == {INITIAL_SCALE}
    # 11 bits: 0.05% of each of two dozen products and sums, of which some cancel in a norm's weight.
    assert results[0]["metrics"]["grad_norm"] == pytest.approx(wanted["norm"], rel=2e-3)
    for name, gradient in wanted["gradients"].items():
        unscaled = results[0]["gradients"][name] / INITIAL_SCALE
        assert 0 < float((unscaled - gradient).norm()) < 1e-2 * float(gradient.norm()), name


@pytest.mark.default_rows("bf16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_reference_in_compute_dtype_equals_the_trainer(run_case: RunCase, dtype: str) -> None:
    """The KL to the initial policy is exactly 0 before the first update."""
    trained = run_case(cases.train, 2, {"tp": 2}, dtype=dtype)
    reference = run_case(cases.forward, 2, {"tp": 2}, dtype=dtype, strategy="megatron_infer")
    for one, other in zip(trained, reference, strict=True):
        assert torch.equal(one["outputs"]["log_probs"], other["log_probs"])


@pytest.mark.default_rows("sizes0", "sizes1")
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}])
def test_forward_with_temperature(run_case: RunCase, family: Callable[[str], Any], sizes: dict[str, Any]) -> None:
    parts = run_case(cases.forward, 2, sizes, "llama", args=(0.7,), strategy="megatron_infer")
    with torch.no_grad():
        wanted = plain_outputs(plain_model(family("llama")), make_batch(), temperature=0.7)
    for part in parts:
        for name, values in wanted.items():
            torch.testing.assert_close(part[name], values, rtol=0, atol=1e-5)


VALUE_SIZES = [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {"dist_opt": True}]


VALUE_STEPS = {"args": (3, None, True), "training": {"adam_epsilon": 1e-3}}


@pytest.fixture(scope="module")
def values_alone(run_case: RunCase) -> torch.Tensor:
    """Of one rank, after two optimizer steps."""
    return run_case(cases.train, 1, {}, **VALUE_STEPS)[0]["outputs"]["values"]


@pytest.mark.default_rows("sizes1", "sizes2")
@pytest.mark.parametrize("sizes", VALUE_SIZES)
def test_value_model_starts_at_zero_and_learns(
    run_case: RunCase, values_alone: torch.Tensor, sizes: dict[str, Any]
) -> None:
    results = run_case(cases.train, 2, sizes, **VALUE_STEPS)
    assert not any(result["first_outputs"]["values"].any() for result in results)
    values = torch.cat([result["outputs"]["values"] for result in by_replica(results)])
    assert torch.equal(values != 0, make_batch()["response_mask"])
    torch.testing.assert_close(values, values_alone, rtol=0, atol=1e-5)


@pytest.mark.default_rows("sizes0", "sizes2")
@pytest.mark.parametrize("sizes", VALUE_SIZES)
def test_value_gradient_equals_the_plain_model(
    run_case: RunCase, value_family: Callable[[str], Path], sizes: dict[str, Any]
) -> None:
    wanted = plain_value_results(value_family("qwen3"), make_batch())
    results = run_case(cases.train, 2, sizes, value_family("qwen3"), args=(1, None, True))
    values = torch.cat([result["outputs"]["values"] for result in by_replica(results)])
    torch.testing.assert_close(values, wanted["values"], rtol=0, atol=1e-5)
    assert_same_gradients(results[0]["gradients"], wanted["gradients"])
    assert results[0]["metrics"]["grad_norm"] == pytest.approx(wanted["norm"], rel=1e-6)


@pytest.mark.default_rows("sizes0", "sizes1")
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"dist_opt": True}])
def test_frozen_modules_do_not_change(run_case: RunCase, family: Callable[[str], Any], sizes: dict[str, Any]) -> None:
    prefixes = {"freeze_module_prefix": "model.layers.0, model.layers.2.self_attn, model.norm"}
    result = run_case(cases.train, 2, sizes, "llama", model_args=prefixes)[0]
    for name, parameter in plain_model(family("llama")).named_parameters():
        frozen = name.startswith(("model.layers.0", "model.layers.2.self_attn", "model.norm"))
        assert torch.equal(result["weights"][name], parameter.detach()) == frozen, name
        assert (name in result["gradients"]) != frozen


@pytest.mark.parametrize(("world", "sizes"), [(1, {}), (2, {"tp": 2, "sp": True}), (2, {"pp": 2})])
def test_layers_learn_above_frozen_embeddings(
    run_case: RunCase, expected: Expected, world: int, sizes: dict[str, Any]
) -> None:
    """A recomputed layer gets no gradient from Megatron unless its input wants one."""
    model_args = RECOMPUTE | {"freeze_module_prefix": "model.embed_tokens"}
    result = run_case(cases.train, world, sizes, "llama", model_args=model_args)[0]
    wanted = expected("llama")["gradients"]
    assert_same_gradients(
        result["gradients"], {name: wanted[name] for name in wanted if name != "model.embed_tokens.weight"}
    )


def test_rank_info(run_case: RunCase) -> None:
    infos = [r["rank_info"] for r in run_case(cases.train, 4, {"tp": 2, "pp": 2})]
    assert [(i.rank, i.tp_rank, i.pp_rank, i.dp_rank) for i in infos] == [
        (0, 0, 0, 0),
        (1, 1, 0, 0),
        (2, 0, 1, 0),
        (3, 1, 1, 0),
    ]
    assert [i.is_data_source for i in infos] == [False, False, True, False]
    assert [i.is_first_of_replica for i in infos] == [True, False, False, False]
    infos = [r["rank_info"] for r in run_case(cases.train, 4, {"cp": 2})]
    assert [(i.cp_rank, i.dp_rank, i.dp_size) for i in infos] == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]
