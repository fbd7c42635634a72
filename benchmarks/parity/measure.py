"""Losses, gradient norms and log-probs of a layout, and how far they are from the plain model's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.layouts import ADAM_EPSILON, LEARNING_RATE, Layout
from roll.config.roles import WorkerConfig
from roll.protocol.metrics import Metrics, RankInfo, Sum, to_floats
from roll.strategies.base import Output, TensorBatch, create_strategy
from tests.strategies.samples import plain_model, plain_outputs, policy_loss, split_rows

STEPS = 5
POLICY = (Output.LOG_PROBS, Output.ENTROPY)
SHARES = {1: (12,), 2: (7, 5), 4: (5, 4, 3, 0)}
"""Rows of each data-parallel rank; with four of them one has none."""

RunRanks = Callable[..., list[Any]]
"""As :meth:`tests.strategies.ranks.RankPool.run`, without its folder."""


@dataclass(frozen=True)
class Numbers:
    """Of the whole batch, before one optimizer step."""

    loss: float
    grad_norm: float
    log_probs: torch.Tensor
    """float32 (B, L)."""


@dataclass(frozen=True)
class Errors:
    """Relative: of log-probs the largest difference, over the largest log-prob."""

    loss: float
    grad_norm: float
    log_probs: float

    @classmethod
    def between(cls, actual: Numbers, wanted: Numbers) -> Errors:
        difference = (actual.log_probs - wanted.log_probs).abs().max() / wanted.log_probs.abs().max()
        return cls(
            loss=abs(actual.loss / wanted.loss - 1.0),
            grad_norm=abs(actual.grad_norm / wanted.grad_norm - 1.0),
            log_probs=float(difference),
        )

    def exceeds(self, bound: Errors) -> bool:
        return self.loss > bound.loss or self.grad_norm > bound.grad_norm or self.log_probs > bound.log_probs


def plain_numbers(folder: Path, batch: TensorBatch, dtype: torch.dtype = torch.float32) -> list[Numbers]:
    """The first step and the one after ``STEPS`` of a plain model under ``torch.optim.AdamW``.

    In bf16 a copy of the model computes, and float32 weights learn.
    """
    masters = plain_model(folder)
    model = masters if dtype is torch.float32 else deepcopy(masters).to(dtype)
    weights = list(masters.parameters())
    matrices, vectors = [p for p in weights if p.ndim == 2], [p for p in weights if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=ADAM_EPSILON)
    history = []
    for _ in range(STEPS + 1):
        outputs = plain_outputs(model, batch)
        loss, _ = policy_loss(outputs, batch)
        model.zero_grad()
        loss.backward()
        for master, parameter in zip(weights, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None]))
        history.append(Numbers(loss.item(), norm, outputs["log_probs"].detach().float()))
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(weights, model.parameters(), strict=True):
                parameter.copy_(master)
    return [history[0], history[-1]]


@dataclass(frozen=True)
class RankNumbers:
    """One rank's part of the first step and the one after ``STEPS``."""

    rank_info: RankInfo
    steps: list[Numbers]


def learn(role: WorkerConfig, batch: TensorBatch) -> RankNumbers:
    """On each rank: its share of the batch, through the strategy's own forward pass and optimizer steps."""
    # DeepSpeed reports memory by print; standard output is the table's.
    with redirect_stdout(sys.stderr):
        return _learn(role, batch)


def _learn(role: WorkerConfig, batch: TensorBatch) -> RankNumbers:
    strategy = create_strategy(role)
    assert strategy.trains
    strategy.initialize(num_training_steps=STEPS + 1)
    info = strategy.rank_info
    own = split_rows(batch, SHARES[info.dp_size])[info.dp_rank]
    history = []
    for _ in range(STEPS + 1):
        log_probs = strategy.forward(own, (Output.LOG_PROBS,))["log_probs"]
        metrics = to_floats(strategy.train_step(own, _reported_loss, POLICY))
        # Ranks without rows, and all stages of a pipeline but the last, have no loss to report.
        history.append(Numbers(metrics.get("loss", 0.0), metrics["grad_norm"], log_probs))
    return RankNumbers(info, [history[0], history[-1]])


def _reported_loss(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    loss, metrics = policy_loss(outputs, batch)
    return loss, {**metrics, "loss": Sum(float(loss.detach()))}


def layout_numbers(run: RunRanks, layout: Layout, model: Path, batch: TensorBatch, dtype: str) -> list[Numbers]:
    """The first step and the one after ``STEPS``, put together from the ranks that answer for a replica."""
    results = run(layout.ranks, learn, layout.worker(model, dtype), batch)
    replicas = sorted((r for r in results if r.rank_info.is_data_source), key=lambda r: r.rank_info.dp_rank)
    assert len(replicas) == replicas[0].rank_info.dp_size, layout.title
    whole = []
    for index in range(2):
        steps = [result.steps[index] for result in replicas]
        norms = {result.steps[index].grad_norm for result in results}
        assert max(norms) - min(norms) <= 1e-6 * max(norms), f"{layout.title}: ranks disagree on the norm: {norms}"
        log_probs = torch.cat([step.log_probs for step in steps])
        whole.append(Numbers(sum(step.loss for step in steps), max(norms), log_probs))
    return whole
