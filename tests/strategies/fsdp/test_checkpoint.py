"""Saved and loaded, training under FSDP1 goes on as if nothing had happened, also on other ranks and under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies import sharded_cases as cases
from tests.strategies.samples import make_batch, make_role, split_rows

RunRanks = Callable[..., list[Any]]
SPLITS = {1: (12,), 2: (6, 6), 4: (3, 3, 3, 3)}
OPTIONS = {"training": {"lr_scheduler_type": "cosine", "warmup_steps": 1}}


def parts(world_size: int) -> Any:
    return split_rows(make_batch(), SPLITS[world_size])


@pytest.mark.default_rows("2-*")
@pytest.mark.parametrize(("world_size", "config", "dtype"), [(2, {}, "bf16"), (4, {"fsdp_size": 2}, "fp32")])
def test_resumed_equals_uninterrupted_bit_for_bit(
    run_ranks: RunRanks, tied_model: Path, tmp_path: Path, world_size: int, config: dict[str, Any], dtype: str
) -> None:
    role = make_role(tied_model, "fsdp_train", dtype=dtype, config=config, **OPTIONS)
    whole = run_ranks(world_size, cases.train_and_save, role, parts(world_size), tmp_path, 2)
    resumed = run_ranks(world_size, cases.load_and_train, role, parts(world_size), tmp_path, 2)
    for one, other in zip(whole, resumed, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["step"] == other["step"] == 4
        for kind in ("weights", "moments"):
            assert one[kind].keys() == other[kind].keys()
            assert all(torch.equal(one[kind][name], other[kind][name]) for name in one[kind])
        assert torch.equal(one["random"], other["random"])
    steps = {float(value) for name, value in whole[0]["moments"].items() if name.endswith(".step")}
    assert steps == {4.0} and any(value.any() for value in whole[0]["moments"].values())


@pytest.mark.default_rows("fsdp_train-fsdp_train-1", "fsdp_train-fsdp2_train-2")
@pytest.mark.parametrize(
    ("writer", "reader", "world_size"),
    [
        ("fsdp_train", "fsdp_train", 1),
        ("fsdp_train", "fsdp_train", 4),
        ("fsdp_train", "fsdp2_train", 2),
        ("fsdp2_train", "fsdp_train", 2),
    ],
)
def test_two_ranks_write_and_others_go_on(
    run_ranks: RunRanks, tied_model: Path, tmp_path: Path, writer: str, reader: str, world_size: int
) -> None:
    whole = run_ranks(2, cases.train_and_save, make_role(tied_model, writer, **OPTIONS), parts(2), tmp_path, 2)[0]
    role = make_role(tied_model, reader, **OPTIONS)
    resumed = run_ranks(world_size, cases.load_and_train, role, parts(world_size), tmp_path, 2)[0]
    assert resumed["step"] == whole["step"]
    assert resumed["metrics"]["grad_norm"] == pytest.approx(whole["metrics"]["grad_norm"], rel=1e-3)
    for name, weight in whole["weights"].items():
        # Only the order of sums differs; AdamW's division by small second moments enlarges that.
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=1e-4)


def test_model_only_checkpoint_starts_the_moments_anew(run_ranks: RunRanks, tied_model: Path, tmp_path: Path) -> None:
    role = make_role(tied_model, "fsdp_train", config={"save_only_model": True}, **OPTIONS)
    run_ranks(2, cases.train_and_save, role, parts(2), tmp_path, 2)
    resumed = run_ranks(2, cases.load_and_train, role, parts(2), tmp_path, 1)[0]
    steps = {float(value) for name, value in resumed["moments"].items() if name.endswith(".step")}
    assert resumed["step"] == 3 and steps == {1.0}
