"""Muon on shards is PyTorch's Muon on whole matrices, with AdamW beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.checkpoint.contents import CheckpointMismatchError
from roll.config.roles import OptimizerConfig, WorkerConfig
from roll.strategies.fsdp.fsdp1 import clean_name
from tests.strategies import jobs
from tests.strategies.comparison import assert_same_bits, contents_of
from tests.strategies.jobs import POLICY, _whole, started, trainer
from tests.strategies.samples import TensorBatch, policy_loss

ADAPTERS = {"lora_target": ["q_proj", "v_proj", "down_proj"], "lora_rank": 4, "lora_alpha": 8}
LAYOUTS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "fsdp2-1-rank": (1, "fsdp2", "tied", {}),
    "fsdp2": (2, "fsdp2", "untied", {}),
    "fsdp2-offload": (2, "fsdp2", "tied", {"config": {"offload_policy": True}}),
    "fsdp2-hsdp": (4, "fsdp2", "tied", {"config": {"fsdp_size": 2}}),
    "fsdp2-experts": (2, "fsdp2", "qwen3_moe", {}),
    "fsdp2-experts-ep2": (2, "fsdp2", "qwen3_moe", {"config": {"ep_size": 2}}),
    "fsdp2-adapters": (2, "fsdp2", "untied", {"model_args": ADAPTERS}),
    "fsdp-1-rank": (1, "fsdp", "tied", {}),
    "fsdp": (2, "fsdp", "untied", {}),
    "fsdp-hsdp": (4, "fsdp", "tied", {"config": {"fsdp_size": 2}}),
    "fsdp-experts": (2, "fsdp", "qwen3_moe", {}),
}
SETTINGS = {"default": OptimizerConfig("muon"), "original": OptimizerConfig("muon", scaling="original")}


def steps(role: WorkerConfig, batch: TensorBatch, max_grad_norm: float | None) -> dict[str, Any]:
    """Three optimizer steps: weights before and after, gradients and norm of each."""
    strategy = trainer(role, max_grad_norm=max_grad_norm)
    before, taken = trained_weights(strategy), []
    for _ in range(3):
        metrics = strategy.train_step(batch, policy_loss, POLICY)
        taken.append((strategy.gradients, jobs.to_floats(metrics)["grad_norm"]))
    return {"before": before, "after": trained_weights(strategy), "steps": taken}


def trained_weights(strategy: Any) -> dict[str, torch.Tensor]:
    """Whole trained parameters, experts as the model holds them and adapters unmerged."""
    strategy._reshard()
    named = strategy.model.language_model.named_parameters()
    trained = {clean_name(name): parameter for name, parameter in named if parameter.requires_grad}
    return {name: _whole(strategy, parameter, parameter.detach()) for name, parameter in trained.items()}


def is_hidden_matrix(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim >= 2 and "embed_tokens" not in name and "lm_head" not in name


def plain(result: dict[str, Any], options: OptimizerConfig, max_grad_norm: float | None) -> dict[str, torch.Tensor]:
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
        factor = max_grad_norm / (norm + 1e-6) if max_grad_norm is not None and norm > max_grad_norm else 1.0
        for name, weight in weights.items():
            gradient = gradients[name] * factor
            parts = gradient.unbind() if gradient.ndim == 3 else [gradient]
            for matrix, part in zip(matrices.get(name, [weight]), parts, strict=True):
                matrix.grad = part.clone()
        muon.step()
        if adamw is not None:
            adamw.step()
    return weights


@pytest.mark.default_rows("fsdp2-0.05-original", "fsdp2-experts-None-default", "fsdp-0.05-default")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_equal_pytorch_on_whole_matrices(run, layout, max_grad_norm, settings):
    world, strategy, model, role = LAYOUTS[layout]
    if "model_args" in role:
        pytest.importorskip("peft")
    training = {"optimizer": SETTINGS[settings], "adam_epsilon": 1e-3}
    result = run(steps, world, strategy, model, max_grad_norm, training=training, **role)[0]
    wanted = plain(result, SETTINGS[settings], max_grad_norm)
    assert result["after"].keys() == wanted.keys()
    moved = 0
    for name, weight in wanted.items():
        difference = float((result["after"][name] - weight).abs().max())
        assert difference <= 1e-6, (name, difference)
        moved += not torch.equal(weight, result["before"][name])
    assert moved == len(wanted) and all(math.isfinite(norm) for _, norm in result["steps"])


@pytest.mark.default_rows("fsdp2-experts-ep2")
@pytest.mark.parametrize(
    "layout", ["fsdp2", "fsdp2-hsdp", "fsdp2-experts-ep2", "fsdp2-adapters", "fsdp", "fsdp-experts"]
)
def test_resumed_equals_uninterrupted_bit_for_bit(run, tmp_path, layout):
    world, strategy, model, role = LAYOUTS[layout]
    training = {"optimizer": SETTINGS["default"]}
    whole = run(jobs.train_and_save, world, strategy, model, tmp_path, training=training, **role)
    resumed = run(jobs.load_and_train, world, strategy, model, tmp_path, training=training, **role)
    for one, other in zip(whole, resumed, strict=True):
        assert one["metrics"] == other["metrics"]
        assert_same_bits(other["weights"], one["weights"])


def load_and_save(role: WorkerConfig, path: Path, out: Path) -> None:
    strategy = started(role, 10)
    strategy.load(path)
    strategy.save(out)
    assert strategy.saved()


@pytest.mark.default_rows("fsdp2-experts-fsdp-experts")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [("fsdp2-experts", "fsdp-experts"), ("fsdp-experts", "fsdp2-experts-ep2"), ("fsdp-hsdp", "fsdp2-1-rank")],
)
def test_moments_go_from_one_strategy_to_another(run, tmp_path, writer, reader):
    training = {"optimizer": SETTINGS["default"]}
    world, strategy, model, role = LAYOUTS[writer]
    run(jobs.train_and_save, world, strategy, model, tmp_path / "written", training=training, **role)
    world, strategy, model, role = LAYOUTS[reader]
    paths = tmp_path / "written", tmp_path / "read"
    run(load_and_save, world, strategy, model, *paths, training=training, batch=None, **role)
    written = contents_of(paths[0])
    assert any(name.startswith("momentum_buffer/") and tensor.any() for name, tensor in written.items())
    assert_same_bits(contents_of(paths[1]), written)


def refusal(role: WorkerConfig, path: Path) -> str:
    with pytest.raises(CheckpointMismatchError) as refused:
        started(role, 10).load(path)
    return str(refused.value)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_moments_of_another_optimizer_are_refused(run, tmp_path, strategy):
    muon = {"optimizer": SETTINGS["default"]}
    run(jobs.train_and_save, 1, "fsdp2", "tied", tmp_path, training=muon)
    (said,) = run(refusal, 1, strategy, "tied", tmp_path, batch=None)
    assert "its moments are those of muon (training_args.optimizer: adamw here)" in said
