"""The phases of a training step between rollout and update: each adds columns to the batch and returns metrics."""

from __future__ import annotations

import numpy as np

from roll.config.plan import TrainingPlan
from roll.distributed import Cluster
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics


def add_reference_log_probs(batch: DataProto, reference: Cluster, temperature: float) -> None:
    """``ref_log_probs`` float32 (B, L)."""
    batch.meta_info |= {"temperature": temperature, "entropy": False}
    batch.batch["ref_log_probs"] = reference.compute_log_probs(batch).batch["log_probs"]


def add_old_log_probs(batch: DataProto, actor: Cluster, temperature: float, with_entropy: bool = False) -> None:
    """``old_log_probs`` float32 (B, L): the trainer's own, before any update; and ``old_entropy`` if asked for."""
    batch.meta_info |= {"temperature": temperature, "entropy": with_entropy}
    computed = actor.compute_log_probs(batch).batch
    batch.batch["old_log_probs"] = computed["log_probs"]
    if with_entropy:
        batch.batch["old_entropy"] = computed["entropy"]


def add_values(batch: DataProto, critic: Cluster) -> None:
    """``values`` float32 (B, L)."""
    batch.batch["values"] = critic.compute_values(batch).batch["values"]


def interleave_for_mini_batches(num_rows: int, num_mini_batches: int, dp_size: int) -> np.ndarray:
    """The order of rows in which consecutive equal shares give every rank its part of every mini-batch.

    Mini-batch m consists of rows [m * n, (m + 1) * n) of the batch, whatever the number of ranks; rank r holds part r
    of each.  Returns int64 (num_rows,).
    """
    rows = np.arange(num_rows).reshape(num_mini_batches, dp_size, -1)
    return rows.transpose(1, 0, 2).reshape(-1)


def update_model(batch: DataProto, cluster: Cluster, training: TrainingPlan, **meta_info: float) -> Metrics:
    """All optimizer steps of one model on one batch: ``epochs`` passes over its mini-batches."""
    num_mini_batches = len(batch) // training.mini_batch_size
    shares = batch
    if num_mini_batches > 1:
        order = interleave_for_mini_batches(len(batch), num_mini_batches, training.dp_size)
        shares = batch[order]
    shares.meta_info |= {"mini_batches": num_mini_batches, "epochs": training.epochs, **meta_info}
    metrics: Metrics = cluster.update(shares)
    return metrics
