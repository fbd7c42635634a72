"""LoRA of experts under Megatron computes what a plain peft model computes in one process, wherever its experts are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from roll.models.stored import StoredLayout
from tests.strategies import lora_cases
from tests.strategies.megatron.layouts import by_replica
from tests.strategies.samples import make_batch, make_role, plain_model

cases = pytest.importorskip("tests.strategies.megatron.cases", reason="needs megatron-core")

RunCase = Callable[..., list[Any]]
STEPS = 2
# Epsilon keeps AdamW's first steps smooth where a gradient is rounding noise.
SMOOTH = {"adam_epsilon": 1e-3}
RELATIVE = 1e-5  # as in test_lora: four layers, after a step
RECOMPUTE = {"disable_gradient_checkpointing": False}
PACKED = {"use_sequence_packing": True}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHARED = [f"shared_expert.{name}_proj" for name in ("gate", "up", "down")]
TENSORS = ["experts.gate_up_proj", "experts.down_proj"]
TARGETS: dict[str, tuple[str, list[str] | None, list[str] | None]] = {
    "qwen2_moe": ("qwen2_moe", [*ATTENTION, *SHARED], TENSORS),
    "qwen3_moe": ("qwen3_moe", ATTENTION, TENSORS),
    "mixtral": ("mixtral", ["o_proj"], TENSORS),
    "olmoe": ("olmoe", None, TENSORS),
    "shared": ("qwen2_moe", SHARED, None),
}
"""By name: a family, and modules and tensors of it that have an adapter."""


@pytest.fixture(scope="module")
def adapter(family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``adapter(name)``: the folder of a random adapter."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            model, modules, tensors = TARGETS[name]
            folders[name] = lora_cases.write_adapter(
                family(model), tmp_path_factory.mktemp(name), target=modules, tensors=tensors
            )
        return folders[name]

    return folder


@pytest.fixture(scope="module")
def wanted(family: Callable[[str], Path], adapter: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """``wanted(name)``: what plain training of that adapter gives, weights as they are stored."""
    results: dict[str, dict[str, Any]] = {}

    def plain(name: str) -> dict[str, Any]:
        if name not in results:
            model = family(TARGETS[name][0])
            trained = lora_cases.plain_training(model, adapter(name), make_batch(), STEPS)
            results[name] = trained | {"weights": StoredLayout(plain_model(model)).views(trained["weights"])}
        return results[name]

    return plain


@pytest.fixture(scope="module")
def run_lora(run_case: RunCase, adapter: Callable[[str], Path]) -> RunCase:
    """``run_lora(case, world, sizes, name, args=())``: :func:`run_case` with the adapter ``name``."""

    def run(case: Any, world: int, sizes: dict[str, Any], name: str, **options: Any) -> list[Any]:
        model_args = {"adapter_name_or_path": str(adapter(name))} | options.pop("model_args", {})
        return run_case(case, world, sizes, TARGETS[name][0], model_args=model_args, training=SMOOTH, **options)

    return run


@pytest.mark.default_rows("1-rank", "ep2", "tp2-etp2")
@pytest.mark.parametrize(
    ("world", "sizes", "name", "options"),
    [
        pytest.param(1, {}, "qwen2_moe", {}, id="1-rank"),
        pytest.param(1, {"dispatcher": "allgather"}, "mixtral", {"model_args": RECOMPUTE}, id="allgather-recomputed"),
        pytest.param(2, {}, "olmoe", {}, id="dp2-experts-alone"),
        pytest.param(2, {"ep": 2}, "qwen3_moe", {}, id="ep2"),
        pytest.param(2, {"ep": 2, "dispatcher": "allgather"}, "qwen2_moe", PACKED, id="ep2-allgather-packed"),
        pytest.param(
            2, {"ep": 2, "dist_opt": True}, "mixtral", {"model_args": RECOMPUTE}, id="ep2-dist-opt-recomputed"
        ),
        pytest.param(2, {"tp": 2, "sp": True}, "qwen2_moe", {}, id="tp2-etp2"),
        pytest.param(2, {"tp": 2, "sp": True, "dispatcher": "allgather"}, "qwen3_moe", {}, id="tp2-etp2-allgather"),
        pytest.param(2, {"tp": 2, "sp": True}, "shared", {"model_args": RECOMPUTE}, id="tp2-shared-expert-alone"),
        pytest.param(2, {"tp": 2, "sp": True, "etp": 1}, "qwen2_moe", {}, id="tp2-etp1"),
        pytest.param(2, {"tp": 2, "sp": True, "etp": 1, "ep": 2}, "mixtral", {}, id="tp2-ep2-etp1"),
        pytest.param(2, {"etp": 2}, "qwen3_moe", {}, id="etp2-of-replicas"),
        pytest.param(2, {"pp": 2}, "qwen2_moe", {}, id="pp2"),
        pytest.param(2, {"pp": 2, "vpp": 2}, "qwen3_moe", {}, id="vpp2"),
        pytest.param(2, {"cp": 2, "ep": 2}, "qwen3_moe", {}, id="cp2-ep2"),
        pytest.param(4, {"ep": 2, "pp": 2, "dist_opt": True}, "qwen2_moe", {}, id="ep2-pp2-dist-opt"),
        pytest.param(4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, "qwen2_moe", {}, id="tp2-ep2-etp2"),
        pytest.param(4, {"ep": 2}, "qwen3_moe", {}, id="ep2-of-4-one-without-rows"),
    ],
)
def test_training_equals_plain_peft(
    run_lora: RunCase,
    wanted: Callable[[str], dict[str, Any]],
    world: int,
    sizes: dict[str, Any],
    name: str,
    options: dict[str, Any],
) -> None:
    results = run_lora(cases.train_lora, world, sizes, name, args=(STEPS,), **options)
    plain = wanted(name)
    whole = {key: results[0][key] for key in ("gradients", "weights")}
    lora_cases.assert_same_training([one | whole for one in by_replica(results)], plain, relative=RELATIVE)
    norms = {result["next_norm"] for result in results}
    assert max(norms) == pytest.approx(min(norms), rel=1e-6), "every rank clips by the same norm"
    if world == 1:
        elements = sum(gradient.numel() for gradient in plain["gradients"].values())
        assert results[0]["moments"] == elements, "the frozen base has no optimizer state"


@pytest.mark.default_rows("ep2-bf16")
@pytest.mark.parametrize(
    ("world", "sizes", "dtype", "others"),
    [
        pytest.param(2, {"ep": 2, "dist_opt": True}, "bf16", [], id="ep2-bf16"),
        pytest.param(
            4,
            {"tp": 2, "sp": True, "ep": 2, "etp": 2},
            "fp32",
            [(1, {}), (2, {"ep": 2, "dist_opt": True}), (2, {"pp": 2}), (2, {"tp": 2, "sp": True, "etp": 1})],
            id="tp2-ep2-etp2-fp32",
        ),
    ],
)
def test_resumed_is_uninterrupted_and_the_export_is_complete(
    run_lora: RunCase,
    family: Callable[[str], Path],
    tmp_path: Path,
    world: int,
    sizes: dict[str, Any],
    dtype: str,
    others: list[tuple[int, dict[str, Any]]],
) -> None:
    name = "qwen2_moe"
    whole = run_lora(cases.train_and_save_lora, world, sizes, name, args=(tmp_path,), dtype=dtype)[0]
    resumed = run_lora(cases.load_and_train_lora, world, sizes, name, args=(tmp_path,), dtype=dtype)[0]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[one], resumed[one]) for one in whole)
    if dtype == "fp32":
        live = StoredLayout(plain_model(family(name))).joined(whole)
        lora_cases.assert_export_is_complete(family(name), tmp_path / "export", live, make_batch())
    for other_world, other_sizes in others:
        other = run_lora(cases.load_and_train_lora, other_world, other_sizes, name, args=(tmp_path,), dtype=dtype)[0]
        for one, weight in whole.items():
            # Two steps, whose sums are taken in another order.
            torch.testing.assert_close(other[one], weight, rtol=0, atol=2e-6)


def test_new_adapters_are_those_of_fsdp2(
    run_case: RunCase, run_ranks: Callable[..., list[Any]], family: Callable[[str], Path]
) -> None:
    model_args = {"lora_target": "all-linear,experts", "lora_rank": 2}
    role = make_role(family("qwen2_moe"), model_args=model_args)
    drawn = run_ranks(1, lora_cases.initial_weights, role)[0]
    assert any(".experts." in name for name in drawn) and any("shared_expert" in name for name in drawn)
    for world, sizes in ((1, {}), (2, {"ep": 2}), (2, {"tp": 2, "sp": True})):
        actual = run_case(cases.initial_lora, world, sizes, "qwen2_moe", model_args=model_args)[0]
        assert actual.keys() == drawn.keys()
        assert all(torch.equal(actual[name].flatten(), drawn[name].flatten()) for name in drawn)


def test_parts_of_experts_that_do_not_divide_are_refused(run_case: RunCase) -> None:
    message = run_case(cases.refused, 3, {"etp": 3}, "qwen2_moe", model_args={"lora_target": "experts"})[0]
    assert "strategy_config.expert_tensor_parallel_size: 3 does not divide" in message
