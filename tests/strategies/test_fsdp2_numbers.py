"""FSDP2 computes what a plain model computes: outputs, gradients and optimizer steps, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies import sharded_cases as cases
from tests.strategies.comparison import (
    STEPS,
    assert_same_gradients,
    assert_same_weights,
    assert_step_equals,
    plain_results,
    plain_steps,
)
from tests.strategies.samples import (
    DYNAMIC,
    PACKING,
    make_batch,
    make_role,
    plain_model,
    plain_outputs,
    policy_loss,
    split_rows,
)

SPLITS = {1: (12,), 2: (7, 5), 4: (5, 4, 3, 0)}

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def expected(tied_model: Path) -> dict[str, Any]:
    return plain_results(tied_model)


def train(run_ranks: RunRanks, role: Any, world_size: int = 1, **batch_options: Any) -> list[dict[str, Any]]:
    return run_ranks(world_size, cases.train, role, split_rows(make_batch(**batch_options), SPLITS[world_size]))


@pytest.mark.default_rows(
    "1-rank",
    "2-ranks",
    "2-ranks-tiled-mlp",
    "offload",
    "reduce-at-the-end",
    "gradient-checkpointing-shared-prompts",
    "packed",
    "2-ranks-dynamic-no-padding",
    "4-ranks-one-without-rows",
    "hsdp-2x2",
)
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        pytest.param(1, {}, id="1-rank"),
        pytest.param(1, {"micro_batch": 1}, id="micro-batch-1"),
        pytest.param(1, {"micro_batch": 12}, id="one-micro-batch"),
        pytest.param(1, {"use_prefix_sharing": True}, id="shared-prompts"),
        pytest.param(1, {"config": {"offload_policy": True}}, id="1-rank-offload"),
        pytest.param(2, {}, id="2-ranks"),
        pytest.param(2, {"use_prefix_sharing": True}, id="2-ranks-shared-prompts"),
        pytest.param(1, {"config": {"apply_tiled_mlp": True}}, id="tiled-mlp"),
        pytest.param(
            2,
            {
                "config": {"apply_tiled_mlp": True, "tiled_num_shards": 3},
                "model_args": {"disable_gradient_checkpointing": False},
                "use_prefix_sharing": True,
            },
            id="2-ranks-tiled-mlp",
        ),
        pytest.param(2, {"config": {"reduce_scatter_during_grad_accumulation": False}}, id="reduce-at-the-end"),
        pytest.param(2, {"config": {"reshard_after_forward": False}}, id="no-reshard"),
        pytest.param(2, {"config": {"offload_policy": True}}, id="offload"),
        pytest.param(2, {"model_args": {"disable_gradient_checkpointing": False}}, id="gradient-checkpointing"),
        pytest.param(
            2,
            {"model_args": {"disable_gradient_checkpointing": False}, "use_prefix_sharing": True},
            id="gradient-checkpointing-shared-prompts",
        ),
        pytest.param(2, {"config": {"wrap_policy": {"transformer_layer_cls_to_wrap": []}}}, id="one-unit"),
        pytest.param(1, {"use_remove_padding": True}, id="no-padding"),
        pytest.param(1, DYNAMIC, id="dynamic"),
        pytest.param(1, PACKING, id="packed"),
        pytest.param(2, {"use_sequence_packing": True, "micro_batch": 3}, id="2-ranks-rows-packed"),
        pytest.param(2, DYNAMIC | {"use_remove_padding": True}, id="2-ranks-dynamic-no-padding"),
        pytest.param(2, DYNAMIC | {"use_prefix_sharing": True}, id="2-ranks-dynamic-shared-prompts"),
        pytest.param(
            2,
            PACKING | {"use_prefix_sharing": True, "model_args": {"disable_gradient_checkpointing": False}},
            id="2-ranks-packed-shared-prompts-gradient-checkpointing",
        ),
        pytest.param(4, PACKING | {"config": {"fsdp_size": 2}}, id="hsdp-packed"),
        pytest.param(4, {}, id="4-ranks-one-without-rows"),
        pytest.param(4, {"micro_batch": 2, "config": {"fsdp_size": 2}}, id="hsdp-2x2"),
    ],
)
def test_gradient_and_outputs_equal_the_plain_model(
    run_ranks: RunRanks, tied_model: Path, expected: dict[str, Any], world_size: int, options: dict[str, Any]
) -> None:
    results = train(run_ranks, make_role(tied_model, **options), world_size)
    assert_step_equals(results, expected)
    assert all(result["dtypes"] == {"torch.float32"} for result in results)


def test_extra_padding_changes_nothing(run_ranks: RunRanks, tied_model: Path) -> None:
    tight = train(run_ranks, make_role(tied_model))[0]
    loose = train(run_ranks, make_role(tied_model), extra_padding=13)[0]
    assert all(torch.equal(loose["gradients"][name], gradient) for name, gradient in tight["gradients"].items())
    assert torch.equal(loose["outputs"]["log_probs"][:, :-13], tight["outputs"]["log_probs"])
    assert not loose["outputs"]["log_probs"][:, -13:].any()


def test_metrics_of_micro_batches_are_merged(run_ranks: RunRanks, tied_model: Path, expected: dict[str, Any]) -> None:
    metrics = train(run_ranks, make_role(tied_model, micro_batch=5))[0]["metrics"]
    entropy = expected["outputs"]["entropy"]
    assert metrics["entropy"] == pytest.approx(float(entropy.sum() / (entropy != 0).sum()), rel=1e-5)
    assert metrics["rows"] == pytest.approx((5 + 5 + 2) / 3)


@pytest.mark.default_rows("1-None-options0", "2-0.05-options3", "2-dynamic")
@pytest.mark.parametrize(
    ("world_size", "max_grad_norm", "options"),
    [
        (1, None, {}),
        (2, None, {}),
        (1, 0.05, {}),
        (2, 0.05, {}),
        pytest.param(1, 0.05, PACKING, id="packed"),
        pytest.param(2, 0.05, PACKING, id="2-packed"),
        pytest.param(2, 0.05, DYNAMIC, id="2-dynamic"),
    ],
)
def test_optimizer_steps_equal_plain_adamw(
    run_ranks: RunRanks, tied_model: Path, world_size: int, max_grad_norm: float | None, options: dict[str, Any]
) -> None:
    role = make_role(tied_model, training=STEPS, **options)
    parts = split_rows(make_batch(), SPLITS[world_size])
    result = run_ranks(world_size, cases.train, role, parts, 3, max_grad_norm)[0]
    assert result["metrics"]["lr"] == pytest.approx(1e-2)
    assert_same_weights(result["weights"], plain_steps(tied_model, max_grad_norm))


def test_rows_with_nothing_to_learn_give_no_gradient(run_ranks: RunRanks, tied_model: Path) -> None:
    batch = make_batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    results = run_ranks(2, cases.train, make_role(tied_model), split_rows(batch, (7, 5)))
    for result in results:
        assert all(not gradient.any() for gradient in result["gradients"].values())
        assert result["metrics"]["grad_norm"] == 0.0
        assert not result["outputs"]["log_probs"].any()
        assert all(bool(weight.isfinite().all()) for weight in result["weights"].values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_computes_in_bf16_and_keeps_float32_weights(
    run_ranks: RunRanks, tied_model: Path, expected: dict[str, Any], world_size: int
) -> None:
    results = train(run_ranks, make_role(tied_model, dtype="bf16"), world_size)
    assert results[0]["dtypes"] == {"torch.float32"}
    log_probs = torch.cat([result["outputs"]["log_probs"] for result in results])
    difference = (log_probs - expected["outputs"]["log_probs"]).abs().max()
    # bf16 has 8 bits: 0.4% of hidden states of order 1, through a dozen products. Equality would mean float32.
    assert 1e-4 < float(difference) < 0.1
    assert results[0]["metrics"]["grad_norm"] == pytest.approx(expected["norm"], rel=0.03)


def test_a_gradient_that_is_not_finite_is_dropped(run_ranks: RunRanks, tied_model: Path) -> None:
    for result in run_ranks(2, cases.poison, make_role(tied_model), split_rows(make_batch(), SPLITS[2])):
        # Each of two ranks counts its half; the driver's sum is 1.
        assert result["skipped"] == 0.5 and result["unchanged"]
        assert "skipped_updates" not in result["second"] and result["second"]["grad_norm"] > 0
        assert result["step"] == 2


def test_pure_bf16_is_had_by_asking_for_it(run_ranks: RunRanks, tied_model: Path) -> None:
    """Weights, moments and updates in bf16, as those of a bf16 model under torch's AdamW."""
    training = {"adam_epsilon": 1e-3}  # without it AdamW would turn rounding into steps of the learning rate
    options = {"config": {"master_dtype": "bf16"}, "micro_batch": 12, "training": training}
    result = run_ranks(1, cases.train, make_role(tied_model, dtype="bf16", **options), make_batch(), 3)[0]
    assert result["dtypes"] == {"torch.bfloat16"}

    model, batch = plain_model(tied_model).bfloat16(), make_batch()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    initial = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        policy_loss(plain_outputs(model, batch), batch)[0].backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        update = parameter.detach().float() - initial[name]
        error = result["weights"][name].float() - initial[name] - update
        # Gradients have 8 bits here, and so have the weights they are added to: a norm's weights of 1 move in 128ths.
        limit = 0.05 if parameter.ndim == 2 else 0.25
        assert float(error.norm() / update.norm()) < limit, name


def test_packed_bf16_is_as_close_as_padded(run_ranks: RunRanks, tied_model: Path, expected: dict[str, Any]) -> None:
    """Rounding differs with the order of sums, but stays within what bf16 leaves of float32 (see above)."""
    padded = train(run_ranks, make_role(tied_model, dtype="bf16", micro_batch=1), 1)[0]
    for options in (PACKING, DYNAMIC | {"use_remove_padding": True}):
        packed = train(run_ranks, make_role(tied_model, dtype="bf16", **options), 1)[0]
        for name, wanted in expected["outputs"].items():
            error = (padded["outputs"][name] - wanted).abs().max()
            assert float((packed["outputs"][name] - wanted).abs().max()) < 1.5 * float(error)
        for name, wanted in expected["gradients"].items():
            error = (padded["gradients"][name].float() - wanted).norm() / wanted.norm()
            assert float(error) < 0.03
            assert float((packed["gradients"][name].float() - wanted).norm() / wanted.norm()) < 0.03, name


def test_micro_batches_are_reported(run_ranks: RunRanks, tied_model: Path) -> None:
    lengths = make_batch()["attention_mask"].sum(1)
    padded = train(run_ranks, make_role(tied_model, micro_batch=12), 1)[0]["metrics"]
    assert padded["tokens_per_micro_batch"] == 12 * (int(lengths.max()) - 1)
    assert 0.1 < padded["padding_ratio"] < 0.6
    packed = train(run_ranks, make_role(tied_model, **PACKING), 1)[0]["metrics"]
    assert packed["padding_ratio"] == 0.0
    assert 15 < packed["tokens_per_micro_batch"] <= 45


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_reference_in_compute_dtype_equals_the_trainer(run_ranks: RunRanks, tied_model: Path, dtype: str) -> None:
    """The KL to the initial policy is exactly 0 before the first update."""
    parts = split_rows(make_batch(), SPLITS[2])
    trained = run_ranks(2, cases.train, make_role(tied_model, dtype=dtype), parts)
    for strategy in ("fsdp2_infer", "hf_infer"):
        reference = run_ranks(2, cases.forward, make_role(tied_model, strategy, dtype=dtype), parts)
        for one, other in zip(trained, reference, strict=True):
            assert torch.equal(one["outputs"]["log_probs"], other["log_probs"]), strategy


@pytest.mark.parametrize("world_size", [1, 4])
def test_forward_with_temperature(run_ranks: RunRanks, tied_model: Path, world_size: int) -> None:
    batch = make_batch()
    role = make_role(tied_model, "fsdp2_infer", use_prefix_sharing=world_size == 4)
    parts = run_ranks(world_size, cases.forward, role, split_rows(batch, SPLITS[world_size]), 0.7)
    with torch.no_grad():
        wanted = plain_outputs(plain_model(tied_model), batch, temperature=0.7)
    for name, values in wanted.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_separate_units_for_embeddings_and_output(run_ranks: RunRanks, untied_model: Path, world_size: int) -> None:
    wrap = {"wrap_policy": {"wrap_embeddings": True, "wrap_lm_output": True}}
    parts = split_rows(make_batch(), SPLITS[world_size])
    results = run_ranks(world_size, cases.train, make_role(untied_model, config=wrap), parts)
    model, batch = plain_model(untied_model), make_batch()
    policy_loss(plain_outputs(model, batch), batch)[0].backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_gradients(results[0]["gradients"], wanted)


@pytest.mark.parametrize("world_size", [1, 2])
def test_value_model_starts_at_zero_and_learns(run_ranks: RunRanks, tied_model: Path, world_size: int) -> None:
    batch = make_batch()
    role = make_role(tied_model, training={"adam_epsilon": 1e-3})
    parts = split_rows(batch, SPLITS[world_size])
    first = run_ranks(world_size, cases.train, role, parts, 1, None, True)
    assert all(not result["outputs"]["values"].any() for result in first)
    # With a head of zeros the body gets no gradient; the head's is the plain derivative of the squared error.
    hidden = plain_model(tied_model).model(input_ids=batch["input_ids"]).last_hidden_state.detach()[:, :-1]
    mask = batch["response_mask"][:, 1:]
    error = -2.0 * batch["advantages"][:, 1:][mask] / mask.sum()
    gradients = first[0]["gradients"]
    torch.testing.assert_close(gradients["score.weight"][0], (error[:, None] * hidden[mask]).sum(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients["score.bias"][0], error.sum(), rtol=0, atol=1e-6)
    later = run_ranks(world_size, cases.train, role, parts, 3, None, True)
    values = torch.cat([result["outputs"]["values"] for result in later])
    assert torch.equal(values != 0, batch["response_mask"])
    for keys in ({"use_prefix_sharing": True}, PACKING):
        other = run_ranks(world_size, cases.train, replace(role, **keys), parts, 3, None, True)
        other_values = torch.cat([result["outputs"]["values"] for result in other])
        torch.testing.assert_close(other_values, values, rtol=0, atol=1e-5)


def test_frozen_modules_do_not_change(run_ranks: RunRanks, tied_model: Path) -> None:
    role = make_role(tied_model, model_args={"freeze_module_prefix": "model.layers.0, model.embed_tokens"})
    result = train(run_ranks, role, 2)[0]
    for name, parameter in plain_model(tied_model).named_parameters():
        frozen = name.startswith(("model.layers.0", "model.embed_tokens"))
        assert torch.equal(result["weights"][name], parameter.detach()) == frozen, name
        assert (name in result["gradients"]) != frozen


def test_rank_info(run_ranks: RunRanks, tied_model: Path) -> None:
    results = train(run_ranks, make_role(tied_model), 2)
    assert [(r["rank_info"].dp_rank, r["rank_info"].dp_size, r["rank_info"].rank) for r in results] == [
        (0, 2, 0),
        (1, 2, 1),
    ]
