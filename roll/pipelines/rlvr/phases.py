"""The phases of a training step between rollout and update: each adds columns to the batch and returns metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from roll.config.plan.plan import TrainingPlan
from roll.distributed import Cluster
from roll.pipelines.row_order import length_metrics, order_for
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics
from roll.workers.model import MODEL_COLUMNS


def add_reference_log_probs(
    batch: DataProto, reference: Cluster, temperature: float, without_adapters: bool = False
) -> None:
    """``ref_log_probs`` float32 (B, L).

    Args:
        without_adapters: ``reference`` is the LoRA actor, whose base is the reference policy.
    """
    batch.meta_info |= {"temperature": temperature, "outputs": (), "without_adapters": without_adapters}
    batch.batch["ref_log_probs"] = computed(batch, reference, reference.compute_log_probs)["log_probs"]


def add_old_log_probs(batch: DataProto, actor: Cluster, temperature: float, more: tuple[str, ...] = ()) -> None:
    """``old_log_probs`` float32 (B, L): the trainer's own, before any update.

    Args:
        more: ``entropy`` and ``sum_of_squares``, which become ``old_entropy`` and ``old_sum_of_squares``.
    """
    batch.meta_info |= {"temperature": temperature, "outputs": more, "without_adapters": False}
    outputs = computed(batch, actor, actor.compute_log_probs)
    batch.batch["old_log_probs"] = outputs["log_probs"]
    for name in more:
        batch.batch[f"old_{name}"] = outputs[name]


def add_values(batch: DataProto, critic: Cluster) -> None:
    """``values`` float32 (B, L)."""
    batch.batch["values"] = computed(batch, critic, critic.compute_values)["values"]


def computed(batch: DataProto, cluster: Cluster, call: Callable[[DataProto], DataProto]) -> Mapping[str, torch.Tensor]:
    """Columns (B, L) that the ranks compute, each on an equal share of the work; rows in the batch's own order."""
    if cluster.dp_size == 1:
        return call(batch).batch
    order = order_for(batch, cluster.role.use_prefix_sharing, cluster.dp_size)
    return call(batch.select(MODEL_COLUMNS, [])[order])[np.argsort(order)].batch


def update_model(
    batch: DataProto,
    cluster: Cluster,
    training: TrainingPlan,
    shuffle_seed: tuple[int, ...] | None = None,
    **meta_info: float,
) -> Metrics:
    """All optimizer steps of one model on one batch: ``epochs`` passes over its mini-batches.

    Args:
        shuffle_seed: mini-batches are drawn anew for every pass, from this seed; None: consecutive rows, each pass the
            same.
    """
    num_mini_batches = len(batch) // training.mini_batch_size
    by_prompt = cluster.role.use_prefix_sharing
    passes = [batch] if shuffle_seed is None else []
    for epoch in range(training.epochs if shuffle_seed is not None else 0):
        passes.append(batch[shuffled_rows(batch, (*(shuffle_seed or ()), epoch), by_prompt)])
    meta_info |= {
        "mini_batches": num_mini_batches,
        "epochs": training.epochs // len(passes),
        "num_groups": int(batch.batch["group_ids"].max()) + 1,
    }
    metrics: list[Metrics] = []
    for rows in passes:
        order = order_for(rows, by_prompt, training.dp_size, num_mini_batches)
        shares = rows[order] if training.dp_size > 1 else rows
        shares.meta_info |= meta_info
        metrics.append(cluster.update(shares))
    return merge_metrics(metrics) | length_metrics(rows, order, cluster.name, training.dp_size)


def shuffled_rows(batch: DataProto, seed: tuple[int, ...], by_prompt: bool) -> np.ndarray:
    """int64 (B,): the rows in an order drawn from ``seed``; with ``by_prompt`` those of a prompt stay together."""
    generator = np.random.default_rng(seed)
    if not by_prompt:
        return generator.permutation(len(batch))
    _, prompt = np.unique(batch.batch["group_ids"].numpy(), return_inverse=True)
    place: np.ndarray = generator.permutation(int(prompt.max()) + 1)
    return np.argsort(place[prompt], kind="stable")
