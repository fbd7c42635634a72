"""Adapters for the tests of strategies, the plain peft model that they must equal, and what ranks do with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.protocol.metrics import to_floats
from tests.strategies import jobs
from tests.strategies.comparison import by_replica
from tests.strategies.jobs import POLICY, weights_of
from tests.strategies.samples import TensorBatch, plain_adamw, plain_model, plain_outputs, policy_loss

RANK, ALPHA = 4, 8
TARGET = ["q_proj", "v_proj", "down_proj"]


def write_adapter(
    model: Path,
    folder: Path,
    whole: list[str] | None = None,
    target: list[str] | str | None = TARGET,
    tensors: list[str] | None = None,
    std: float = 0.1,
) -> Path:
    """An adapter in which A and B are random, so that both have a gradient, written by peft.

    Args:
        tensors: of fused experts, adapted too.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=target,
        target_parameters=tensors,
        modules_to_save=whole,
        lora_dropout=0.0,
    )
    adapted = get_peft_model(plain_model(model), config)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=std)
            assert "lora_" in name or whole
    adapted.save_pretrained(folder)
    return folder


def plain_peft_model(model: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(plain_model(model), adapter, is_trainable=True)


def plain_training(model: Path, adapter: Path, batch: TensorBatch, steps: int) -> dict[str, Any]:
    """By the book, in one process: what :func:`train` gives, and the merged weights at the end."""
    adapted = plain_peft_model(model, adapter)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    optimizer = plain_adamw(trained.values(), lr=1e-2, eps=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = plain_outputs(adapted, batch)
        policy_loss(outputs, batch)[0].backward()
        gradients = {name.removeprefix("base_model.model."): p.grad.clone() for name, p in trained.items()}
        optimizer.step()
    with torch.no_grad(), adapted.disable_adapter():
        base = plain_outputs(adapted, batch)
    merged = adapted.merge_and_unload()
    return {
        "outputs": {name: values.detach() for name, values in outputs.items()},
        "base": base,
        "gradients": gradients,
        "weights": {name: p.detach() for name, p in merged.named_parameters()},
    }


def train(role: WorkerConfig, batch: TensorBatch, steps: int) -> dict[str, Any]:
    """``steps`` optimizer steps, with a pass of the base before each and after the last; then the norm of another."""
    strategy = jobs.trainer(role)
    for _ in range(steps):
        with strategy.without_adapters():
            base = strategy.forward(batch, POLICY)
        before = strategy.forward(batch, POLICY)
        strategy.train_step(batch, policy_loss, POLICY)
    with strategy.without_adapters():
        again = strategy.forward(batch, POLICY)
    assert all(torch.equal(base[name], again[name]) for name in base), "the base does not change"
    model = getattr(strategy, "model", None)
    return {
        "outputs": before,
        "base": base,
        "gradients": under_live_names(strategy),
        "weights": weights_of(strategy),
        "rank_info": strategy.rank_info,
        "dtypes": {name: p.dtype for name, p in model.language_model.named_parameters()} if model else None,
        "moments": sum(state["exp_avg"].numel() for state in _adam_states(strategy) if "exp_avg" in state),
        "next_norm": to_floats(strategy.train_step(batch, policy_loss, POLICY))["grad_norm"],
    }


def under_live_names(strategy: Any) -> dict[str, torch.Tensor]:
    """The last gradients as the modules of transformers and peft name and shape them."""
    if not hasattr(strategy, "masters"):
        return strategy.gradients
    shapes = {name: parameter.shape for name, parameter in strategy._skeleton.named_parameters()}
    named = {strategy._live_names.get(name, name): gradient for name, gradient in strategy.gradients.items()}
    return {name: gradient.view(shapes[name]) for name, gradient in named.items()}


def _adam_states(strategy: Any) -> Iterator[dict[str, Any]]:
    optimizer = strategy.engine.basic_optimizer if hasattr(strategy, "engine") else strategy.optimizer
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from getattr(one, "optimizer", one).state.values()


def assert_same_training(
    results: list[dict[str, Any]], wanted: dict[str, Any], atol: float = 2e-6, relative: float = 2e-6
) -> None:
    """Outputs, base, the last step's gradients and the merged weights of :func:`plain_training`.

    Args:
        results: of each rank; its outputs are those of its rows.
        atol: float32 sums of a few hundred terms in another order, through some optimizer steps.
        relative: the same of gradients, as a part of the largest element.
    """
    for kind in ("outputs", "base"):
        for name, values in wanted[kind].items():
            actual = torch.cat([result[kind][name] for result in by_replica(results)])
            torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)
    assert any((wanted["outputs"]["log_probs"] - wanted["base"]["log_probs"]).abs().flatten() > 0.1)
    assert results[0]["gradients"]
    norms = {result["next_norm"] for result in results}
    assert max(norms) == pytest.approx(min(norms), rel=1e-6), "every rank clips by the same norm"
    for result in results:
        if not result["gradients"]:  # under Megatron rank 0 has them
            continue
        assert result["gradients"].keys() == wanted["gradients"].keys(), "nothing else is trained"
        for name, gradient in wanted["gradients"].items():
            limit = relative * float(gradient.abs().max()) + 1e-7
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=0, atol=limit)
    assert results[0]["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=0, atol=atol)


def train_and_save(role: WorkerConfig, batch: TensorBatch, folder: Path) -> dict[str, torch.Tensor]:
    """Two steps, a checkpoint, two steps, an export; the exported weights."""
    strategy = jobs.started(role, 10)
    for step in range(4):
        if step == 2:
            strategy.save(folder / "checkpoint")
        strategy.train_step(batch, policy_loss, POLICY)
    strategy.save_hf(folder / "export")
    strategy.saved()  # it may be written in the background, and another job reads it next
    return weights_of(strategy)


def load_and_train(role: WorkerConfig, batch: TensorBatch, folder: Path) -> dict[str, torch.Tensor]:
    """The last two steps of :func:`train_and_save`."""
    strategy = jobs.started(role, 10)
    strategy.load(folder / "checkpoint")
    for _ in range(2):
        strategy.train_step(batch, policy_loss, POLICY)
    return weights_of(strategy)


def assert_export_is_complete(model: Path, folder: Path, weights: dict[str, torch.Tensor], batch: TensorBatch) -> None:
    """A merged model, and an adapter that peft puts on the base: equal logits."""
    from peft import PeftModel

    merged = plain_model(folder)
    for name, tensor in merged.named_parameters():
        assert torch.equal(tensor, weights[name])
    adapted = PeftModel.from_pretrained(plain_model(model), folder / "adapter")
    with torch.no_grad():
        wanted, actual = plain_outputs(merged, batch), plain_outputs(adapted, batch)
    torch.testing.assert_close(actual["log_probs"], wanted["log_probs"], rtol=0, atol=1e-5)


def initial_weights(role: WorkerConfig, value: bool = False) -> dict[str, torch.Tensor]:
    """The trained parameters of a role before any step, by name; under Megatron on rank 0."""
    strategy = jobs.started(role, 10, value)
    if hasattr(strategy, "masters"):
        return jobs.whole_parameters(strategy, lambda own: strategy.masters.get(own.parameter, "weight"))
    named = strategy.model.language_model.named_parameters()
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in named
        if p.requires_grad
    }
