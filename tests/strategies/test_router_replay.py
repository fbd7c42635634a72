"""Recorded routes reach the tokens that they belong to in every layout, and give what a plain model gives with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.models.routes import missing_mark
from tests import vision_models
from tests.strategies import moe_cases, vision_cases
from tests.strategies.moe_models import EVERYWHERE, write_moe
from tests.strategies.routed import routed_results, with_routes
from tests.strategies.samples import (
    DYNAMIC,
    PACKING,
    make_batch,
    make_role,
    split_rows,
)

RunRanks = Callable[..., list[Any]]
RELATIVE = 3e-6
RECOMPUTE = {"model_args": {"disable_gradient_checkpointing": False}}
SHARED = {"use_prefix_sharing": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    written: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in written:
            written[family] = write_moe(tmp_path_factory.mktemp(family), family)
        return written[family]

    return folder


ROWS = [
    pytest.param(1, "fsdp2_train", "qwen3_moe", {}, {}, id="fsdp2"),
    pytest.param(1, "fsdp2_train", "qwen3_moe", {}, PACKING, id="packed"),
    pytest.param(1, "fsdp2_train", "mixtral", {}, SHARED | PACKING, id="shared-prompts"),
    pytest.param(1, "fsdp2_train", "olmoe", {}, DYNAMIC, id="dynamic"),
    pytest.param(1, "fsdp2_train", "qwen2_moe", {}, RECOMPUTE | SHARED, id="recomputed-shared"),
    pytest.param(2, "fsdp2_train", "qwen3_moe", {}, RECOMPUTE, id="fsdp2-2-recomputed"),
    pytest.param(2, "fsdp2_train", "qwen3_moe", {}, {"model_args": {"ulysses_size": 2}} | SHARED, id="ulysses-shared"),
    pytest.param(2, "fsdp_train", "mixtral", {}, PACKING, id="fsdp-packed"),
    pytest.param(2, "deepspeed_train", "qwen2_moe", {"zero_stage": 3}, SHARED, id="zero3-shared"),
]


@pytest.mark.default_rows("packed", "recomputed-shared")
@pytest.mark.parametrize(("world", "strategy", "family", "config", "options"), ROWS)
def test_replay_equals_a_plain_model_told_what_to_choose(
    run_ranks: RunRanks,
    folders: Callable[[str], Path],
    world: int,
    strategy: str,
    family: str,
    config: dict[str, Any],
    options: dict[str, Any],
) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    batch = with_routes(make_batch())
    wanted = routed_results(folders(family), batch)
    role = make_role(folders(family), strategy, config=config, **options)
    shares_rows = "ulysses_size" in options.get("model_args", {})
    rows = [batch] * world if shares_rows else split_rows(batch, (12,) if world == 1 else (6, 6))
    results = run_ranks(world, moe_cases.train, role, rows if world > 1 else rows[0])
    for name, gradient in wanted["gradients"].items():
        difference = (results[0]["gradients"][name] - gradient).abs().max()
        assert float(difference) <= RELATIVE * max(float(gradient.abs().max()), 1e-2), name
    parts = results[:1] if shares_rows else results
    for name, values in wanted["outputs"].items():
        actual = torch.cat([part["outputs"][name] for part in parts])
        torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)
    metrics = results[0]["metrics"]
    assert metrics["moe_replay_missing"] == 0.0
    assert metrics["moe_replay_changed"] > 0.5, "random routes are not the live ones"


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, SHARED | PACKING], ids=["rows", "shared-packed"])
def test_replay_with_images(run_ranks: RunRanks, tmp_path: Path, options: dict[str, Any]) -> None:
    """The tokens of images are sent where they went, too."""
    folder = vision_models.save(tmp_path / "model", "qwen3_vl_moe")
    batch = with_routes(vision_cases.make_batch(), vision_cases.GROUP_SIZE, experts=8)
    wanted = routed_results(folder, batch, vision_cases.plain_model, vision_cases.plain_outputs)
    role = make_role(folder, "fsdp2_train", **options)
    (result,) = run_ranks(1, moe_cases.train, role, batch)
    for name, gradient in wanted["gradients"].items():
        difference = (result["gradients"][name] - gradient).abs().max()
        assert float(difference) <= 1e-5 * max(float(gradient.abs().max()), 1e-2), name
    for name, values in wanted["outputs"].items():
        torch.testing.assert_close(result["outputs"][name], values, rtol=0, atol=1e-5)
    assert result["metrics"]["moe_replay_missing"] == 0.0 and result["metrics"]["moe_replay_changed"] > 0.5


@pytest.mark.default_rows("qwen3_moe-shared", "mixtral-ulysses")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="rows"),
        pytest.param(SHARED | PACKING, id="shared"),
        pytest.param({"model_args": {"ulysses_size": 2}} | SHARED, id="ulysses"),
    ],
)
@pytest.mark.parametrize("family", EVERYWHERE)
def test_recorded_routes_are_the_live_ones(
    run_ranks: RunRanks, folders: Callable[[str], Path], family: str, options: dict[str, Any]
) -> None:
    """R2: every token has a route but the last of each row, and replaying them changes nothing."""
    world = 2 if "model_args" in options else 1
    batch = make_batch()
    role = make_role(folders(family), "fsdp2_train", **options)
    recorded, metrics, live = run_ranks(
        world, moe_cases.record_and_replay, role, [batch] * world if world > 1 else batch
    )[0]
    mark = missing_mark(recorded.dtype)
    for row, mask in enumerate(batch["response_mask"]):
        inputs = int(mask.nonzero().max()) if mask.any() else 0
        assert (recorded[row, :inputs] != mark).all() and (recorded[row, inputs:] == mark).all()
    assert metrics["moe_replay_missing"] == metrics["moe_replay_changed"] == 0.0
    assert metrics["grad_norm"] == pytest.approx(live["grad_norm"], rel=1e-6)


def test_a_missing_record_is_counted_and_said(run_ranks: RunRanks, folders: Callable[[str], Path]) -> None:
    batch = with_routes(make_batch())
    batch["routed_experts"][:, 2] = missing_mark(batch["routed_experts"].dtype)
    role = make_role(folders("qwen3_moe"), "fsdp2_train")
    wanted = routed_results(folders("qwen3_moe"), batch)
    (result,) = run_ranks(1, moe_cases.train, role, batch)
    assert 0.02 < result["metrics"]["moe_replay_missing"] < 0.3
    for name, gradient in wanted["gradients"].items():
        difference = (result["gradients"][name] - gradient).abs().max()
        assert float(difference) <= RELATIVE * max(float(gradient.abs().max()), 1e-2), name
