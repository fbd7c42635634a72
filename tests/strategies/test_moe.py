"""Mixture-of-experts models compute under every data-parallel strategy what the plain model computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies import moe_cases as cases
from tests.strategies.comparison import assert_same_gradients, assert_step_equals, plain_results, rounding_of
from tests.strategies.moe_models import EVERYWHERE, FAMILIES, SEPARATE, divided, write_moe
from tests.strategies.samples import DYNAMIC, PACKING, VOCABULARY, make_batch, make_role, split_rows

RunRanks = Callable[..., list[Any]]
SPLIT = (7, 5)
ZERO3 = {"zero_stage": 3, "zero_optimization": {"stage3_param_persistence_threshold": 40}}
CHECKPOINTED = {"model_args": {"disable_gradient_checkpointing": False}}
UNITS = {"wrap_policy": {"moe_experts": ["Qwen3MoeMLP"]}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp": {"strategy": "fsdp_train"},
    "zero2": {"strategy": "deepspeed_train", "config": {"zero_stage": 2}},
    "zero3": {"strategy": "deepspeed_train", "config": ZERO3},
}


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("moe")

    def folder(family: str) -> Path:
        return root / family if (root / family).is_dir() else write_moe(root / family, family)

    return folder


def role(folder: Path, strategy: str, **options: Any) -> Any:
    own = STRATEGIES[strategy]
    if own.get("strategy", "").startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    config = {**own.get("config", {}), **options.pop("config", {})}
    return make_role(folder, own.get("strategy", "fsdp2_train"), config=config, **options)


def layouts() -> dict[str, tuple[str, str, dict[str, Any]]]:
    found = {f"{family}-{strategy}": (family, strategy, {}) for family in EVERYWHERE for strategy in STRATEGIES}
    others = [family for family in FAMILIES if family not in EVERYWHERE]
    found |= {f"{family}-fsdp2": (family, "fsdp2", {}) for family in others if family != SEPARATE}
    shapes: dict[str, dict[str, Any]] = {
        "packed": {**PACKING, **CHECKPOINTED},
        "no-padding": {"use_remove_padding": True},
        "dynamic": DYNAMIC,
        "shared-prompts": {"use_prefix_sharing": True},
        "micro-batch-1": {"micro_batch": 1},
    }
    found |= {f"{name}-{s}": ("qwen3_moe", s, shape) for name, shape in shapes.items() for s in STRATEGIES}
    wrapped: dict[str, Any] = {"config": UNITS}
    divided: dict[str, Any] = {"config": {"ep_size": 2}}
    found |= {f"{family}-ep2": (family, "fsdp2", divided) for family in FAMILIES if family != SEPARATE}
    found |= {f"{name}-ep2": ("qwen3_moe", "fsdp2", {**divided, **shape}) for name, shape in shapes.items()}
    found["loop-ep2"] = ("qwen3_moe", "fsdp2", {"config": {"ep_size": 2, "moe_use_grouped_mm": False, **UNITS}})
    found |= {f"experts-apart-{s}": ("qwen3_moe", s, wrapped) for s in ("fsdp2", "fsdp")}
    for name, grouped in (("loop", False), ("grouped", True)):
        found[f"{name}-fsdp2"] = ("qwen3_moe", "fsdp2", {"config": {"moe_use_grouped_mm": grouped}})
    patched: dict[str, Any] = {"config": {"apply_expert_patch": True}}
    apart = {"config": {"apply_expert_patch": True, "wrap_policy": {"moe_experts": ["SeparateMLP"]}}}
    for s in ("fsdp2", "fsdp"):
        found[f"separate-{s}"] = (SEPARATE, s, patched)
        found[f"separate-apart-{s}"] = (SEPARATE, s, {**apart, **CHECKPOINTED})
    for s in ("zero2", "zero3"):
        found[f"separate-{s}"] = (SEPARATE, s, {})
    return found


@pytest.mark.default_rows("qwen3_moe-fsdp2", "qwen3_moe-ep2", "separate-apart-fsdp2")
@pytest.mark.parametrize("case", layouts())
def test_gradient_and_outputs_equal_the_plain_model(
    run_ranks: RunRanks, moe_folder: Callable[[str], Path], case: str
) -> None:
    family, strategy, options = layouts()[case]
    folder = moe_folder(family)
    results = run_ranks(2, cases.train, role(folder, strategy, **options), split_rows(make_batch(), SPLIT))
    assert_step_equals(results, plain_results(folder), rounding_of(folder, make_batch()))


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_divided_and_sharded(run_ranks: RunRanks, moe_folder: Callable[[str], Path], family: str) -> None:
    """Three experts for each of two groups of two ranks, which gather them for a pass: one holds two, one holds one."""
    divided = role(moe_folder(family), "fsdp2", config={"ep_size": 2}, **CHECKPOINTED)
    results = run_ranks(4, cases.train, divided, split_rows(make_batch(), (4, 3, 3, 2)))
    assert_step_equals(results, plain_results(moe_folder(family)), rounding_of(moe_folder(family), make_batch()))


@pytest.mark.long
def test_divided_experts_of_ranks_that_share_sequences(run_ranks: RunRanks, moe_folder: Callable[[str], Path]) -> None:
    folder = moe_folder("qwen3_moe")
    shared = role(folder, "fsdp2", config={"ep_size": 2}, model_args={"ulysses_size": 2}, **PACKING)
    results, wanted = run_ranks(2, cases.train, shared, [make_batch()] * 2), plain_results(folder)
    rounding = rounding_of(folder, make_batch())
    for result in results:
        assert_same_gradients(result["gradients"], wanted["gradients"], rounding=rounding)
        torch.testing.assert_close(result["outputs"]["log_probs"], wanted["outputs"]["log_probs"], rtol=0, atol=1e-5)


@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_share_no_expert(run_ranks: RunRanks, moe_folder: Callable[[str], Path], strategy: str) -> None:
    folder, batch = divided(moe_folder("qwen3_moe")), make_batch()
    half = VOCABULARY // 2
    own = torch.arange(12)[:, None] < SPLIT[0]
    batch["input_ids"] = torch.where(own, batch["input_ids"] % half, batch["input_ids"] % half + half)
    apart = {"config": UNITS} if strategy.startswith("fsdp") else {}
    results = run_ranks(2, cases.train, role(folder, strategy, **apart), split_rows(batch, SPLIT))
    assert_step_equals(results, plain_results(folder, batch), rounding_of(folder, batch))
    shares = [[result["metrics"][f"moe_share/expert_{index:02d}"] for index in range(6)] for result in results]
    assert shares[0] == shares[1] and sum(shares[0]) == pytest.approx(1.0)
    chosen = run_ranks(2, cases.choices, role(folder, "fsdp2"), split_rows(batch, SPLIT))
    assert [bool(counts[:3].any()) for counts in chosen] == [True, False]
    assert [bool(counts[3:].any()) for counts in chosen] == [False, True]


@pytest.mark.long
@pytest.mark.parametrize("learns", [True, False], ids=["learns", "forward"])
def test_the_self_test_of_zero3_names_what_is_wrong(
    run_ranks: RunRanks, moe_folder: Callable[[str], Path], learns: bool
) -> None:
    """Neither gathered as one leaf nor all called, experts that are modules are mixed up, or the ranks wait for each
    other; with either, the start succeeds."""
    one = role(moe_folder(SEPARATE), "zero3")
    for methods in (("_prepare_experts", "_use_units"), ("_prepare_experts",), ("_use_units",)):
        messages = run_ranks(2, cases.self_test_of_zero3, one, methods, learns)
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
def test_separate_experts_need_the_patch(
    run_ranks: RunRanks, moe_folder: Callable[[str], Path], strategy: str, units: list[str] | None
) -> None:
    """Refused by name; and if it were not, the self-test at the start would find it."""
    one = role(moe_folder(SEPARATE), strategy, config={"wrap_policy": {"moe_experts": units}})
    for message in run_ranks(2, cases.refused, one):
        assert "apply_expert_patch: false, but the experts of SeparateForCausalLM are modules" in message
        assert "set it to true" in message
    messages = run_ranks(2, cases.self_test_alone, one)
    assert all("something else when ranks choose different experts" in message for message in messages), messages
