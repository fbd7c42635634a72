"""A model read tensor by tensor is the one that ``from_pretrained`` loads; what cannot be read so is loaded whole."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.config.roles import ModelArguments
from roll.models.build import HeadName, build_model, has_tied_embeddings
from roll.models.loading import build_on_meta
from tests.models.builders import tiny

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write(folder: Path, family: str = "Qwen2", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    model = tiny(family, **options).to(dtype)
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
    model.save_pretrained(folder, max_shard_size="8KB")
    return folder


def read(folder: Path, head: HeadName = "causal_lm", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    meta = build_on_meta(ModelArguments(str(folder), **options), head, dtype)
    assert meta is not None
    assert all(parameter.is_meta for parameter in meta.language_model.parameters())
    meta.read(meta.language_model, torch.device("cpu"))
    return meta.language_model


def assert_same(model: Any, wanted: Any) -> None:
    for kind in ("named_parameters", "named_buffers"):
        own, other = dict(getattr(model, kind)()), dict(getattr(wanted, kind)())
        assert own.keys() == other.keys()
        for name, tensor in other.items():
            assert own[name].dtype == tensor.dtype and torch.equal(own[name], tensor), name
            assert own[name].requires_grad == tensor.requires_grad, name
    assert model.config.to_dict() == wanted.config.to_dict()
    assert model.training == wanted.training
    if model.can_generate():
        assert model.generation_config.to_dict() == wanted.generation_config.to_dict()
        assert has_tied_embeddings(model) == has_tied_embeddings(wanted)


@pytest.mark.default_rows("Qwen2-*", "Qwen3-False-*-dtype1", "Llama-True-value-*")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["causal_lm", "value", "score"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_equal_to_from_pretrained(
    tmp_path: Path, family: str, tied: bool, head: HeadName, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"rope_parameters": LLAMA3_ROPE} if family == "Llama" else {}
    folder = write(tmp_path, family, tie_word_embeddings=tied, **extra)
    assert (folder / "model.safetensors.index.json").is_file(), "several files"
    caplog.clear()
    model = read(folder, head, dtype, freeze_module_prefix="model.embed_tokens")
    assert not caplog.records
    wanted = build_model(ModelArguments(str(folder), freeze_module_prefix="model.embed_tokens"), head, dtype)
    assert_same(model, wanted)
    tokens = torch.arange(6)[None]
    assert torch.equal(model(input_ids=tokens).logits, wanted(input_ids=tokens).logits)


def test_a_value_head_in_the_files_is_read(tmp_path: Path) -> None:
    critic = read(write(tmp_path / "policy"), "value")
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(tmp_path / "critic")
    again = read(tmp_path / "critic", "value")
    assert torch.equal(again.score.weight, critic.score.weight)
    weights = load_file(tmp_path / "critic" / "model.safetensors")
    del weights["score.bias"]
    save_file(weights, tmp_path / "critic" / "model.safetensors", metadata={"format": "pt"})
    without_bias = read(tmp_path / "critic", "value").score
    assert torch.equal(without_bias.weight, critic.score.weight), "a reward model's head has no bias"
    assert not without_bias.bias.any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model.norm.weight": None}, "the files lack model.norm.weight"),
        ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight is \(3,\) in the files and \(16,\) in the"),
        ({"lm_head.weight": torch.ones(40, 16)}, r"tied tensors are stored twice \(lm_head.weight\)"),
        ({}, "is loaded whole by every rank: there are no safetensors files"),
    ],
)
def test_other_tensors_are_left_to_from_pretrained(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    read(write(tmp_path, tie_word_embeddings=True)).save_pretrained(tmp_path / "whole")
    file, args = tmp_path / "whole" / "model.safetensors", ModelArguments(str(tmp_path / "whole"))
    weights = load_file(file)
    if "lm_head.weight" in changes:
        changes = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    kept = {name: tensor for name, tensor in (weights | changes).items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})
    if not changes:
        torch.save(weights, file.with_name("pytorch_model.bin"))
        file.unlink()
    with caplog.at_level(logging.INFO, "roll.models.loading"):
        caplog.clear()
        assert build_on_meta(args, "causal_lm") is None
    (message,) = caplog.messages
    assert re.search(reason, message)
    if not changes:
        assert not any(parameter.is_meta for parameter in build_model(args, "causal_lm").parameters())
