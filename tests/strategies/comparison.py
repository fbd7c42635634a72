"""Reference of every strategy: the plain model in one process, and the tolerances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roll.checkpoint.contents import read_trainer_state
from roll.checkpoint.tensors import MOMENTS, MUON_MOMENTS, WEIGHT, stored_tensors
from roll.models.stored import StoredLayout
from tests.strategies.samples import (
    TensorBatch,
    make_batch,
    plain_adamw,
    plain_model,
    plain_outputs,
    policy_loss,
    value_loss,
)

# float32 sums of a few hundred terms, taken in another order: a few units in the last place (6e-8) of the largest.
RELATIVE = 2e-6

# Epsilon keeps AdamW's first steps smooth: with 1e-8 an element whose gradient is rounding noise moves as far as any
# other, in either direction.
STEPS = {"adam_epsilon": 1e-3, "lr_scheduler_type": "linear", "warmup_steps": 2}
"""Options of ``training_args`` for :func:`plain_steps`."""


def rounding_of(folder: Path, batch: TensorBatch) -> dict[str, float]:
    """By parameter: the largest difference between the plain model's gradients in float32 and in float64."""
    single, double = plain_model(folder), plain_model(folder).double()
    if double._can_set_experts_implementation():
        double.set_experts_implementation("eager")  # grouped products have no float64
    for model in (single, double):
        policy_loss(plain_outputs(model, batch), batch)[0].backward()
    exact = {name: parameter.grad for name, parameter in double.named_parameters()}
    return {name: float((p.grad - exact[name]).abs().max()) for name, p in single.named_parameters()}


def plain_results(folder: Path, batch: TensorBatch | None = None) -> dict[str, Any]:
    """The plain model on the whole of ``batch`` (``make_batch()``): outputs, gradients (those of experts also matrix by
    matrix, as they are stored), norm."""
    model, batch = plain_model(folder), batch or make_batch()
    outputs = plain_outputs(model, batch)
    loss, _ = policy_loss(outputs, batch)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "outputs": {name: values.detach() for name, values in outputs.items()},
        "gradients": gradients,
        "stored_gradients": StoredLayout(model).views(gradients),
        "norm": float(torch.nn.utils.get_total_norm(list(gradients.values()))),
    }


def plain_steps(folder: Path, max_grad_norm: float | None, frozen: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The weights after three steps of AdamW with the options :data:`STEPS` and the roles' weight decay."""
    model, batch = plain_model(folder), make_batch()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = plain_adamw(trained, eps=1e-3)
    for rate in (0.5e-2, 1e-2, 1e-2):
        optimizer.zero_grad()
        policy_loss(plain_outputs(model, batch), batch)[0].backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same_gradients(
    actual: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    relative: float = RELATIVE,
    rounding: dict[str, float] | None = None,
    floor: float = 0.0,
) -> None:
    """Each to ``relative`` of its largest element (at least ``floor``), and four times its ``rounding``."""
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        limit = relative * max(float(gradient.abs().max()), floor) + 1e-9 + 4 * (rounding or {}).get(name, 0.0)
        torch.testing.assert_close(
            actual[name], gradient, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_weights(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float = 2e-6) -> None:
    """After the steps of :func:`plain_steps`."""
    assert actual.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(
            actual[name], weight, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def plain_values(folder: Path, batch: TensorBatch) -> dict[str, Any]:
    """Values, gradients and their norm by the plain value model: a token's value is that of the tokens before it."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits[:, :-1, 0]
    values = torch.nn.functional.pad(scores, (1, 0)) * batch["response_mask"]
    value_loss({"values": values}, batch)[0].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
    return {"outputs": {"values": values.detach()}, "gradients": gradients, "norm": norm}


def by_replica(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each data-parallel replica, the result of the rank that is asked for it."""
    sources = [result for result in results if result["rank_info"].is_data_source]
    return sorted(sources, key=lambda result: result["rank_info"].dp_rank)


def assert_step_equals(
    results: list[dict[str, Any]],
    wanted: dict[str, Any],
    rounding: dict[str, float] | None = None,
    relative: float = RELATIVE,
    gradients: str = "gradients",
    floor: float = 0.0,
) -> None:
    """The first step of every rank, as ``jobs.train`` gives it, against :func:`plain_results`.

    Args:
        rounding: of models that amplify it (linear attention, attention sinks); see :func:`rounding_of`.
        relative, floor: of gradients; see :func:`assert_same_gradients`.
        gradients: under which name ``wanted`` has them.
    """
    assert results[0]["gradients"]
    replicas = by_replica(results)
    for result in results:
        if result["gradients"]:  # under Megatron rank 0 has them
            assert_same_gradients(result["gradients"], wanted[gradients], relative, rounding, floor)
        assert result["metrics"]["grad_norm"] == pytest.approx(wanted["norm"], rel=RELATIVE)
        assert result["metrics"]["lr"] == 1e-2
        assert result["replicas"] == result["rank_info"].dp_size == len(replicas)
        source = replicas[result["rank_info"].dp_rank]
        assert all(torch.equal(result["outputs"][name], values) for name, values in source["outputs"].items())
    for name, values in wanted["outputs"].items():
        actual = torch.cat([result["outputs"][name] for result in replicas])
        torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)
        assert torch.equal(actual == 0, values == 0)


def assert_resumed(whole: list[dict[str, Any]], resumed: list[dict[str, Any]], folder: Path) -> None:
    """``jobs.train_and_save`` and ``jobs.load_and_train`` ended alike to the last bit, checkpoints included."""
    for one, other in zip(whole, resumed, strict=True):
        assert one["metrics"] == other["metrics"] and one["step"] == other["step"]
        assert torch.equal(one["random"], other["random"])
        assert_same_bits(other["weights"], one["weights"])
    ends = contents_of(folder / "end")
    assert any(tensor.any() for name, tensor in ends.items() if name.startswith("exp_avg_sq/"))
    assert_same_bits(contents_of(folder / "resumed"), ends)


def assert_same_bits(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys(), actual.keys() ^ wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(actual[name], tensor)] == []


def contents_of(path: Path) -> dict[str, torch.Tensor]:
    """Every weight and moment of a role's checkpoint, whole, and the number of updates of each."""
    state = read_trainer_state(path)
    found = {}
    with stored_tensors(path) as stored:
        for name, shape in state["model"]["trained"].items():
            size = torch.Size(shape).numel()
            for kind in (WEIGHT, *MOMENTS, *MUON_MOMENTS):
                if stored.has(kind, name):
                    found[f"{kind}/{name}"] = stored.read(kind, name, 0, size).view(shape)
            found[f"updates/{name}"] = torch.tensor(stored.updates(name))
    return found
