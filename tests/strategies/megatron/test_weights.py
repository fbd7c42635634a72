"""Weights leave a cut model whole, under their Hugging Face names, and checkpoints fit other ways of cutting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.samples import plain_model

cases = pytest.importorskip("tests.strategies.megatron.cases", reason="needs megatron-core")

RunCase = Callable[..., list[Any]]
Family = Callable[[str], Path]
OPTIONS = {"training": {"lr_scheduler_type": "cosine", "warmup_steps": 1}}


@pytest.mark.default_rows("qwen2-fp32-1-sizes0", "qwen3-bf16-2-sizes1", "qwen2-fp32-2-sizes2")
@pytest.mark.parametrize(
    ("world", "sizes"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"tp": 2, "pp": 2}), (2, {})]
)
@pytest.mark.parametrize(("model", "dtype"), [("qwen2", "fp32"), ("qwen3", "bf16")])
def test_buckets_hold_the_whole_model_once(
    run_case: RunCase, family: Family, world: int, sizes: dict[str, Any], model: str, dtype: str
) -> None:
    limit = 8192
    first, *others = run_case(cases.buckets, world, sizes, model, args=(limit,), dtype=dtype, strategy="megatron_infer")
    sent = {name: tensor for bucket in first for name, tensor in bucket.items()}
    assert sum(len(bucket) for bucket in first) == len(sent)
    wanted = dict(plain_model(family(model)).named_parameters())
    assert sent.keys() == wanted.keys(), "tied weights are sent once, under the embedding's name"
    for name, parameter in wanted.items():
        assert torch.equal(sent[name], parameter.detach().to(torch.bfloat16 if dtype == "bf16" else torch.float32))
    sizes_in_bytes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in first]
    assert all(size <= limit or len(bucket) == 1 for size, bucket in zip(sizes_in_bytes, first, strict=True))
    assert len(first) < len(sent)
    assert all(len(other) == len(first) and not any(other) for other in others)


def test_a_bucket_is_let_go_before_the_next_is_gathered(run_case: RunCase) -> None:
    ((held, most),) = run_case(cases.gathered_at_once, 1, {}, args=(30000,), strategy="megatron_infer")
    assert 0 < held <= 30000 + most


@pytest.mark.default_rows("qwen2-1-sizes0", "qwen3-4-sizes1", "llama-1-sizes0")
@pytest.mark.parametrize(("world", "sizes"), [(1, {}), (4, {"tp": 2, "pp": 2})])
@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama"])
def test_export_is_a_hugging_face_folder(
    run_case: RunCase, family: Family, tmp_path: Path, world: int, sizes: dict[str, Any], model: str
) -> None:
    run_case(cases.export, world, sizes, model, args=(tmp_path / "export",), strategy="megatron_infer")
    wanted, exported = plain_model(family(model)), plain_model(tmp_path / "export")
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {
        file.name for file in (tmp_path / "export").iterdir()
    }
    assert exported.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor)
    assert exported.config.tie_word_embeddings == wanted.config.tie_word_embeddings


def test_export_states_the_type_it_wrote(run_case: RunCase, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run_case(cases.export, 2, {"tp": 2}, args=(tmp_path,), strategy="megatron_infer", dtype="bf16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype is torch.bfloat16


def test_exported_value_model_keeps_its_head(run_case: RunCase, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run_case(cases.export, 2, {"pp": 2}, args=(tmp_path / "one", True))
    weights = load_file(tmp_path / "one" / "model.safetensors")
    assert weights["score.weight"].shape == (1, 32) and not weights["score.weight"].any()
    weights["score.weight"] += 0.5
    save_file(weights, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    run_case(cases.export, 2, {"tp": 2}, tmp_path / "one", args=(tmp_path / "two", True))
    assert torch.equal(load_file(tmp_path / "two" / "model.safetensors")["score.weight"], weights["score.weight"])


@pytest.mark.default_rows("2-sizes2-bf16", "4-sizes5-fp32")
@pytest.mark.parametrize(
    ("world", "sizes", "dtype"),
    [
        (1, {}, "fp32"),
        (2, {"dist_opt": True}, "fp32"),
        (2, {"dist_opt": True}, "bf16"),
        (2, {"tp": 2, "sp": True}, "bf16"),
        (4, {"tp": 2, "pp": 2}, "fp32"),
        (4, {"pp": 2, "dist_opt": True, "vpp": 2}, "fp32"),
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(
    run_case: RunCase, tmp_path: Path, world: int, sizes: dict[str, Any], dtype: str
) -> None:
    whole = run_case(cases.train_and_save, world, sizes, args=(tmp_path, 2), dtype=dtype, **OPTIONS)
    resumed = run_case(cases.load_and_train, world, sizes, args=(tmp_path, 2), dtype=dtype, **OPTIONS)
    for one, other in zip(whole, resumed, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["step"] == other["step"] == 4
        for kind in ("weights", "state"):
            assert one[kind].keys() == other[kind].keys()
            assert all(torch.equal(one[kind][name], other[kind][name]) for name in one[kind])
        assert torch.equal(one["random"], other["random"])
    assert any(name.startswith("exp_avg_sq/") and tensor.any() for name, tensor in whole[0]["state"].items())


def test_another_way_of_cutting_goes_on_from_the_same_state(run_case: RunCase, tmp_path: Path) -> None:
    whole = run_case(cases.train_and_save, 4, {"tp": 2, "pp": 2}, args=(tmp_path, 2), **OPTIONS)[0]
    for world, sizes in ((1, {}), (2, {"tp": 2}), (2, {"dist_opt": True}), (4, {"pp": 4}), (2, {"pp": 2, "vpp": 2})):
        resumed = run_case(cases.load_and_train, world, sizes, args=(tmp_path, 2), **OPTIONS)[0]
        assert resumed["step"] == whole["step"]
        assert resumed["metrics"]["grad_norm"] == pytest.approx(whole["metrics"]["grad_norm"], rel=1e-3)
        for name, weight in whole["weights"].items():
            # Only the order of sums differs; AdamW's division by small second moments enlarges that.
            torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=1e-4)


@pytest.mark.default_rows("bf16-*")
@pytest.mark.parametrize(
    ("dtype", "others"),
    [
        ("fp32", [(1, {}), (4, {"pp": 4})]),
        ("bf16", [(2, {"dist_opt": True}), (4, {"tp": 2, "cp": 2, "dist_opt": True})]),
    ],
)
def test_a_loaded_state_is_the_saved_one_bit_for_bit(
    run_case: RunCase, tmp_path: Path, dtype: str, others: list[tuple[int, dict[str, Any]]]
) -> None:
    saved = run_case(cases.save_state, 4, {"tp": 2, "pp": 2}, args=(tmp_path,), dtype=dtype)[0]
    for world, sizes in others:
        loaded = run_case(cases.load_state, world, sizes, args=(tmp_path,), dtype=dtype)[0]
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_a_folder_without_checkpoint_is_named(run_case: RunCase, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"FileNotFoundError.*not a training checkpoint"):
        run_case(cases.load_and_train, 1, {}, args=(tmp_path, 1))
