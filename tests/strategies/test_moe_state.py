"""Exports and adapters of mixture-of-experts models."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.strategies import jobs, lora_cases
from tests.strategies import moe_cases as cases
from tests.strategies.comparison import assert_same_bits
from tests.strategies.moe_models import FAMILIES, SEPARATE
from tests.strategies.samples import plain_model


@pytest.fixture(scope="module")
def folder(moe_folder):
    return moe_folder("qwen3_moe")


@pytest.mark.default_rows("2-fsdp2-deepseek_v3-*")
@pytest.mark.parametrize(
    ("world", "strategy", "name", "config"),
    [
        *((2, "fsdp2", name, {}) for name in FAMILIES if name != SEPARATE),
        (2, "fsdp", "mixtral", {}),
        (2, "zero3", "qwen3_moe", {}),
        # Two and two ranks hold shards of the same experts.
        *((4, "fsdp2", name, {"ep_size": 2}) for name in ("qwen3_moe", "gpt_oss")),
    ],
)
def test_an_export_has_the_published_layout(run, moe_folder, tmp_path, world, strategy, name, config):
    """The same tensors under the same names as in the folder that it came from, buffers that balance by a bias too."""
    source = moe_folder(name)
    run(jobs.export, world, strategy, source, tmp_path, config=config, batch=None)
    written = load_file(tmp_path / "model.safetensors")
    assert_same_bits(written, load_file(source / "model.safetensors"))
    assert name == "gpt_oss" or any(".experts.5." in key for key in written)
    assert any("e_score_correction_bias" in key for key in written) == (name in ("deepseek_v3", "glm4_moe"))
    assert_same_bits(plain_model(tmp_path).state_dict(), plain_model(source).state_dict())


def test_a_bias_that_balances_leaves_in_float32(run, moe_folder):
    source = moe_folder("deepseek_v3")
    (buckets,) = run(jobs.buckets, 2, "fsdp2", source, 2**30, dtype="bf16", batch=None)[0]
    biases = {name: tensor for name, tensor in buckets.items() if name.endswith("e_score_correction_bias")}
    wanted = load_file(source / "model.safetensors")
    assert biases and all(torch.equal(tensor, wanted[name]) for name, tensor in biases.items())
    assert {tensor.dtype for name, tensor in buckets.items() if name not in biases} == {torch.bfloat16}


def test_divided_experts_travel_in_the_compute_type(run, folder):
    (bucket,) = run(jobs.buckets, 2, "fsdp2", folder, 2**30, dtype="bf16", config={"ep_size": 2}, batch=None)[0]
    assert any(".experts." in name for name in bucket)
    assert {name: tensor.dtype for name, tensor in bucket.items() if tensor.dtype is not torch.bfloat16} == {}


@pytest.fixture(scope="module")
def expert_adapter(folder, tmp_path_factory):
    pytest.importorskip("peft")
    target, tensors = ["q_proj"], ["experts.gate_up_proj", "experts.down_proj"]
    return lora_cases.write_adapter(folder, tmp_path_factory.mktemp("adapter"), target=target, tensors=tensors)


@pytest.mark.long
@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_adapted_experts_travel_merged_in_bounded_buckets(run, folder, expert_adapter, strategy):
    """A stretch of matrices at a time, each merged; the same to rounding as the whole tensor merged."""
    options = {"model_args": {"adapter_name_or_path": str(expert_adapter)}, "batch": None}
    limit = 2**13
    found, most = run(cases.buckets, 2, strategy, folder, limit, **options)[0]
    (wanted,), _ = run(cases.buckets, 2, strategy, folder, 2**30, **options)[0]
    travelled = {name: tensor for bucket in found for name, tensor in bucket.items()}
    assert travelled.keys() == wanted.keys() == load_file(folder / "model.safetensors").keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(travelled[name], tensor, rtol=0, atol=1e-6)
    largest = max(tensor.nbytes for tensor in wanted.values())
    live = max(tensor.nbytes for tensor in plain_model(folder).parameters())
    assert most <= max(limit, largest) < live
