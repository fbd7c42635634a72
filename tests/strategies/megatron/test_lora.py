"""LoRA under Megatron computes what a plain peft model computes in one process, however model and rows are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from roll.models.lora import DOWN_PART, UP_PART, merged_weight
from tests.strategies import lora_cases
from tests.strategies.megatron.layouts import by_replica
from tests.strategies.samples import make_batch, make_role, plain_model

cases = pytest.importorskip("tests.strategies.megatron.cases", reason="needs megatron-core")

RunCase = Callable[..., list[Any]]
STEPS = 3
# Epsilon keeps AdamW's first steps smooth where a gradient is rounding noise.
SMOOTH = {"adam_epsilon": 1e-3}
# Four layers, after two steps: there the plain model in float32 is 4e-6 from itself in float64, and so is any other.
AFTER_STEPS = 1e-5
RECOMPUTE = {"disable_gradient_checkpointing": False}
PACKED = {"use_sequence_packing": True}

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: dict[str, tuple[str, list[str] | str]] = {
    "qwen2": ("qwen2", EVERY),
    "qwen3": ("qwen3", EVERY),
    "llama": ("llama", EVERY),
    "part": ("llama", ["k_proj", "o_proj", "up_proj"]),
    "last": ("qwen3", r".*\.3\.self_attn\.(v|o)_proj"),
    "whole": ("qwen3", ["q_proj", "down_proj"]),
}
"""By name: a family and the targets of an adapter for it."""
WHOLE = ["embed_tokens", "lm_head", "norm", "input_layernorm", "q_norm"]
"""Parameters trained in full in addition to ``whole``."""


@pytest.fixture(scope="module")
def adapter(family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``adapter(name)``: the folder of a random adapter."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            model, target = TARGETS[name]
            more = WHOLE if name == "whole" else None
            folder = tmp_path_factory.mktemp(name)
            folders[name] = lora_cases.write_adapter(family(model), folder, more, target=target)
        return folders[name]

    return folder


@pytest.fixture(scope="module")
def wanted(family: Callable[[str], Path], adapter: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """``wanted(name)``: what plain training of that adapter gives."""
    results: dict[str, dict[str, Any]] = {}

    def plain(name: str) -> dict[str, Any]:
        if name not in results:
            model = family(TARGETS[name][0])
            results[name] = lora_cases.plain_training(model, adapter(name), make_batch(), STEPS)
        return results[name]

    return plain


@pytest.fixture(scope="module")
def run_lora(run_case: RunCase, adapter: Callable[[str], Path]) -> RunCase:
    """``run_lora(case, world, sizes, name, args=())``: :func:`run_case` with the adapter ``name``."""

    def run(case: Any, world: int, sizes: dict[str, Any], name: str = "qwen2", **options: Any) -> list[Any]:
        model_args = {"adapter_name_or_path": str(adapter(name))} | options.pop("model_args", {})
        return run_case(case, world, sizes, TARGETS[name][0], model_args=model_args, training=SMOOTH, **options)

    return run


@pytest.mark.parametrize(
    ("world", "sizes", "name", "options"),
    [
        pytest.param(1, {}, "qwen2", {}, id="1-rank"),
        pytest.param(2, {}, "qwen3", {}, id="dp2"),
        pytest.param(2, {"dist_opt": True, "overlap_grad_reduce": True}, "llama", {}, id="distributed-optimizer"),
        pytest.param(2, {"tp": 2}, "qwen2", {}, id="tp2"),
        pytest.param(2, {"tp": 2}, "part", {}, id="tp2-some-of-a-fused-matrix"),
        pytest.param(2, {"tp": 2, "sp": True}, "qwen3", {}, id="tp2-sp"),
        pytest.param(2, {"tp": 2, "sp": True}, "part", {"model_args": RECOMPUTE}, id="tp2-sp-recomputed"),
        pytest.param(1, {}, "whole", {}, id="1-rank-more-in-full"),
        pytest.param(2, {"tp": 2, "sp": True}, "whole", {"model_args": RECOMPUTE}, id="tp2-sp-more-in-full"),
        pytest.param(2, {"pp": 2, "vpp": 2}, "whole", {}, id="vpp2-more-in-full"),
        pytest.param(4, {"tp": 2, "dist_opt": True}, "whole", {}, id="tp2-dp2-more-in-full"),
        pytest.param(2, {"pp": 2}, "qwen2", {"model_args": RECOMPUTE}, id="pp2-tied-recomputed"),
        pytest.param(2, {"pp": 2}, "last", {}, id="pp2-first-stage-frozen"),
        pytest.param(2, {"pp": 2, "vpp": 2}, "llama", {}, id="vpp2"),
        pytest.param(2, {"pp": 2, "vpp": 2}, "last", {}, id="vpp2-three-chunks-frozen"),
        pytest.param(2, {"cp": 2}, "qwen2", {}, id="cp2"),
        pytest.param(4, {"tp": 2, "cp": 2, "sp": True}, "qwen3", PACKED, id="tp2-cp2-sp-packed"),
        pytest.param(4, {"tp": 2, "pp": 2, "sp": True}, "qwen2", {}, id="tp2-pp2-sp"),
        pytest.param(4, {"tp": 2, "dist_opt": True}, "qwen3", {}, id="tp2-dp2-distributed-optimizer"),
        pytest.param(4, {"pp": 2, "dist_opt": True}, "last", {}, id="pp2-dp2-first-stage-frozen"),
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
    # Whole gradients and weights are on rank 0, outputs on the last stage.
    whole = {key: results[0][key] for key in ("gradients", "weights")}
    lora_cases.assert_same_training([one | whole for one in by_replica(results)], plain, relative=AFTER_STEPS)
    norms = {result["next_norm"] for result in results}
    assert max(norms) == pytest.approx(min(norms), rel=1e-6), "every rank clips by the same norm"
    if world == 1:
        elements = sum(gradient.numel() for gradient in plain["gradients"].values())
        assert results[0]["moments"] == elements, "the frozen base has no optimizer state"


@pytest.mark.parametrize(
    ("world", "sizes", "dtype", "others", "name"),
    [
        (2, {"tp": 2, "sp": True}, "fp32", [(1, {}), (2, {"pp": 2, "vpp": 2})], "qwen2"),
        (4, {"tp": 2, "pp": 2, "dist_opt": True}, "bf16", [], "qwen2"),
        (1, {}, "fp32", [], "whole"),
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
    name: str,
) -> None:
    from safetensors import safe_open

    whole = run_lora(cases.train_and_save_lora, world, sizes, name, args=(tmp_path,), dtype=dtype)[0]
    resumed = run_lora(cases.load_and_train_lora, world, sizes, name, args=(tmp_path,), dtype=dtype)[0]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[one], resumed[one]) for one in whole)
    if dtype == "fp32":
        lora_cases.assert_export_is_complete(family(TARGETS[name][0]), tmp_path / "export", whole, make_batch())
    for file in (tmp_path / "checkpoint" / "model_and_optimizer").iterdir():
        with safe_open(file, framework="pt") as tensors:
            held = list(tensors.keys())
        assert held and all(".lora_" in one or ".modules_to_save." in one for one in held), "the base is not written"
        assert any(".modules_to_save." in one for one in held) == (name == "whole")
    for other_world, other_sizes in others:
        other = run_lora(cases.load_and_train_lora, other_world, other_sizes, name, args=(tmp_path,), dtype=dtype)[0]
        for one, weight in whole.items():
            # Two steps, whose sums are taken in another order.
            torch.testing.assert_close(other[one], weight, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_new_adapters_are_those_of_fsdp2(
    run_case: RunCase, run_ranks: Callable[..., list[Any]], family: Callable[[str], Path], dtype: str
) -> None:
    """Also rounded in the same way; and not another on another layout."""
    model_args = {"lora_target": "all-linear", "lora_rank": 2}
    role = make_role(family("qwen3"), dtype=dtype, model_args=model_args)
    wanted = run_ranks(1, lora_cases.initial_weights, role)[0]
    assert all(tensor.any() == ("lora_A" in name) for name, tensor in wanted.items())
    for world, sizes in ((1, {}), (2, {"tp": 2, "sp": True}), (2, {"pp": 2})):
        actual = run_case(cases.initial_lora, world, sizes, "qwen3", dtype=dtype, model_args=model_args)[0]
        assert actual.keys() == wanted.keys()
        assert all(torch.equal(actual[name], wanted[name]) for name in wanted)


def test_a_critic_trains_its_head_in_full(run_case: RunCase, value_family: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file

    folder, model_args = value_family("qwen3"), {"lora_target": "q_proj,v_proj"}
    trained = run_case(cases.initial_lora, 2, {"tp": 2}, folder, args=(True,), model_args=model_args)[0]
    assert {name for name in trained if "lora_" not in name} == {"score.weight", "score.bias"}
    assert torch.equal(trained["score.weight"], load_file(folder / "model.safetensors")["score.weight"])


def test_what_is_trained_in_full_begins_as_the_base(run_case: RunCase, family: Callable[[str], Path]) -> None:
    model_args = {"lora_target": "q_proj", "additional_target": "lm_head,embed_tokens,model.norm"}
    trained = run_case(cases.initial_lora, 1, {}, "qwen3", model_args=model_args)[0]
    plain = dict(plain_model(family("qwen3")).named_parameters())
    whole = {name: tensor for name, tensor in trained.items() if "lora_" not in name}
    assert whole.keys() == {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    assert all(torch.equal(tensor, plain[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(("world", "sizes"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2})])
def test_weights_are_sent_merged_or_apart(
    run_lora: RunCase,
    family: Callable[[str], Path],
    adapter: Callable[[str], Path],
    world: int,
    sizes: dict[str, Any],
) -> None:
    merged, apart, trained = run_lora(cases.merged_lora, world, sizes, "part", dtype="bf16")[0]
    plain = dict(plain_model(family("llama")).named_parameters())
    adapted = dict(lora_cases.plain_peft_model(family("llama"), adapter("part")).named_parameters())
    assert merged.keys() == plain.keys()
    assert trained.keys() == {name for name in apart if name.endswith((DOWN_PART, UP_PART))}
    for name, weight in plain.items():
        base = weight.bfloat16()
        assert torch.equal(apart[name], base)
        path = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = (adapted.get(f"{path}.lora_{part}.default.weight") for part in "AB")
        assert (down is None) == (f"{name}{DOWN_PART}" not in trained)
        if down is None or up is None:
            assert torch.equal(merged[name], base)
            continue
        assert torch.equal(trained[f"{name}{DOWN_PART}"], down.bfloat16())
        assert torch.equal(trained[f"{name}{UP_PART}"], up.bfloat16())
        scaling = lora_cases.ALPHA / lora_cases.RANK
        assert torch.equal(merged[name], merged_weight(base, down.bfloat16(), up.bfloat16(), scaling))


@pytest.mark.parametrize(
    ("model_args", "message"),
    [
        ({"lora_target": "qkv_proj"}, "no module of the model matches 'qkv_proj'; its linear layers are"),
        ({"lora_target": "q_proj", "additional_target": "o_proj"}, "model_args.additional_target: model.layers.0.self"),
    ],
)
def test_refused(run_case: RunCase, model_args: dict[str, Any], message: str) -> None:
    assert message in run_case(cases.refused, 1, {}, "qwen3", strategy="megatron_infer", model_args=model_args)[0]
