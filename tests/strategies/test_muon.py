"""Muon on shards is PyTorch's Muon on whole matrices, with AdamW beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.checkpoint.contents import CheckpointMismatchError
from roll.checkpoint.tensors import WEIGHT
from roll.config.roles import OptimizerConfig, WorkerConfig
from roll.strategies.fsdp.fsdp1 import clean_name
from roll.strategies.training.muon import Float64Products, bfloat16_products
from tests.strategies import jobs
from tests.strategies.comparison import assert_same_bits, contents_of
from tests.strategies.families import zero
from tests.strategies.jobs import POLICY, _whole, started, trainer, whole_parameters
from tests.strategies.samples import TensorBatch, policy_loss

ADAPTERS = {"lora_target": ["q_proj", "v_proj", "down_proj"], "lora_rank": 4, "lora_alpha": 8}
THREE = zero(3)["zero_optimization"]
LAYOUTS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "fsdp2-1-rank": (1, "fsdp2", "tied", {}),
    "fsdp2": (2, "fsdp2", "untied", {}),
    "fsdp2-hsdp": (4, "fsdp2", "tied", {"config": {"fsdp_size": 2}}),
    "fsdp2-experts": (2, "fsdp2", "qwen3_moe", {}),
    "fsdp2-experts-ep2": (2, "fsdp2", "qwen3_moe", {"config": {"ep_size": 2}}),
    "fsdp2-adapters": (2, "fsdp2", "untied", {"model_args": ADAPTERS}),
    "fsdp": (2, "fsdp", "untied", {}),
    "fsdp-hsdp": (4, "fsdp", "tied", {"config": {"fsdp_size": 2}}),
    "fsdp-experts": (2, "fsdp", "qwen3_moe", {}),
    "zero0": (2, "zero0", "tied", {}),
    "zero1": (2, "zero1", "untied", {}),
    "zero2": (2, "zero2", "untied", {}),
    "zero2-offload": (2, "zero2", "tied", {"config": {"offload": "cpu"}}),
    "zero3": (2, "zero3", "untied", {}),
    "zero3-groups": (2, "zero3", "tied", {"config": {"zero_optimization": THREE | {"sub_group_size": 5000}}}),
    "zero3-offload": (2, "zero3", "tied", {"config": {"offload": "cpu", "offload_param": True}}),
    "zero3-adapters": (2, "zero3", "untied", {"model_args": ADAPTERS}),
    "dp2": (2, "megatron", "qwen2", {"config": {"dist_opt": True}}),
    "tp2-dp2": (4, "megatron", "qwen2", {"config": {"tp": 2, "dist_opt": True}}),
    "pp2-vpp2-dp2": (4, "megatron", "qwen2", {"config": {"pp": 2, "vpp": 2}}),
    "tp2-sp-experts": (2, "megatron", "qwen3_moe", {"config": {"tp": 2, "sp": True}}),
    "ep2-dp2-experts": (4, "megatron", "qwen2_moe", {"config": {"ep": 2, "dist_opt": True}}),
    "tp2-adapters": (2, "megatron", "untied", {"config": {"tp": 2}, "model_args": ADAPTERS}),
}
SETTINGS = {"default": OptimizerConfig("muon"), "original": OptimizerConfig("muon", scaling="original")}


def steps(role: WorkerConfig, batch: TensorBatch, max_grad_norm: float | None) -> dict[str, Any]:
    """Three optimizer steps: weights before and after, gradients and norm of each."""
    strategy = trainer(role, max_grad_norm=max_grad_norm)
    before, taken = trained_weights(strategy), []
    for _ in range(3):
        metrics = strategy.train_step(batch, policy_loss, POLICY)
        taken.append((as_held(strategy, strategy.gradients), jobs.to_floats(metrics)["grad_norm"]))
    return {"before": before, "after": trained_weights(strategy), "steps": taken}


def as_held(strategy: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under Megatron tensors have the names and shapes of the model's files; here those of the live model."""
    return strategy._stored.joined(tensors) if hasattr(strategy, "masters") else tensors


def trained_weights(strategy: Any) -> dict[str, torch.Tensor]:
    """Whole trained parameters, experts as the model holds them and adapters unmerged; under Megatron on rank 0."""
    if hasattr(strategy, "masters"):
        return as_held(strategy, whole_parameters(strategy, lambda own: strategy.masters.get(own.parameter, WEIGHT)))
    if hasattr(strategy, "engine"):
        from deepspeed.utils import safe_get_full_fp32_param

        own = [(name, one) for name, one in strategy.model.language_model.named_parameters() if one.requires_grad]
        whole = safe_get_full_fp32_param if strategy.plan.stage else torch.Tensor.detach
        return {name: whole(parameter).clone() for name, parameter in own}
    strategy._reshard()
    named = strategy.model.language_model.named_parameters()
    trained = {clean_name(name): parameter for name, parameter in named if parameter.requires_grad}
    return {name: _whole(strategy, parameter, parameter.detach()) for name, parameter in trained.items()}


def is_hidden_matrix(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim >= 2 and "embed_tokens" not in name and "lm_head" not in name


def clip_factor(strategy: str, norm: float, max_grad_norm: float | None) -> float:
    """DeepSpeed computes it in float32: a gradient that is off by its last bit may round to another bfloat16."""
    if max_grad_norm is None or norm <= max_grad_norm:
        return 1.0
    if strategy == "zero0":
        return float(max_grad_norm / (torch.tensor(norm) + 1e-6))
    if strategy.startswith("zero"):
        return float(1.0 / ((torch.tensor(norm) + 1e-6) / max_grad_norm))
    return max_grad_norm / (norm + 1e-6)


def plain(
    result: dict[str, Any], options: OptimizerConfig, max_grad_norm: float | None, strategy: str
) -> dict[str, torch.Tensor]:
    """PyTorch's Muon and AdamW on whole weights, with the gradients of the run; each expert has a matrix of its own."""
    weights = {name: weight.clone() for name, weight in result["before"].items()}
    hidden = {name: weight for name, weight in weights.items() if is_hidden_matrix(name, weight)}
    matrices = {name: list(w.unbind()) if w.ndim == 3 else [w] for name, w in hidden.items()}
    others = [weight for name, weight in weights.items() if name not in hidden]
    scaling = {"match_adamw_rms": "match_rms_adamw"}.get(options.scaling, options.scaling)
    muon = torch.optim.Muon(
        [matrix for stack in matrices.values() for matrix in stack],
        lr=1e-2,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        ns_steps=5,
        adjust_lr_fn=scaling,
    )
    groups = [
        {"params": [one for one in others if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in others if one.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, foreach=False) if others else None
    for gradients, norm in result["steps"]:
        factor = clip_factor(strategy, norm, max_grad_norm)
        for name, weight in weights.items():
            gradient = gradients[name] * factor
            parts = gradient.unbind() if gradient.ndim == 3 else [gradient]
            for matrix, part in zip(matrices.get(name, [weight]), parts, strict=True):
                matrix.grad = part.clone()
        with bfloat16_products(torch.device("cpu")):
            muon.step()
        if adamw is not None:
            adamw.step()
    return weights


@pytest.mark.long_rows("fsdp2-0.05-original", "fsdp-None-default", "zero2-0.05-default")
@pytest.mark.default_rows("fsdp2-0.05-original", "fsdp-None-default", "zero2-0.05-default", "dp2-0.05-default")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_equal_pytorch_on_whole_matrices(run, layout, max_grad_norm, settings):
    world, strategy, model, role = LAYOUTS[layout]
    if "model_args" in role:
        pytest.importorskip("peft")
    training = {"optimizer": SETTINGS[settings], "adam_epsilon": 1e-3}
    result = run(steps, world, strategy, model, max_grad_norm, training=training, **role)[0]
    wanted = plain(result, SETTINGS[settings], max_grad_norm, strategy)
    assert result["after"].keys() == wanted.keys()
    moved = 0
    for name, weight in wanted.items():
        difference = float((result["after"][name] - weight).abs().max())
        assert difference <= 1e-6, (name, difference)
        moved += not torch.equal(weight, result["before"][name])
    assert moved == len(wanted) and all(math.isfinite(norm) for _, norm in result["steps"])


def load_and_save(role: WorkerConfig, path: Path, out: Path) -> None:
    strategy = started(role, 10)
    strategy.load(path)
    strategy.save(out)
    assert strategy.saved()


CHAINS = {
    "dense": ("fsdp2", "zero2", "tp2-dp2", "fsdp2"),
    "stages": ("pp2-vpp2-dp2", "fsdp-hsdp", "zero3-groups", "zero1", "fsdp2-1-rank"),
    "experts": ("fsdp2-experts", "fsdp-experts", "zero2", "ep2-dp2-experts", "tp2-sp-experts", "fsdp2-experts-ep2"),
    "adapters": ("fsdp2-adapters", "tp2-adapters", "zero3-adapters"),
}


@pytest.mark.long
@pytest.mark.default_rows("dense")
@pytest.mark.parametrize("chain", CHAINS)
def test_moments_go_from_one_strategy_to_another(run, tmp_path, chain):
    """Each layout reads what the one before wrote: the same to the last bit."""
    training = {"optimizer": SETTINGS["default"]}
    first, *others = CHAINS[chain]
    world, strategy, model, role = LAYOUTS[first]
    run(jobs.train_and_save, world, strategy, model, tmp_path / "0", training=training, **role)
    written = contents_of(tmp_path / "0")
    assert any(name.startswith("momentum_buffer/") and tensor.any() for name, tensor in written.items())
    for number, layout in enumerate(others):
        world, strategy, _, role = LAYOUTS[layout]
        paths = tmp_path / f"{number}", tmp_path / f"{number + 1}"
        run(load_and_save, world, strategy, model, *paths, training=training, batch=None, **role)
        assert_same_bits(contents_of(paths[1]), written)


def refusal(role: WorkerConfig, path: Path) -> str:
    with pytest.raises(CheckpointMismatchError) as refused:
        started(role, 10).load(path)
    return str(refused.value)


@pytest.mark.default_rows("zero2")
@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_moments_of_another_optimizer_are_refused(run, tmp_path, strategy):
    muon = {"optimizer": SETTINGS["default"]}
    run(jobs.train_and_save, 1, "fsdp2", "tied", tmp_path, training=muon)
    (said,) = run(refusal, 1, strategy, "tied", tmp_path, batch=None)
    assert "its moments are those of muon (training_args.optimizer: adamw here)" in said


def test_products_in_float64_are_those_of_bfloat16_to_its_rounding():
    torch.manual_seed(0)
    a, b, c = (torch.randn(shape).bfloat16() for shape in ((48, 80), (80, 32), (48, 32)))
    with Float64Products():
        product, sum_ = a @ b, torch.addmm(c, a, b, beta=0.5, alpha=2)
    assert product.dtype is sum_.dtype is torch.bfloat16
    torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(sum_.double(), c.double() / 2 + 2 * (a.double() @ b.double()), rtol=2**-8, atol=1e-5)
