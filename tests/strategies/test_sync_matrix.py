"""Weights of every training strategy arrive in an engine, by every transport and in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from roll.models.stored import StoredLayout
from tests.strategies import moe_cases, sync_cases
from tests.strategies.hf_infer.helpers import make_tokenizer
from tests.strategies.moe_models import write_moe
from tests.strategies.samples import plain_model
from tests.weight_sync.local_engines import TRANSPORTS

FROZEN = "model.embed_tokens,model.layers.0"
STRATEGIES = {
    **{name: (name, {}) for name in ("fsdp2", "fsdp", "zero1", "zero2", "zero3")},
    "megatron-tp": ("megatron", {"tp": 2}),
    "megatron-pp": ("megatron", {"pp": 2}),
}
UPDATES = {
    "fsdp2": [(transport, ("trained", "delta")[number % 2]) for number, transport in enumerate(TRANSPORTS)],
    "others": [("shared_memory", "trained"), ("broadcast", "delta"), ("safetensors", "trained")],
}


@pytest.fixture(scope="module")
def folder(untied_model):
    make_tokenizer().save_pretrained(untied_model)
    return untied_model


@pytest.mark.long_rows("megatron-pp")
@pytest.mark.default_rows("fsdp2", "megatron-pp")
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_and_transport(run, folder, tmp_path, name):
    strategy, config = STRATEGIES[name]
    updates = UPDATES.get(name, UPDATES["others"])
    training = {"learning_rate": 1e-5, "weight_decay": 0.0}
    options = {"dtype": "bf16", "config": config, "model_args": {"freeze_module_prefix": FROZEN}, "training": training}
    sent, _ = run(sync_cases.train_and_sync, 2, strategy, folder, tmp_path, updates, **options)
    whole, partial = sent[0::2], sent[1::2]
    assert len({tensors for tensors, _ in sent}) == 1, "every update verifies all tensors"
    assert len({num_bytes for _, num_bytes in whole}) == 1
    for (_, mode), (_, num_bytes) in zip(updates, partial, strict=True):
        assert 0 < num_bytes < whole[0][1] * (0.6 if mode == "trained" else 0.2), mode
    assert not list(tmp_path.rglob("*.safetensors"))


EXPERTS = {
    "fsdp2": ("qwen3_moe", "fsdp2", {}),
    "fsdp2-gpt_oss": ("gpt_oss", "fsdp2", {}),
    "fsdp2-deepseek": ("deepseek_v3", "fsdp2", {}),
    "fsdp2-linear": ("qwen3_next", "fsdp2", {}),
    "fsdp2-adapters": ("qwen3_moe", "fsdp2", {}),
    "fsdp": ("olmoe", "fsdp", {}),
    "zero3": ("mixtral", "zero3", {}),
    "megatron-ep": ("qwen2_moe", "megatron", {"ep": 2}),
    "megatron-ep-adapters": ("qwen2_moe", "megatron", {"ep": 2}),
}


def on_the_way(folder: Path) -> dict[str, torch.Tensor]:
    """A model's tensors as they travel."""
    plain = plain_model(folder)
    return StoredLayout(plain).on_the_way().views(plain.state_dict())


@pytest.mark.long
@pytest.mark.default_rows("megatron-ep")
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_travel_as_they_are_stored(run, tmp_path, name):
    """The engine computes with two tensors a layer; what it holds is compared matrix by matrix."""
    family, strategy, config = EXPERTS[name]
    folder = write_moe(tmp_path / "model", family)
    make_tokenizer().save_pretrained(folder)
    adapted = {"lora_target": "all-linear,experts", "lora_rank": 2} if name.endswith("adapters") else {}
    options = {"dtype": "bf16", "config": config, "model_args": adapted, "training": {"learning_rate": 1e-3}}
    updates = ("shared_memory", "trained"), ("safetensors", "delta")
    sent, _ = run(sync_cases.train_and_sync, 2, strategy, folder, tmp_path, updates, **options)
    travelling = on_the_way(folder)
    assert {tensors for tensors, _ in sent} == {len(travelling)}
    assert travelling.keys() == load_file(folder / "model.safetensors").keys() or family == "gpt_oss"


@pytest.mark.long
@pytest.mark.default_rows("megatron-tp")
@pytest.mark.parametrize("name", ["fsdp2", "zero3", "megatron-tp", "megatron-pp"])
def test_adapters_by_themselves(run, folder, tmp_path, name):
    """The engine merges them to the very weights that the trainer would have sent."""
    pytest.importorskip("peft")
    strategy, config = STRATEGIES[name]
    lora = {"lora_target": "all-linear", "lora_rank": 2, "lora_alpha": 4}
    options = {"dtype": "bf16", "config": config, "model_args": lora}
    updates = [("object_store", "trained")]
    sent, _ = run(sync_cases.train_and_sync, 2, strategy, folder, tmp_path, updates, True, **options)
    assert sent[1][0] == sent[0][0]
    assert sent[1][1] < 0.2 * sent[0][1]


@pytest.mark.long
@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-ep2", "fsdp", "zero3", "fsdp2-gpt_oss", "fsdp2-ep2-gpt_oss"])
def test_experts_travel_in_bounded_buckets(run, tmp_path, name):
    """A layer's experts are one tensor that is larger than a bucket: no more than a bucket of them is gathered at a
    time, however a folder holds them."""
    family = "gpt_oss" if name.endswith("gpt_oss") else "qwen3_moe"
    strategy, config = (STRATEGIES | {"fsdp2-ep2": ("fsdp2", {"ep_size": 2})})[name.removesuffix("-gpt_oss")]
    folder, limit = write_moe(tmp_path, family), 2**13
    (found, most), (_, none) = run(moe_cases.buckets, 2, strategy, folder, limit, config=config, batch=None)
    stored = on_the_way(folder)
    assert all(sum(tensor.nbytes for tensor in bucket.values()) <= limit or len(bucket) == 1 for bucket in found)
    assert sorted(key for bucket in found for key in bucket) == sorted(stored)
    assert all(torch.equal(tensor, stored[key]) for bucket in found for key, tensor in bucket.items())
    largest = max(tensor.nbytes for tensor in stored.values())
    experts = max(tensor.nbytes for key, tensor in stored.items() if ".experts." in key)
    assert most <= max(limit, largest) < 6 * experts and none == 0
