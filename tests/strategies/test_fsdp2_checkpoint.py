"""Saved and loaded, training goes on as if nothing had happened, also on another number of ranks."""

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


@pytest.mark.default_rows("1-config0", "2-config2")
@pytest.mark.parametrize(
    ("world_size", "config"), [(1, {}), (2, {}), (2, {"async_save_ckpt": False}), (4, {"fsdp_size": 2})]
)
def test_resumed_equals_uninterrupted_bit_for_bit(
    run_ranks: RunRanks, tied_model: Path, tmp_path: Path, world_size: int, config: dict[str, Any]
) -> None:
    role = make_role(tied_model, config=config, **OPTIONS)
    parts = split_rows(make_batch(), SPLITS[world_size])
    whole = run_ranks(world_size, cases.train_and_save, role, parts, tmp_path, 2)
    resumed = run_ranks(world_size, cases.load_and_train, role, parts, tmp_path, 2)
    for one, other in zip(whole, resumed, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["step"] == other["step"] == 4
        for kind in ("weights", "moments"):
            assert one[kind].keys() == other[kind].keys()
            assert all(torch.equal(one[kind][name], other[kind][name]) for name in one[kind])
        assert torch.equal(one["random"], other["random"])
    assert whole[0]["moments"]


def test_two_ranks_then_one_then_four(run_ranks: RunRanks, tied_model: Path, tmp_path: Path) -> None:
    role, batch = make_role(tied_model, **OPTIONS), make_batch()
    whole = run_ranks(2, cases.train_and_save, role, split_rows(batch, SPLITS[2]), tmp_path / "two", 2)[0]
    for world_size in (1, 4):
        resumed = run_ranks(
            world_size, cases.load_and_train, role, split_rows(batch, SPLITS[world_size]), tmp_path / "two", 2
        )[0]
        assert resumed["step"] == whole["step"]
        assert resumed["metrics"]["grad_norm"] == pytest.approx(whole["metrics"]["grad_norm"], rel=1e-3)
        for name, weight in whole["weights"].items():
            # Only the order of sums differs; AdamW's division by small second moments enlarges that.
            torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=1e-4)


def test_model_only_checkpoint_starts_the_moments_anew(run_ranks: RunRanks, tied_model: Path, tmp_path: Path) -> None:
    role = make_role(tied_model, config={"save_only_model": True}, **OPTIONS)
    parts = split_rows(make_batch(), SPLITS[2])
    run_ranks(2, cases.train_and_save, role, parts, tmp_path, 2)
    resumed = run_ranks(2, cases.load_and_train, role, parts, tmp_path, 1)[0]
    steps = {float(value) for name, value in resumed["moments"].items() if name.endswith(".step")}
    assert resumed["step"] == 3 and steps == {1.0}


def test_a_folder_without_checkpoint_is_named(run_ranks: RunRanks, tied_model: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"FileNotFoundError.*not a training checkpoint"):
        run_ranks(1, cases.load_and_train, make_role(tied_model), make_batch(), tmp_path, 1)
