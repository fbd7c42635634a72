"""Mixture-of-experts models compute under every data-parallel strategy what the plain model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies import jobs
from tests.strategies import moe_cases as cases
from tests.strategies.comparison import assert_step_equals, plain_results, rounding_of
from tests.strategies.moe_models import EVERYWHERE, FAMILIES, SEPARATE, divided
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
    patched: dict[str, Any] = {"config": {"apply_expert_patch": True}}
    apart = {"config": {"apply_expert_patch": True, "wrap_policy": {"moe_experts": ["SeparateMLP"]}}}
    for s in ("fsdp2", "fsdp"):
        found[f"separate-{s}"] = (SEPARATE, s, patched)
        found[f"separate-apart-{s}"] = (SEPARATE, s, {**apart, **CHECKPOINTED})
    for s in ("zero2", "zero3"):
        found[f"separate-{s}"] = (SEPARATE, s, {})
    return found


@pytest.mark.default_rows("qwen3_moe-ep2", "separate-apart-fsdp2")
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


@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_share_no_expert(run, moe_folder, strategy):
    folder, batch = divided(moe_folder("qwen3_moe")), make_batch()
    half = VOCABULARY // 2
    own = torch.arange(12)[:, None] < SPLIT[0]
    batch["input_ids"] = torch.where(own, batch["input_ids"] % half, batch["input_ids"] % half + half)
    apart = {"config": UNITS} if strategy.startswith("fsdp") else {}
    results = run(jobs.train, 2, strategy, folder, batch=batch, **apart)
    assert_step_equals(results, plain_results(folder, batch), rounding_of(folder, batch))
    shares = [[result["metrics"][f"moe_share/expert_{index:02d}"] for index in range(6)] for result in results]
    assert shares[0] == shares[1] and sum(shares[0]) == pytest.approx(1.0)
    chosen = run(cases.choices, 2, "fsdp2", folder, batch=batch)
    assert [bool(counts[:3].any()) for counts in chosen] == [True, False]
    assert [bool(counts[3:].any()) for counts in chosen] == [False, True]


@pytest.mark.long
@pytest.mark.default_rows("learns")
@pytest.mark.parametrize("learns", [True, False], ids=["learns", "forward"])
def test_the_self_test_of_zero3_names_what_is_wrong(run, moe_folder, learns):
    """Neither gathered as one leaf nor all called, experts that are modules are mixed up, or the ranks wait for each
    other; with either, the start succeeds."""
    for methods in (("_prepare_experts", "_use_units"), ("_prepare_experts",), ("_use_units",)):
        messages = run(cases.self_test_of_zero3, 2, "zero3", moe_folder(SEPARATE), methods, learns, batch=None)
        wrong = ["something else when ranks choose different experts" in message for message in messages]
        assert wrong == [len(methods) == 2] * 2, (methods, messages)
        if len(methods) == 2:
            assert all(
                "leave actor_train.strategy_args.strategy_config.zero_optimization.leaf_module" in m for m in messages
            )


@pytest.mark.default_rows("fsdp2-apart")
@pytest.mark.parametrize(
    ("strategy", "units"),
    [
        pytest.param("fsdp2", ["SeparateMLP"], id="fsdp2-apart"),
        pytest.param("fsdp2", None, id="fsdp2-in-layers"),
        pytest.param("fsdp", ["SeparateMLP"], id="fsdp-apart"),
    ],
)
def test_separate_experts_need_the_patch(run, moe_folder, strategy, units):
    """Refused by name; and if it were not, the self-test at the start would find it."""
    folder, options = moe_folder(SEPARATE), {"config": {"wrap_policy": {"moe_experts": units}}, "batch": None}
    for message in run(jobs.refused, 2, strategy, folder, 10, **options):
        assert "apply_expert_patch: false, but the experts of SeparateForCausalLM are modules" in message
        assert "set it to true" in message
    messages = run(cases.self_test_alone, 2, strategy, folder, **options)
    assert all("something else when ranks choose different experts" in message for message in messages), messages
