"""Dropout of adapters under Megatron: plain peft with the same masks, however the model is sharded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("peft")

from tests.strategies import lora_cases
from tests.strategies.samples import TensorBatch, make_batch, plain_outputs, policy_loss

pytestmark = pytest.mark.long

pytest.importorskip("megatron.core", reason="needs megatron-core")

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROBABILITY, SEED, WIDTH = 0.3, 42, 15
WHOLE_BATCH = {"micro_batch": 12, "infer_batch_size": 12}
RECOMPUTE = {"disable_gradient_checkpointing": False}


class _SameMask(torch.nn.Module):
    """Dropout by the next mask of the random state, drawn as tokens are laid out there: (s, b, in), without the last
    token of the longest row, which is the input of nothing."""

    dropped: int = 0
    elements: int = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        kept = torch.empty(hidden[:, :-1].transpose(0, 1).shape, dtype=torch.bool).bernoulli_(1 - PROBABILITY)
        _SameMask.dropped += int((~kept).sum())
        _SameMask.elements += kept.numel()
        scales = torch.ones_like(hidden)
        scales[:, :-1] = kept.transpose(0, 1) / (1 - PROBABILITY)
        return hidden * scales


def even_batch() -> TensorBatch:
    """A batch of whose longest row sequence-parallel ranks divide the inputs without padding."""
    batch = {name: column[:, :WIDTH] if column.ndim > 1 else column for name, column in make_batch().items()}
    assert int(batch["attention_mask"].sum(1).max()) == WIDTH
    return batch


@pytest.fixture(scope="module")
def adapter(family, tmp_path_factory):
    return lora_cases.write_adapter(family("llama"), tmp_path_factory.mktemp("adapter"), target=EVERY)


@pytest.fixture(scope="module")
def wanted(family, adapter):
    """Gradients of the first step of plain training with those masks."""
    model, batch = lora_cases.plain_peft_model(family("llama"), adapter), even_batch()
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = _SameMask()
    torch.manual_seed(int(np.random.SeedSequence((SEED, 0, 0, 0, 0)).generate_state(1)[0]))
    policy_loss(plain_outputs(model, batch), batch)[0].backward()
    named = model.named_parameters()
    return {name.removeprefix("base_model.model."): p.grad for name, p in named if p.grad is not None}


@pytest.fixture(scope="module")
def run_dropout(run, adapter):
    """``run_dropout(world, sizes, **model_args)``: the first step on one batch, of the rank that has the result."""

    def run_with(world: int, sizes: dict[str, Any], **more: Any) -> Any:
        args = {"adapter_name_or_path": str(adapter), "lora_dropout": PROBABILITY} | more
        batch = even_batch()
        options = {"batch": batch, "model_args": args, **WHOLE_BATCH}
        return run(lora_cases.train, world, "megatron", "llama", 1, config=sizes, **options)

    return run_with


@pytest.mark.default_rows("tp2-sp")
@pytest.mark.parametrize(
    ("world", "sizes", "more"),
    [
        pytest.param(1, {}, {}, id="1-rank"),
        pytest.param(1, {}, RECOMPUTE, id="recomputed"),
        pytest.param(2, {"tp": 2, "sp": True}, {}, id="tp2-sp"),
    ],
)
def test_a_step_equals_plain_peft_with_the_same_masks(run_dropout, wanted, world, sizes, more):
    results = run_dropout(world, sizes, **more)
    gradients = results[0]["gradients"]
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        limit = 1e-5 * float(gradient.abs().max()) + 1e-7
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=limit)
    assert _SameMask.dropped / _SameMask.elements == pytest.approx(PROBABILITY, abs=3e-3)


@pytest.mark.matrix
def test_nothing_is_dropped_outside_of_updates_and_recomputation_repeats_the_masks(run_dropout):
    (dropped,) = run_dropout(1, {})
    (recomputed,) = run_dropout(1, {}, **RECOMPUTE)
    (whole,) = run_dropout(1, {}, lora_dropout=0.0)
    for kind in ("outputs", "base"):
        assert all(torch.equal(dropped[kind][name], values) for name, values in whole[kind].items())
    for name, gradient in dropped["gradients"].items():
        assert torch.equal(recomputed["gradients"][name], gradient), "what is computed again has the same masks"
        assert not torch.allclose(whole["gradients"][name], gradient)
