"""Checkpoints, exports and adapters of mixture-of-experts models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roll.models.stored import StoredLayout
from tests.strategies import lora_cases, sharded_cases
from tests.strategies import moe_cases as cases
from tests.strategies.moe_models import EVERYWHERE, FAMILIES, SEPARATE, write_moe
from tests.strategies.samples import make_batch, make_role, plain_model, split_rows

RunRanks = Callable[..., list[Any]]
SPLITS = {1: (12,), 2: (6, 6)}
UNITS = {"wrap_policy": {"moe_experts": ["Qwen3MoeMLP"]}}
TRAINING = {"training": {"lr_scheduler_type": "cosine", "warmup_steps": 1, "adam_epsilon": 1e-3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("moe") / "model")


@pytest.mark.default_rows("fsdp2_train-qwen3_moe", "fsdp2_train-deepseek_v3")
@pytest.mark.parametrize(
    ("strategy", "family"),
    [("fsdp2_train", name) for name in FAMILIES if name != SEPARATE]
    + [("fsdp_train", "mixtral"), ("deepspeed_train", "qwen3_moe")],
)
def test_an_export_has_the_published_layout(run_ranks: RunRanks, tmp_path: Path, strategy: str, family: str) -> None:
    """The same tensors under the same names as in the folder that it came from, buffers that balance by a bias too."""
    source = write_moe(tmp_path / "source", family)
    if strategy == "deepspeed_train":
        pytest.importorskip("deepspeed")
    run_ranks(2, sharded_cases.export, make_role(source, strategy), tmp_path / "export")
    wanted, written = load_file(source / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in wanted.items())
    assert family == "gpt_oss" or any(".experts.5." in name for name in written)
    assert any("e_score_correction_bias" in name for name in written) == (family in ("deepseek_v3", "glm4_moe"))
    again = plain_model(tmp_path / "export").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in plain_model(source).state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_export_of_divided_experts(run_ranks: RunRanks, tmp_path: Path, family: str) -> None:
    """Over four ranks, of which two and two hold shards of the same experts."""
    source = write_moe(tmp_path / "source", family)
    run_ranks(4, sharded_cases.export, make_role(source, config={"ep_size": 2}), tmp_path / "export")
    wanted, written = load_file(source / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in wanted.items())


def test_a_bias_that_balances_leaves_in_float32(run_ranks: RunRanks, tmp_path: Path) -> None:
    source = write_moe(tmp_path / "source", "deepseek_v3")
    (buckets,) = run_ranks(2, sharded_cases.buckets, make_role(source, dtype="bf16"), 2**30)[0]
    biases = {name: tensor for name, tensor in buckets.items() if name.endswith("e_score_correction_bias")}
    wanted = load_file(source / "model.safetensors")
    assert biases and all(torch.equal(tensor, wanted[name]) for name, tensor in biases.items())
    assert {tensor.dtype for name, tensor in buckets.items() if name not in biases} == {torch.bfloat16}


def test_divided_experts_travel_in_the_compute_type(run_ranks: RunRanks, folder: Path) -> None:
    role = make_role(folder, dtype="bf16", config={"ep_size": 2})
    (bucket,) = run_ranks(2, sharded_cases.buckets, role, 2**30)[0]
    assert any(".experts." in name for name in bucket)
    assert {name: tensor.dtype for name, tensor in bucket.items() if tensor.dtype is not torch.bfloat16} == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        pytest.param("fsdp2_train", UNITS, id="fsdp2"),
        pytest.param("fsdp2_train", {"ep_size": 2}, id="ep2"),
        pytest.param("fsdp_train", UNITS, id="fsdp"),
    ],
)
def test_resumed_equals_uninterrupted_also_on_one_rank(
    run_ranks: RunRanks, folder: Path, tmp_path: Path, strategy: str, config: dict[str, Any]
) -> None:
    role = make_role(folder, strategy, config=config, **TRAINING)
    parts = split_rows(make_batch(), SPLITS[2])
    whole = run_ranks(2, sharded_cases.train_and_save, role, parts, tmp_path, 2)
    resumed = run_ranks(2, sharded_cases.load_and_train, role, parts, tmp_path, 2)
    for one, other in zip(whole, resumed, strict=True):
        assert one["metrics"] == other["metrics"]
        for kind in ("weights", "moments"):
            assert all(torch.equal(one[kind][name], other[kind][name]) for name in one[kind])
    by_itself = make_role(folder, strategy, **TRAINING)
    (alone,) = run_ranks(1, sharded_cases.load_and_train, by_itself, [make_batch()], tmp_path, 2)
    for name, weight in whole[0]["weights"].items():
        torch.testing.assert_close(alone["weights"][name], weight, rtol=0, atol=1e-4)  # sums in another order


@pytest.mark.long
def test_a_deepspeed_checkpoint_goes_on_under_another_stage(run_ranks: RunRanks, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from tests.strategies.deepspeed import cases as deepspeed_cases
    from tests.strategies.deepspeed.test_numbers import zero

    two, three = (make_role(folder, "deepspeed_train", config=zero(stage), **TRAINING) for stage in (2, 3))
    parts = split_rows(make_batch(), SPLITS[2])
    saved = run_ranks(2, deepspeed_cases.train_save_and_show, three, parts, tmp_path, parts)
    loaded = run_ranks(2, deepspeed_cases.load_and_show, two, parts, tmp_path)
    for key, wanted in saved[0]["state"].items():
        assert torch.equal(loaded[0]["state"][key], wanted), key


@pytest.mark.default_rows("fsdp2_train-qwen2_moe")
@pytest.mark.parametrize("family", EVERYWHERE)
@pytest.mark.parametrize("strategy", ["fsdp2_train", "fsdp_train", "deepspeed_train"])
def test_all_linear_trains_no_router(run_ranks: RunRanks, tmp_path: Path, strategy: str, family: str) -> None:
    pytest.importorskip("peft")
    if strategy == "deepspeed_train":
        pytest.importorskip("deepspeed")
    source = write_moe(tmp_path / "model", family)
    role = make_role(source, strategy, model_args={"lora_target": "all-linear", "lora_rank": 2})
    trained = run_ranks(1, lora_cases.initial_weights, role)[0]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not [name for name in trained if "gate." in name or "router" in name or ".experts." in name]


ADAPTED = {
    "fsdp2": ("fsdp2_train", {}),
    "fsdp2-experts-apart": ("fsdp2_train", UNITS),
    "fsdp": ("fsdp_train", {}),
    "fsdp-experts-apart": ("fsdp_train", UNITS),
    "zero2": ("deepspeed_train", {"zero_stage": 2}),
    "zero3": ("deepspeed_train", {"zero_stage": 3}),
    "fsdp2-alone-checkpointed": ("fsdp2_train", {}),
    "zero3-alone": ("deepspeed_train", {"zero_stage": 3}),
    "fsdp2-ep2": ("fsdp2_train", {"ep_size": 2}),
    "fsdp2-ep2-of-4-experts-apart": ("fsdp2_train", {"ep_size": 2, **UNITS}),
    "fsdp2-ep2-alone-checkpointed": ("fsdp2_train", {"ep_size": 2}),
}


@pytest.fixture(scope="module")
def expert_adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    target, tensors = ["q_proj"], ["experts.gate_up_proj", "experts.down_proj"]
    return lora_cases.write_adapter(folder, tmp_path_factory.mktemp("adapter"), target=target, tensors=tensors)


@pytest.mark.long
@pytest.mark.parametrize("case", ["fsdp2-experts-apart", "fsdp", "zero3", "fsdp2-ep2"])
def test_adapters_of_experts_are_resumed_and_exported(
    run_ranks: RunRanks, folder: Path, expert_adapter: Path, tmp_path: Path, case: str
) -> None:
    """Also on one rank under FSDP2, and the export is what peft makes of base and adapter."""
    strategy, config = ADAPTED[case]
    role = make_role(folder, strategy, config=config, model_args={"adapter_name_or_path": str(expert_adapter)})
    parts = split_rows(make_batch(), SPLITS[2])
    whole = run_ranks(2, cases.train_and_save_adapters, role, parts, tmp_path)[0]
    resumed = run_ranks(2, cases.load_and_train_adapters, role, parts, tmp_path)[0]
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    other = make_role(folder, model_args={"adapter_name_or_path": str(expert_adapter)})
    (alone,) = run_ranks(1, cases.load_and_train_adapters, other, [make_batch()], tmp_path)
    for name, weight in whole.items():
        torch.testing.assert_close(alone[name], weight, rtol=0, atol=1e-4)  # sums in another order
    live = StoredLayout(plain_model(folder)).joined(whole)
    lora_cases.assert_export_is_complete(folder, tmp_path / "export", live, make_batch())


@pytest.mark.long
@pytest.mark.parametrize("case", ["fsdp2", "zero3"])
def test_adapted_experts_travel_merged_in_bounded_buckets(
    run_ranks: RunRanks, folder: Path, expert_adapter: Path, case: str
) -> None:
    """A stretch of matrices at a time, each merged; the same to rounding as the whole tensor merged."""
    strategy, config = ADAPTED[case]
    role = make_role(folder, strategy, config=config, model_args={"adapter_name_or_path": str(expert_adapter)})
    limit = 2**13
    found, most = run_ranks(2, cases.buckets, role, limit)[0]
    (wanted,), _ = run_ranks(2, cases.buckets, role, 2**30)[0]
    travelled = {name: tensor for bucket in found for name, tensor in bucket.items()}
    assert travelled.keys() == wanted.keys() == load_file(folder / "model.safetensors").keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(travelled[name], tensor, rtol=0, atol=1e-6)
    largest = max(tensor.nbytes for tensor in wanted.values())
    live = max(tensor.nbytes for tensor in plain_model(folder).parameters())
    assert most <= max(limit, largest) < live


@pytest.mark.long
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_of_experts_equal_plain_peft(run_ranks: RunRanks, tmp_path: Path, case: str) -> None:
    """Attention, shared and fused experts, or these alone; the merged weights are those that peft merges."""
    pytest.importorskip("peft")
    strategy, config = ADAPTED[case]
    if strategy == "deepspeed_train":
        pytest.importorskip("deepspeed")
    source = write_moe(tmp_path / "model", "qwen2_moe")
    targets = None if "alone" in case else ["q_proj", "v_proj", "shared_expert.down_proj"]
    tensors = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = lora_cases.write_adapter(source, tmp_path / "adapter", target=targets, tensors=tensors)
    wanted = lora_cases.plain_training(source, adapter, make_batch(), 2)
    wanted["weights"] = StoredLayout(plain_model(source)).views(wanted["weights"])  # as they are sent to the engines
    adapted = {"adapter_name_or_path": str(adapter), "disable_gradient_checkpointing": "checkpointed" not in case}
    role = make_role(source, strategy, config=config, model_args=adapted, training={"adam_epsilon": 1e-3})
    parts = split_rows(make_batch(), (4, 3, 3, 2) if "of-4" in case else (7, 5))
    results = run_ranks(len(parts), cases.train_adapters, role, parts, 2)
    lora_cases.assert_same_training(results, wanted, relative=4e-6)
