"""Work of ranks with mixture-of-experts models."""

from __future__ import annotations

from typing import Any

import torch

from roll.config.roles import WorkerConfig
from roll.models.layouts import row_layout, with_token_rows
from roll.protocol.metrics import to_floats
from roll.strategies.base import Output
from roll.strategies.training import gather as gathering
from tests.strategies import jobs
from tests.strategies.samples import TensorBatch, policy_loss


def choices(role: WorkerConfig, batch: TensorBatch) -> torch.Tensor:
    """Number of this rank's own tokens that choose each expert, over all layers, in a forward pass."""
    strategy = jobs.started(role)
    layout = with_token_rows(row_layout(batch["input_ids"], batch["response_mask"]))
    with torch.no_grad():
        strategy.called(layout, ("log_probs",), 1.0)
    return strategy.model.routing_sums.counts.sum(0)


def record_and_replay(
    role: WorkerConfig, batch: TensorBatch
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float], dict[str, float]]:
    """The routes of a forward pass, the rows' response masks; metrics of a step with the routes, and without."""
    found = []
    for replays in (True, False):
        strategy = jobs.started(role, 10)
        routes = strategy.forward(batch, (Output.LOG_PROBS, Output.ROUTES))[Output.ROUTES]
        rows = batch | {"routed_experts": routes} if replays else batch
        found.append(to_floats(strategy.train_step(rows, policy_loss, jobs.POLICY)))
    return routes, batch["response_mask"], found[0], found[1]


def buckets(role: WorkerConfig, bucket_bytes: int) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Every bucket that this rank would send, and the most bytes of tensors that were gathered here at a time."""
    most = [0]
    gather = gathering.gather_to_rank0

    def measured(*args: Any) -> list[torch.Tensor]:
        whole = gather(*args)
        most[0] = max(most[0], sum(tensor.nbytes for tensor in whole))
        return whole

    gathering.gather_to_rank0 = measured  # type: ignore[assignment]
    strategy = jobs.started(role)
    found = [{name: t.clone() for name, t in bucket} for bucket in strategy.named_full_weights(bucket_bytes)]
    return found, most[0]
