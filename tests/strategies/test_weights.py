"""Weights leave a divided model whole, under their Hugging Face names, bucket by bucket and as a folder."""

from __future__ import annotations

from unittest.mock import patch
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig

from tests.strategies import jobs
from tests.strategies.samples import make_batch, plain_model

LIMIT = 8192
WRAPPED = {"wrap_policy": {"wrap_embeddings": True, "wrap_lm_output": True}}
BUCKETS = [
    (2, "fsdp2", "tied", {}),
    *((world, name, "tied", {"fsdp_size": 2}) for world in (2, 4) for name in ("fsdp", "fsdp_infer")),
    *((2, f"zero{stage}{ending}", "tied", {}) for stage in (0, 2, 3) for ending in ("", "_infer")),
    *(
        (world, "megatron_infer", model, sizes)
        for world, sizes in [(1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"tp": 2, "pp": 2}), (2, {})]
        for model in ("qwen2", "qwen3")
    ),
]


def name_of(value):
    if isinstance(value, dict):
        return "-".join(f"{key}{size}" for key, size in value.items()) or "whole"
    return None


@pytest.mark.long
@pytest.mark.default_rows("bf16-2-fsdp-*", "bf16-2-zero2-*", "fp32-2-zero3_infer-*", "bf16-2-megatron_infer-qwen3-tp2")
@pytest.mark.parametrize(("world", "strategy", "model", "config"), BUCKETS, ids=name_of)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_buckets_hold_the_whole_model_once(run, family, world, strategy, model, config, dtype):
    first, *others = run(jobs.buckets, world, strategy, model, LIMIT, dtype=dtype, config=config, batch=None)
    sent = {name: tensor for bucket in first for name, tensor in bucket.items()}
    assert sum(len(bucket) for bucket in first) == len(sent)
    wanted = dict(plain_model(family(model)).named_parameters())
    assert sent.keys() == wanted.keys(), "tied weights are sent once, under the embedding's name"
    for name, parameter in wanted.items():
        assert torch.equal(sent[name], parameter.detach().to(torch.bfloat16 if dtype == "bf16" else torch.float32))
    sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in first]
    assert all(size <= LIMIT or len(bucket) == 1 for size, bucket in zip(sizes, first, strict=True))
    assert len(first) < len(sent)
    assert all(len(other) == len(first) and not any(other) for other in others)


@pytest.mark.default_rows("zero3")
@pytest.mark.parametrize("strategy", ["zero0", "zero2", "zero3", "zero3_infer"])
def test_a_bucket_takes_one_collective_at_most(run, strategy):
    for num_buckets, calls in run(jobs.count_collectives, 2, strategy, "tied", LIMIT, batch=None):
        assert num_buckets > 1 and calls == (num_buckets if strategy.startswith("zero3") else 0)


def gathered_at_once(role, bucket_bytes):
    """Most bytes of gathered tensors that were held when the next ones were gathered; most bytes of one gather."""
    from roll.strategies.megatron.weights import FullWeights

    gathered, held, sizes = [], [0], [0]
    collect = FullWeights._collect

    def watched(self, stage, entry):
        held.append(sum(tensor.nbytes for one in gathered if (tensor := one()) is not None))
        tensors = collect(self, stage, entry)
        gathered.extend(ref(tensor) for tensor in tensors)
        sizes.append(sum(tensor.nbytes for tensor in tensors))
        return tensors

    with patch.object(FullWeights, "_collect", watched):
        found = jobs.started(role).named_full_weights(bucket_bytes)
        while next(found, None) is not None:
            pass
    return max(held), max(sizes)


@pytest.mark.long
def test_a_bucket_is_let_go_before_the_next_is_gathered(run):
    ((held, most),) = run(gathered_at_once, 1, "megatron_infer", "qwen2", 30000, batch=None)
    assert 0 < held <= 30000 + most


EXPORTS = [
    (1, "fsdp2", "untied", {}),
    (2, "fsdp2", "tied", {}),
    (2, "fsdp", "untied", WRAPPED),
    (2, "zero3", "tied", {}),
    *((4, "megatron_infer", model, {"tp": 2, "pp": 2}) for model in ("qwen2", "qwen3", "llama")),
]


@pytest.mark.default_rows("2-fsdp-untied", "2-zero3-tied", "4-megatron_infer-qwen3")
@pytest.mark.parametrize(
    ("world", "strategy", "model", "config"), [pytest.param(*row, id="-".join(map(str, row[:3]))) for row in EXPORTS]
)
def test_export_is_a_hugging_face_folder(run, family, tmp_path, world, strategy, model, config):
    run(jobs.export, world, strategy, model, tmp_path, config=config, batch=None)
    wanted, exported = plain_model(family(model)), plain_model(tmp_path)
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    assert exported.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor)
    assert exported.config.tie_word_embeddings == wanted.config.tie_word_embeddings
    assert exported.config.use_cache


LAYOUTS = {"fsdp2": ("fsdp2", "untied", {}), "pp2": ("megatron", "qwen2", {"pp": 2})}


@pytest.mark.long
@pytest.mark.default_rows("pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_value_model_keeps_its_head_and_states_its_type(run, tmp_path, layout):
    strategy, model, config = LAYOUTS[layout]
    run(jobs.export, 2, strategy, model, tmp_path, True, config=config, dtype="bf16", batch=None)
    assert AutoConfig.from_pretrained(tmp_path).dtype is torch.bfloat16
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["score.weight"].shape == (1, 32) and not weights["score.weight"].any()
    weights["score.weight"] += 0.5
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    run(jobs.export, 1, strategy, tmp_path, tmp_path / "again", True, dtype="bf16", batch=None)
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["score.weight"], weights["score.weight"])


def loaded_and_left(role):
    """Bytes of weights that were read, and of those still there when DeepSpeed has put them into its flat tensor."""
    strategy = jobs.new_strategy(role)
    read, left = {}, []
    start, following = strategy._start_engine, strategy._watch_balance

    def noting(*args, **options):
        for parameter in strategy.model.parameters():
            storage = parameter.data.untyped_storage()
            read[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        del parameter, storage  # whatever keeps this frame alive for a while would keep the last weights, too
        return start(*args, **options)

    def counting():
        left.append(sum(size for reference, size in read.values() if not reference.expired()))
        following()

    with patch.object(strategy, "_start_engine", noting), patch.object(strategy, "_watch_balance", counting):
        strategy.initialize(num_training_steps=1)
    return sum(size for _, size in read.values()), left[0]


@pytest.mark.long
def test_weights_that_were_read_do_not_stay_next_to_deepspeeds(run):
    for read, left in run(loaded_and_left, 2, "zero1", "tied", batch=None):
        assert read > 0 and left == 0


@pytest.mark.long
def test_a_layer_is_gathered_at_once(run):
    """Forward passes under ZeRO-3: embeddings (the output matrix is tied to them), two layers and a norm, gathered once
    each; module by module it would be nine gathers a layer."""
    section = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    for modules, gathers in (({}, 4), ({"leaf_module": {"classes": []}}, 20)):
        config = {"zero_optimization": section | modules}
        options = {"infer_batch_size": 12, "config": config, "batch": None}
        assert run(jobs.count_gathers, 2, "zero3_infer", "tied", make_batch(), **options) == [gathers] * 2
