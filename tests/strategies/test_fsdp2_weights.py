"""Weights leave a sharded model whole, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies import sharded_cases as cases
from tests.strategies.samples import make_role, plain_model

RunRanks = Callable[..., list[Any]]


@pytest.mark.default_rows("fp32-2", "bf16-1")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_buckets_hold_the_whole_model_once(run_ranks: RunRanks, tied_model: Path, world_size: int, dtype: str) -> None:
    limit = 8192
    first, *others = run_ranks(world_size, cases.buckets, make_role(tied_model, dtype=dtype), limit)
    sent = {name: tensor for bucket in first for name, tensor in bucket.items()}
    assert sum(len(bucket) for bucket in first) == len(sent)
    wanted = dict(plain_model(tied_model).named_parameters())
    assert sent.keys() == wanted.keys(), "tied weights are sent once, under the embedding's name"
    for name, parameter in wanted.items():
        assert torch.equal(sent[name], parameter.detach().to(torch.bfloat16 if dtype == "bf16" else torch.float32))
    sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in first]
    assert all(size <= limit or len(bucket) == 1 for size, bucket in zip(sizes, first, strict=True))
    assert len(first) < len(sent)
    assert all(len(other) == len(first) and not any(other) for other in others)


@pytest.mark.default_rows("tied_model-2", "untied_model-1")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
def test_export_is_a_hugging_face_folder(
    run_ranks: RunRanks, request: pytest.FixtureRequest, tmp_path: Path, world_size: int, model: str
) -> None:
    source = request.getfixturevalue(model)
    run_ranks(world_size, cases.export, make_role(source), tmp_path / "export")
    wanted, exported = plain_model(source), plain_model(tmp_path / "export")
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {
        file.name for file in (tmp_path / "export").iterdir()
    }
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor)
    assert exported.config.use_cache


def test_export_states_the_type_it_wrote(run_ranks: RunRanks, untied_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run_ranks(1, cases.export, make_role(untied_model, dtype="bf16"), tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype is torch.bfloat16


def test_exported_value_model_keeps_its_head(run_ranks: RunRanks, tied_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run_ranks(2, cases.export, make_role(tied_model), tmp_path, True)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["score.weight"].shape == (1, 32) and not weights["score.weight"].any()
    weights["score.weight"] += 0.5
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    run_ranks(1, cases.export, make_role(tmp_path), tmp_path / "again", True)
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["score.weight"], weights["score.weight"])
