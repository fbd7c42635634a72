"""Weights leave a model under FSDP1 whole, under their Hugging Face names, by one collective a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies import sharded_cases as cases
from tests.strategies.samples import make_batch, make_role, plain_model, split_rows

RunRanks = Callable[..., list[Any]]
LIMIT = 8192


@pytest.mark.default_rows("1", "2")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_buckets_hold_the_whole_model_once(run_ranks: RunRanks, tied_model: Path, world_size: int) -> None:
    roles = {
        f"{strategy}-{dtype}": make_role(tied_model, strategy, dtype=dtype, config={"fsdp_size": 2})
        for strategy in ("fsdp_train", "fsdp_infer")
        for dtype in ("fp32", "bf16")
    }
    first, *others = run_ranks(world_size, cases.each, cases.buckets, roles, LIMIT)
    wanted = dict(plain_model(tied_model).named_parameters())
    for name, buckets in first.items():
        sent = {key: tensor for bucket in buckets for key, tensor in bucket.items()}
        assert sum(len(bucket) for bucket in buckets) == len(sent)
        assert sent.keys() == wanted.keys(), "tied weights are sent once, under the embedding's name"
        dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
        assert all(torch.equal(sent[key], parameter.detach().to(dtype)) for key, parameter in wanted.items())
        sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in buckets]
        assert all(size <= LIMIT or len(bucket) == 1 for size, bucket in zip(sizes, buckets, strict=True))
        assert len(buckets) < len(sent)
        assert all(len(other[name]) == len(buckets) and not any(other[name]) for other in others)


@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
def test_export_is_a_hugging_face_folder(
    run_ranks: RunRanks, request: pytest.FixtureRequest, tmp_path: Path, model: str
) -> None:
    source = request.getfixturevalue(model)
    config = {"wrap_policy": {"wrap_embeddings": model == "untied_model", "wrap_lm_output": model == "untied_model"}}
    run_ranks(2, cases.export, make_role(source, "fsdp_train", config=config), tmp_path / "export")
    wanted, exported = plain_model(source), plain_model(tmp_path / "export")
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {
        file.name for file in (tmp_path / "export").iterdir()
    }
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor)


def test_weights_are_those_after_the_last_step(run_ranks: RunRanks, tied_model: Path) -> None:
    """Not what a forward pass left gathered: each step here comes after one."""
    roles = {
        str(keep): make_role(tied_model, "fsdp_train", config={"reshard_after_forward": not keep})
        for keep in (False, True)
    }
    results = run_ranks(2, cases.each, cases.train, roles, split_rows(make_batch(), (7, 5)), 2)[0]
    start = dict(plain_model(tied_model).named_parameters())
    for name, parameter in start.items():
        assert not torch.equal(results["True"]["weights"][name], parameter)
        torch.testing.assert_close(results["True"]["weights"][name], results["False"]["weights"][name])
