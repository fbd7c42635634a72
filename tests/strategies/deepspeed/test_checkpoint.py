"""Saved and loaded, training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from tests.strategies.deepspeed import cases
from tests.strategies.deepspeed.test_numbers import zero
from tests.strategies.samples import make_batch, make_role, split_rows

RunRanks = Callable[..., list[Any]]
OPTIONS = {"training": {"lr_scheduler_type": "cosine", "warmup_steps": 1}}
CONFIGS = {
    "zero0": zero(0),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero2-offload": zero(2, offload="cpu"),
    "zero3-offload": zero(3, offload="cpu", offload_param=True),
}


@pytest.mark.default_rows("bf16-*")
@pytest.mark.parametrize(("dtype", "names"), [("fp32", list(CONFIGS)), ("bf16", ["zero0", "zero2", "zero3-offload"])])
def test_resumed_equals_uninterrupted_bit_for_bit(
    run_ranks: RunRanks, tied_model: Path, tmp_path: Path, dtype: str, names: list[str]
) -> None:
    roles = {
        name: make_role(tied_model, "deepspeed_train", dtype=dtype, config=CONFIGS[name], **OPTIONS) for name in names
    }
    parts = split_rows(make_batch(), (6, 6))
    whole = run_ranks(2, cases.train_and_save_each, roles, parts, tmp_path, 2)
    resumed = run_ranks(2, cases.load_and_train_each, roles, parts, tmp_path, 2)
    for name in roles:
        for one, other in zip((rank[name] for rank in whole), (rank[name] for rank in resumed), strict=True):
            assert one["metrics"] == other["metrics"], name
            assert one["step"] == other["step"] == 4
            for kind in ("weights", "optimizer"):
                assert one[kind].keys() == other[kind].keys()
                assert all(torch.equal(one[kind][key], other[kind][key]) for key in one[kind]), (name, kind)
            assert torch.equal(one["random"], other["random"])
            steps = {float(value) for key, value in one["optimizer"].items() if key.endswith(".step")}
            assert steps == {4.0} and any(key.endswith(".exp_avg_sq") for key in one["optimizer"])


@pytest.mark.default_rows("zero3-fp32-1")
@pytest.mark.parametrize(
    ("name", "dtype", "ranks"),
    [
        ("zero1", "bf16", 1),
        ("zero2", "fp32", 4),
        ("zero3", "fp32", 1),
        ("zero3", "bf16", 4),
        ("zero2-offload", "fp32", 1),
        ("zero3-offload", "bf16", 1),
    ],
)
def test_another_number_of_ranks_continues(
    run_ranks: RunRanks, tied_model: Path, tmp_path: Path, name: str, dtype: str, ranks: int
) -> None:
    # Epsilon keeps AdamW from turning a gradient that is rounding noise into a whole step.
    training = OPTIONS["training"] | {"adam_epsilon": 1e-3}
    role = make_role(tied_model, "deepspeed_train", dtype=dtype, config=CONFIGS[name], training=training)
    parts = {size: split_rows(make_batch(), sizes) for size, sizes in {2: (6, 6), 4: (3, 3, 3, 3)}.items()}
    parts[1] = [make_batch()]
    saved = run_ranks(2, cases.train_save_and_show, role, parts[2], tmp_path, parts[2])
    shares = parts[ranks] if ranks > 1 else parts[1][0]
    loaded = run_ranks(ranks, cases.load_and_show, role, shares, tmp_path)
    for result in loaded:
        assert result["state"].keys() == saved[0]["state"].keys()
        for key, wanted in saved[0]["state"].items():
            assert torch.equal(result["state"][key], wanted), key
    # The next step's gradients are summed in another order; in bf16 they and the weights sent have 8 bits.
    relative = 1e-5 if dtype == "fp32" else 2**-6
    for key, wanted in saved[0]["weights"].items():
        error = (loaded[0]["weights"][key].float() - wanted.float()).abs().max()
        assert float(error) <= relative * float(wanted.float().abs().max()), key


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_stage_continues_every_other(run_ranks: RunRanks, tied_model: Path, tmp_path: Path, dtype: str) -> None:
    """Float32 weights and moments, and the weights that go to engines, to the last bit."""
    names = [f"zero{stage}" for stage in range(4)]
    roles = {name: make_role(tied_model, "deepspeed_train", dtype=dtype, config=CONFIGS[name]) for name in names}
    results = run_ranks(2, cases.between_stages, roles, split_rows(make_batch(), (7, 5)), tmp_path)
    for rank in results:
        assert len(rank) == len(names) ** 2
        for (writer, reader), loaded in rank.items():
            for kind, wanted in rank[writer, writer].items():
                assert loaded[kind].keys() == wanted.keys() and (wanted or rank is not results[0])
                assert all(torch.equal(loaded[kind][key], wanted[key]) for key in wanted), (writer, reader, kind)


def test_a_folder_without_checkpoint_is_named(run_ranks: RunRanks, tied_model: Path, tmp_path: Path) -> None:
    role = make_role(tied_model, "deepspeed_train", config=zero(1))
    with pytest.raises(AssertionError, match=r"FileNotFoundError.*not a training checkpoint"):
        run_ranks(1, cases.load_and_train, role, make_batch(), tmp_path, 1)
