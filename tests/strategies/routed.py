"""Batches with recorded routes, and what a plain model computes that is told where its tokens go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roll.models.experts import missing_mark, route_dtype
from tests.strategies.samples import TensorBatch, plain_model, plain_outputs, policy_loss

EXPERTS, TOP_K = 6, 2


def with_routes(batch: TensorBatch, group_size: int = 3, layers: int = 2, experts: int = EXPERTS) -> TensorBatch:
    """Random routes; the samples of a group have the same for their prompt. The last token of a row has none."""
    generator = torch.Generator().manual_seed(3)
    rows, length = batch["input_ids"].shape
    order = torch.rand(rows, length, layers, experts, generator=generator).argsort(-1)
    routes = order[..., :TOP_K].to(route_dtype(experts))
    first = batch["response_mask"].int().argmax(1)
    for row in range(rows):
        leader = row - row % group_size
        routes[row, : first[leader]] = routes[leader, : first[leader]]
        routes[row, int(batch["attention_mask"][row].sum()) - 1 :] = missing_mark(routes.dtype)
    return batch | {"routed_experts": routes}


def routed_results(
    folder: Path,
    batch: TensorBatch,
    load: Callable[[Path], Any] = plain_model,
    outputs_of: Callable[[Any, TensorBatch], TensorBatch] = plain_outputs,
) -> dict[str, Any]:
    """Log-probs and gradients, row by row, of a model whose routers are told what to choose."""
    model = load(folder)
    layers = getattr(model.model, "language_model", model.model).layers
    routes = batch["routed_experts"].long()
    log_probs = []
    for row in range(len(routes)):
        one = {name: column[row : row + 1] for name, column in batch.items()}
        hooks = [_told(layer.mlp.gate, routes[row, :, index]) for index, layer in enumerate(layers)]
        log_probs.append(outputs_of(model, one))
        for hook in hooks:
            hook.remove()
    outputs = {name: torch.cat([part[name] for part in log_probs]) for name in log_probs[0]}
    policy_loss(outputs, batch)[0].backward()
    return {
        "outputs": {name: values.detach() for name, values in outputs.items()},
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
    }


def _told(router: Any, routes: torch.Tensor) -> Any:
    def choose(module: Any, args: Any, output: Any) -> Any:
        logits, _, live = output
        chosen = torch.where(routes[: len(live)] < logits.shape[-1], routes[: len(live)], live)
        probs = logits.float().softmax(-1)
        weights = torch.stack([probs[token, experts] for token, experts in enumerate(chosen)])
        if getattr(module, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    return router.register_forward_hook(choose)
