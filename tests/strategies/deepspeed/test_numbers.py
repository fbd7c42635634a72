"""DeepSpeed computes what a plain model computes, at every stage, however the work is cut."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed")

from tests.strategies import sharded_cases
from tests.strategies.comparison import (
    STEPS,
    assert_same_gradients,
    assert_same_weights,
    assert_step_equals,
    plain_results,
    plain_steps,
)
from tests.strategies.deepspeed import cases
from tests.strategies.samples import (
    DYNAMIC,
    PACKING,
    make_batch,
    make_role,
    plain_model,
    split_rows,
)

RunRanks = Callable[..., list[Any]]
SPLIT = (7, 5)
# Small enough that ZeRO-3 really partitions the matrices of the tiny model.
PARTITION = {"stage3_param_persistence_threshold": 40}
CHECKPOINTED = {"model_args": {"disable_gradient_checkpointing": False}}


def zero(stage: int, **config: Any) -> dict[str, Any]:
    section = {"zero_optimization": PARTITION} if stage == 3 else {}
    return {"zero_stage": stage, **section, **config}


CASES: dict[str, dict[str, Any]] = {
    "zero0": {"config": zero(0)},
    "zero1": {"config": zero(1)},
    "zero2": {"config": zero(2)},
    "zero3": {"config": zero(3)},
    "zero3-persistent": {"config": {"zero_stage": 3}},
    "zero1-offload-is-none": {"config": zero(1, offload="cpu")},
    "zero2-offload": {"config": zero(2, offload="cpu")},
    "zero3-offload-optimizer": {"config": zero(3, offload="cpu")},
    "zero3-offload-all": {"config": zero(3, offload="cpu", offload_param=True)},
    "zero0-step-each": {"config": zero(0, step_each_micro_batch=True), "micro_batch": 2},
    "zero2-step-each": {"config": zero(2, step_each_micro_batch=True), "micro_batch": 2},
    "zero3-step-each": {"config": zero(3, step_each_micro_batch=True), "micro_batch": 2},
    "zero2-micro-batch-1": {"config": zero(2), "micro_batch": 1},
    "zero2-offload-one-micro-batch": {"config": zero(2, offload="cpu"), "micro_batch": 12},
    "zero3-micro-batch-1": {"config": zero(3), "micro_batch": 1},
    "zero2-checkpointed": {"config": zero(2), **CHECKPOINTED},
    "zero3-checkpointed": {"config": zero(3), **CHECKPOINTED},
    "zero2-shared-prompts": {"config": zero(2), "use_prefix_sharing": True},
    "zero3-shared-prompts": {"config": zero(3), "use_prefix_sharing": True, **CHECKPOINTED},
    "zero2-packed": {"config": zero(2), **PACKING},
    "zero3-packed": {"config": zero(3), **PACKING, **CHECKPOINTED},
    "zero2-dynamic": {"config": zero(2), **DYNAMIC},
    "zero3-small-buckets": {
        "config": {
            "zero_stage": 3,
            "zero_optimization": {**PARTITION, "reduce_bucket_size": "1e3", "sub_group_size": 1e3},
        }
    },
}


@pytest.fixture(scope="module")
def expected(tied_model: Path) -> dict[str, Any]:
    return plain_results(tied_model)


@pytest.fixture(scope="module")
def trained(run_ranks: RunRanks, tied_model: Path) -> dict[str, list[dict[str, Any]]]:
    """One optimizer step of every case on two ranks, all in one pair of processes."""
    roles = {name: make_role(tied_model, "deepspeed_train", **options) for name, options in CASES.items()}
    by_rank = run_ranks(2, cases.train_each, roles, split_rows(make_batch(), SPLIT))
    return {name: [results[name] for results in by_rank] for name in roles}


@pytest.mark.default_rows(
    "zero0",
    "zero2",
    "zero3",
    "zero2-step-each",
    "zero3-offload-all",
    "zero2-shared-prompts",
    "zero3-packed",
    "zero2-dynamic",
)
@pytest.mark.parametrize("case", CASES)
def test_gradient_and_outputs_equal_the_plain_model(
    trained: dict[str, list[dict[str, Any]]], expected: dict[str, Any], case: str
) -> None:
    assert_step_equals(trained[case], expected)


def test_stages_and_offload_are_what_was_asked_for(trained: dict[str, list[dict[str, Any]]]) -> None:
    plans = {name: results[0]["plan"] for name, results in trained.items()}
    assert [plans[f"zero{stage}"].stage for stage in range(4)] == [0, 1, 2, 3]
    assert plans["zero1-offload-is-none"].offload_optimizer == "none"
    offloaded = {name: results[0]["offloads"] for name, results in trained.items() if "offload" in name}
    assert offloaded == {
        "zero1-offload-is-none": (False, False),
        "zero2-offload": (True, False),
        "zero2-offload-one-micro-batch": (True, False),
        "zero3-offload-optimizer": (True, False),
        "zero3-offload-all": (True, True),
    }
    assert trained["zero3"][0]["partitioned"] and not trained["zero3-persistent"][0]["partitioned"]


@pytest.mark.default_rows("None-2", "0.05-3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_optimizer_steps_equal_plain_adamw(
    stepped: dict[str, dict[str, Any]], tied_model: Path, stage: int, max_grad_norm: float | None
) -> None:
    result = stepped[f"{stage}-{max_grad_norm}"]
    assert result["metrics"]["lr"] == pytest.approx(1e-2)
    assert_same_weights(result["weights"], plain_steps(tied_model, max_grad_norm))


@pytest.fixture(scope="module")
def stepped(run_ranks: RunRanks, tied_model: Path) -> dict[str, dict[str, Any]]:
    """Three clipped and unclipped steps with weight decay and a schedule, at every stage."""
    roles = {
        f"{stage}-{norm}": make_role(
            tied_model, "deepspeed_train", training={**STEPS, "max_grad_norm": norm}, config=zero(stage)
        )
        for stage in range(4)
        for norm in (None, 0.05)
    }
    return run_ranks(2, cases.train_each, roles, split_rows(make_batch(), SPLIT), 3)[0]


@pytest.mark.default_rows("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_equals_fsdp2_and_keeps_float32_weights(
    bf16: dict[str, dict[str, Any]], bf16_reference: dict[str, torch.Tensor], expected: dict[str, Any], stage: int
) -> None:
    """The same bf16 weights through the same layers: the reference under FSDP2 and the trainer agree exactly."""
    result = bf16[str(stage)]
    assert torch.equal(result["outputs"]["log_probs"], bf16_reference["log_probs"])
    assert result["metrics"]["grad_norm"] == pytest.approx(expected["norm"], rel=0.03)
    assert result["weights"]["model.norm.weight"].dtype is torch.bfloat16


@pytest.fixture(scope="module")
def bf16_reference(run_ranks: RunRanks, tied_model: Path) -> dict[str, torch.Tensor]:
    """Results of rank 0 under FSDP2."""
    role = make_role(tied_model, "fsdp2_infer", dtype="bf16")
    return run_ranks(2, sharded_cases.forward, role, split_rows(make_batch(), SPLIT))[0]


def test_bf16_master_weights_are_those_of_the_file(bf16: dict[str, dict[str, Any]], tied_model: Path) -> None:
    """Not those that were rounded to bf16: with a learning rate of 0 they come back bit for bit."""
    for stage in ("0", "1", "2", "3"):
        masters = bf16[stage]["masters"]
        for name, parameter in plain_model(tied_model).named_parameters():
            assert masters[name].dtype is torch.float32
            assert torch.equal(masters[name], parameter.detach()), (stage, name)


def test_bf16_master_weights_are_those_of_a_model_that_is_loaded_whole(
    run_ranks: RunRanks, tied_model: Path, tmp_path: Path
) -> None:
    """Files that are not safetensors cannot be read in parts."""
    folder = shutil.copytree(tied_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(tied_model / "model.safetensors"), folder / "pytorch_model.bin")
    roles = {
        str(stage): make_role(
            folder, "deepspeed_train", dtype="bf16", training={"learning_rate": 0.0}, config=zero(stage)
        )
        for stage in range(4)
    }
    wanted = {name: parameter.detach() for name, parameter in plain_model(tied_model).named_parameters()}
    for stage, result in run_ranks(2, cases.train_each, roles, split_rows(make_batch(), SPLIT))[0].items():
        masters = result["masters"]
        assert masters.keys() == wanted.keys()
        assert {name for name in wanted if not torch.equal(masters[name], wanted[name])} == set(), stage


@pytest.fixture(scope="module")
def bf16(run_ranks: RunRanks, tied_model: Path) -> dict[str, dict[str, Any]]:
    training = {"learning_rate": 0.0}
    roles = {
        str(stage): make_role(tied_model, "deepspeed_train", dtype="bf16", training=training, config=zero(stage))
        for stage in range(4)
    }
    return run_ranks(2, cases.train_each, roles, split_rows(make_batch(), SPLIT))[0]


@pytest.mark.default_rows("bf16-2", "fp32-3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_is_dropped(dropped: dict[str, dict[str, Any]], stage: int, dtype: str) -> None:
    result = dropped[f"{stage}-{dtype}"]
    # Each of two ranks counts its half; the driver's sum is 1.
    assert result["skipped"] == 0.5 and result["unchanged"]
    assert "skipped_updates" not in result["second"] and result["second"]["grad_norm"] > 0
    assert result["step"] == 2


@pytest.fixture(scope="module")
def dropped(run_ranks: RunRanks, tied_model: Path) -> dict[str, dict[str, Any]]:
    roles = {
        f"{stage}-{dtype}": make_role(tied_model, "deepspeed_train", dtype=dtype, config=zero(stage))
        for stage in range(4)
        for dtype in ("fp32", "bf16")
    }
    return run_ranks(2, cases.poison_each, roles, split_rows(make_batch(), SPLIT))[0]


def test_one_rank_and_ranks_without_rows(run_ranks: RunRanks, tied_model: Path, expected: dict[str, Any]) -> None:
    role = make_role(tied_model, "deepspeed_train", config=zero(3))
    for split in ((12,), (12, 0)):
        results = run_ranks(len(split), cases.train, role, split_rows(make_batch(), split))
        assert_same_gradients(results[-1]["gradients"], expected["gradients"])


def test_value_model_learns_as_under_fsdp2(run_ranks: RunRanks, tied_model: Path) -> None:
    parts = split_rows(make_batch(), SPLIT)
    training = {"adam_epsilon": 1e-3}
    wanted = run_ranks(2, sharded_cases.train, make_role(tied_model, training=training), parts, 3, None, True)
    role = make_role(tied_model, "deepspeed_train", training=training, config=zero(3))
    for one, other in zip(run_ranks(2, cases.train, role, parts, 3, None, True), wanted, strict=True):
        torch.testing.assert_close(one["outputs"]["values"], other["outputs"]["values"], rtol=0, atol=1e-5)
        assert one["outputs"]["values"].any()


def test_value_model_in_bf16_is_the_same_in_parts_of_unequal_size(run_ranks: RunRanks, tied_model: Path) -> None:
    """The value head's single bias does not divide into two ranks' parts."""
    parts = split_rows(make_batch(), SPLIT)
    training = {"adam_epsilon": 1e-3}
    values, biases = [], []
    for stage in (2, 3):
        role = make_role(tied_model, "deepspeed_train", dtype="bf16", training=training, config=zero(stage))
        first, second = run_ranks(2, cases.train, role, parts, 3, None, True)
        values.append(torch.cat([first["outputs"]["values"], second["outputs"]["values"]]))
        biases.append(first["masters"]["score.bias"])
    # Gradients rounded to bf16 before and after they are summed over ranks: 2 ** -8 of each.
    torch.testing.assert_close(values[1], values[0], rtol=0.02, atol=0.02 * float(values[0].abs().max()))
    torch.testing.assert_close(biases[1], biases[0], rtol=0.02, atol=0)
    assert biases[0].any()


def test_frozen_modules_do_not_change(run_ranks: RunRanks, tied_model: Path) -> None:
    """Frozen embeddings, a frozen layer and a frozen matrix in a trained one; the rest steps as in PyTorch."""
    frozen = ("model.layers.0", "model.embed_tokens", "model.layers.1.mlp.up_proj")
    prefixes = {"freeze_module_prefix": ", ".join(frozen)}
    training = {**STEPS, "max_grad_norm": 0.05}
    roles = {
        str(stage): make_role(tied_model, "deepspeed_train", model_args=prefixes, training=training, config=zero(stage))
        for stage in range(4)
    }
    results = run_ranks(2, cases.train_each, roles, split_rows(make_batch(), SPLIT), 3)[0]
    start, wanted = dict(plain_model(tied_model).named_parameters()), plain_steps(tied_model, 0.05, frozen)
    for stage, result in results.items():
        assert_same_weights(result["weights"], wanted)
        for name, parameter in start.items():
            assert torch.equal(result["weights"][name], parameter.detach()) == name.startswith(frozen), (stage, name)
