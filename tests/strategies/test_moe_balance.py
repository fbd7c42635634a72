"""The balance loss and the gauges of experts' load do not depend on how a batch is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies import jobs
from tests.strategies.comparison import assert_same_gradients
from tests.strategies.moe_models import EVERYWHERE, write_moe
from tests.strategies.samples import (
    DYNAMIC,
    PACKING,
    TensorBatch,
    make_batch,
    make_role,
    plain_model,
    plain_outputs,
    policy_loss,
    split_rows,
)

COEFFICIENT = 0.5


def balance_of(model: Any, batch: TensorBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """By the book, in float64, over all tokens that a row's last response token can see: the loss, and the gauges."""
    positions = torch.arange(batch["input_ids"].shape[1])
    last = torch.where(batch["response_mask"], positions, 0).amax(1, keepdim=True)
    real = (positions < last).flatten()
    captured: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, output: captured.append(output[0]))
        for layer in model.model.layers
    ]
    model.base_model(input_ids=batch["input_ids"])
    for hook in hooks:
        hook.remove()
    tables = [logits[real].double().softmax(-1) for logits in captured]
    top_k, num_experts = model.config.num_experts_per_tok, tables[0].shape[1]
    counts = torch.stack(
        [
            torch.zeros(num_experts, dtype=torch.float64).index_add(
                0, table.topk(top_k).indices.flatten(), torch.ones(table.shape[0] * top_k, dtype=torch.float64)
            )
            for table in tables
        ]
    )
    number = len(tables) * int(real.sum())
    probs, entropies = torch.cat(tables).sum(0) / number, torch.special.entr(torch.cat(tables).detach())
    load = counts / counts.mean(1, keepdim=True)
    gauges = {
        "moe_load_max_over_mean": float(load.max()),
        "moe_load_min_over_mean": float(load.min()),
        "moe_dead_experts": float((counts == 0).sum()),
        "moe_router_entropy": float(entropies.sum() / number),
        **{f"moe_share/expert_{e:02d}": float(counts.sum(0)[e] / counts.sum()) for e in range(num_experts)},
    }
    loss = num_experts * (counts.sum(0) / number @ probs)
    return loss, gauges | {"moe_aux_loss": float(loss.detach())}


@pytest.fixture(scope="module")
def folder(moe_folder):
    return moe_folder("qwen3_moe")


@pytest.fixture(scope="module")
def expected(folder):
    model, batch = plain_model(folder).double(), make_batch()
    model.set_experts_implementation("eager")  # grouped products have no float64
    loss, gauges = balance_of(model, batch)
    (policy_loss(plain_outputs(model, batch), batch)[0] + COEFFICIENT * loss).backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}, gauges


CUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one-micro-batch": (1, "fsdp2", {"micro_batch": 12}),
    "2-ranks-packed-checkpointed": (2, "fsdp2", {**PACKING, "model_args": {"disable_gradient_checkpointing": False}}),
    "2-ranks-dynamic-shared-prompts": (2, "fsdp2", {**DYNAMIC, "use_prefix_sharing": True}),
    "4-ranks-one-without-rows": (4, "fsdp2", {}),
    "2-ranks-ulysses": (2, "fsdp2", {"model_args": {"ulysses_size": 2}, "use_remove_padding": True}),
    "fsdp1": (2, "fsdp", {}),
    "zero3": (2, "zero3", {}),
}


@pytest.mark.long
@pytest.mark.default_rows("2-ranks-dynamic-shared-prompts")
@pytest.mark.parametrize("cut", CUTS)
def test_global_balance_loss_equals_float64_on_the_whole_batch(run, folder, expected, cut):
    ranks, strategy, options = CUTS[cut]
    options = {**options, "model_args": {"moe_aux_loss_coef": COEFFICIENT, **options.get("model_args", {})}}
    results = run(jobs.train, ranks, strategy, folder, **options)
    gradients, gauges = expected
    for result in results:
        assert_same_gradients(result["gradients"], gradients, 4e-6)  # float32 against float64
        assert {name: result["metrics"][name] for name in gauges} == pytest.approx(gauges, rel=1e-6)


@pytest.mark.long
def test_micro_batch_scope_is_the_mean_of_transformers_losses(run_ranks, folder):
    args = {"moe_aux_loss_coef": COEFFICIENT, "moe_aux_loss_scope": "micro_batch"}
    role = make_role(folder, micro_batch=4, model_args=args)
    model, batch = plain_model(folder), make_batch()
    total = policy_loss(plain_outputs(model, batch), batch)[0]
    parts = [
        part for rank in split_rows(batch, (8, 4)) for part in split_rows(rank, (4,) * (len(rank["input_ids"]) // 4))
    ]
    (total + COEFFICIENT * sum(balance_of(model, part)[0] for part in parts) / len(parts)).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for result in run_ranks(2, jobs.train, role, split_rows(batch, (8, 4))):
        assert_same_gradients(result["gradients"], wanted, 4e-6)


@pytest.mark.long
@pytest.mark.default_rows("mixtral")
@pytest.mark.parametrize("family", EVERYWHERE)
def test_transformers_computes_the_same_loss(run_ranks, tmp_path, family):
    """On rows without padding, where both take the same tokens."""
    path = write_moe(tmp_path / "model", family)
    batch, _ = split_rows(make_batch(groups=2, group_size=1), (1, 1))
    length = int(batch["attention_mask"].sum())
    batch = {name: column[:, :length] if column.shape[1:] else column for name, column in batch.items()}
    model = plain_model(path)
    wanted = model(input_ids=batch["input_ids"][:, :-1], output_router_logits=True).aux_loss
    (result,) = run_ranks(1, jobs.train, make_role(path), [batch])
    assert result["metrics"]["moe_aux_loss"] == pytest.approx(wanted.item(), rel=1e-6)
