"""Mixture-of-experts models compute under every data-parallel strategy what the plain model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies import jobs
from tests.strategies import moe_cases as cases
from tests.strategies.comparison import assert_step_equals, plain_results, rounding_of
from tests.strategies.moe_models import EVERYWHERE, FAMILIES, NUM_EXPERTS, SEPARATE, divided
from tests.strategies.samples import DYNAMIC, PACKING, VOCABULARY, make_batch

SPLIT = (7, 5)
CHECKPOINTED = {"model_args": {"disable_gradient_checkpointing": False}}
UNITS = {"wrap_policy": {"moe_experts": ["Qwen3MoeMLP"]}}
STRATEGIES = ("fsdp2", "fsdp", "zero2", "zero3")


def layouts() -> dict[str, tuple[str, str, dict[str, Any]]]:
    found = {f"{family}-{strategy}": (family, strategy, {}) for family in EVERYWHERE for strategy in STRATEGIES}
    others = [family for family in FAMILIES if family not in EVERYWHERE]
    found |= {f"{family}-fsdp2": (family, "fsdp2", {}) for family in others if family != SEPARATE}
    shapes: dict[str, dict[str, Any]] = {
        "packed": {**PACKING, **CHECKPOINTED},
        "dynamic": DYNAMIC,
        "shared-prompts": {"use_prefix_sharing": True},
    }
    found |= {f"{name}-{s}": ("qwen3_moe", s, shape) for name, shape in shapes.items() for s in STRATEGIES}
    divided: dict[str, Any] = {"config": {"ep_size": 2}}
    found |= {f"{family}-ep2": (family, "fsdp2", divided) for family in FAMILIES if family != SEPARATE}
    found |= {f"{name}-ep2": ("qwen3_moe", "fsdp2", {**divided, **shape}) for name, shape in shapes.items()}
    found["ulysses-ep2"] = ("qwen3_moe", "fsdp2", {**divided, "model_args": {"ulysses_size": 2}, **PACKING})
    found["loop-ep2"] = ("qwen3_moe", "fsdp2", {"config": {"ep_size": 2, "moe_use_grouped_mm": False, **UNITS}})
    found |= {f"experts-apart-{s}": ("qwen3_moe", s, {"config": UNITS}) for s in ("fsdp2", "fsdp")}
    found["loop-fsdp2"] = ("qwen3_moe", "fsdp2", {"config": {"moe_use_grouped_mm": False}})
    return found


@pytest.mark.long
@pytest.mark.default_rows("qwen3_moe-ep2")
@pytest.mark.parametrize("case", layouts())
def test_gradient_and_outputs_equal_the_plain_model(run, moe_folder, case):
    family, strategy, options = layouts()[case]
    folder = moe_folder(family)
    results = run(jobs.train, 2, strategy, folder, **options)
    assert_step_equals(results, plain_results(folder), rounding_of(folder, make_batch()))


@pytest.mark.long
@pytest.mark.default_rows("gpt_oss")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_divided_and_sharded(run, moe_folder, name):
    """Three experts for each of two groups of two ranks, which gather them for a pass: one holds two, one holds one."""
    folder = moe_folder(name)
    results = run(jobs.train, 4, "fsdp2", folder, config={"ep_size": 2}, split=(4, 3, 3, 2), **CHECKPOINTED)
    assert_step_equals(results, plain_results(folder), rounding_of(folder, make_batch()))


@pytest.mark.long
@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize(
    ("name", "strategy"), [*(("qwen3_moe", s) for s in STRATEGIES), (SEPARATE, "zero0")], ids=[*STRATEGIES, "zero0"]
)
def test_ranks_that_share_no_expert(run, moe_folder, name, strategy):
    folder, batch = divided(moe_folder(name)), make_batch()
    half = VOCABULARY // 2
    own = torch.arange(12)[:, None] < SPLIT[0]
    batch["input_ids"] = torch.where(own, batch["input_ids"] % half, batch["input_ids"] % half + half)
    apart: dict[str, Any] = {"config": UNITS} if strategy.startswith("fsdp") else {}
    results = run(jobs.train, 2, strategy, folder, batch=batch, **apart)
    assert_step_equals(results, plain_results(folder, batch), rounding_of(folder, batch))
    shares = [
        [result["metrics"][f"moe_share/expert_{index:02d}"] for index in range(NUM_EXPERTS)] for result in results
    ]
    assert shares[0] == shares[1] and sum(shares[0]) == pytest.approx(1.0)
    whole, half = "zero0" if name == SEPARATE else "fsdp2", NUM_EXPERTS // 2
    chosen = run(cases.choices, 2, whole, folder, batch=batch)
    assert [bool(counts[:half].any()) for counts in chosen] == [True, False]
    assert [bool(counts[half:].any()) for counts in chosen] == [False, True]


@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_that_are_modules_are_refused_where_state_is_divided(run, moe_folder, strategy):
    for message in run(jobs.refused, 2, strategy, moe_folder(SEPARATE), 10, batch=None):
        assert "experts of SeparateForCausalLM are modules (model.layers.0.mlp)" in message
        assert "zero_stage: 0" in message
