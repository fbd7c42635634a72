"""Calls of the models of a run: columns computed before the update, and the optimizer steps.

A batch goes to the ranks of a role in equal shares of rows, and as equal as possible in work.

Ranks that share gradients wait for the slowest.  Which rank computes a row changes no sum, so the rows of every
mini-batch are dealt out by their :func:`~roll.models.partitions.workload`, always where there are several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from roll.distributed import Cluster, WorkerDied
from roll.methods.base import POLICY_COLUMNS, Answer, Ask, RoleAsk
from roll.methods.losses import SampledLoss
from roll.models.partitions import balance_partitions, workload
from roll.pipelines.run_context import WEIGHTS, Residency
from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean, Metrics, Min, merge_metrics
from roll.strategies.base import Output
from roll.workers.model import ModelWorker
from roll.workers.training import TrainWorker

R = TypeVar("R")
RowOrder = NDArray[np.int64]


def balanced_order(
    lengths: Sequence[int] | NDArray[np.int64],
    dp_size: int,
    num_mini_batches: int = 1,
    groups: Sequence[object] | None = None,
) -> RowOrder:
    """The order of rows in which consecutive equal shares give every rank its part of every mini-batch.

    Mini-batch m consists of rows [m * n, (m + 1) * n) of the batch, whatever the number of ranks; rank r holds part r
    of each.

    Args:
        lengths: (N,) tokens of each row; ``num_mini_batches`` divides N.
        groups: (N,) what a row shares its prompt with. Adjacent rows of a group then stay adjacent, on one rank, where
            groups are of one size that divides a rank's part; elsewhere rows keep their order.

    Returns:
        int64 (N,). Where ranks do not divide a mini-batch, the rows as they are.
    """
    length = np.asarray(lengths, dtype=np.int64)
    rows_per_mini = len(length) // num_mini_batches
    assert rows_per_mini * num_mini_batches == len(length), (len(length), num_mini_batches)
    if rows_per_mini % dp_size:
        return np.arange(len(length))
    unit = 1
    if groups is not None:  # rows of each group where adjacent rows form groups of one size; else all rows
        starts = [row for row in range(len(groups)) if row == 0 or groups[row] != groups[row - 1]]
        unit = len(groups) // len(starts)
        unit = unit if starts == list(range(0, len(groups), unit)) else len(groups)
    in_order = bool(rows_per_mini // dp_size % unit)
    order = np.arange(len(length)).reshape(num_mini_batches, dp_size, -1)
    if not in_order and dp_size > 1:
        cost = workload(length).reshape(num_mini_batches, -1, unit).sum(2)
        for mini in range(num_mini_batches):
            parts = np.array(balance_partitions(cost[mini], dp_size, equal_counts=True))
            rows = parts[..., None] * unit + np.arange(unit)
            order[mini] = mini * rows_per_mini + rows.reshape(dp_size, -1)
    # From (mini-batch, rank, row) to (rank, mini-batch, row): the share of a rank is consecutive.
    return order.transpose(1, 0, 2).reshape(-1)


def order_for(batch: DataProto, role_shares_prompts: bool, dp_size: int, num_mini_batches: int = 1) -> RowOrder:
    """:func:`balanced_order` of a batch; rows of one ``prompt_id`` stay together for a role that shares prompts."""
    lengths = batch.batch["attention_mask"].sum(1).numpy()
    prompt_ids = batch.non_tensor_batch.get("prompt_id") if role_shares_prompts else None
    return balanced_order(lengths, dp_size, num_mini_batches, None if prompt_ids is None else list(prompt_ids))


def num_samples(batch: DataProto) -> int:
    """Rows; episodes, where a sample may have several rows."""
    if "episode_ids" not in batch.batch:
        return len(batch)
    return len(np.unique(batch.batch["episode_ids"].numpy()))


def even_mini_batches(batch: DataProto, num_mini_batches: int, dp_size: int) -> DataProto:
    """A batch of episodes whose rows divide into mini-batches of equally many episodes, or one fewer, and each of them
    onto ``dp_size`` ranks.

    Consecutive episodes form a mini-batch.  Where one has fewer rows than the largest, rows of a single token fill it
    up, with all masks empty, so that they weigh nothing.
    """
    episodes = batch.batch["episode_ids"].numpy()
    starts = np.flatnonzero(np.diff(episodes, prepend=-1))
    begins = np.append([part[0] for part in np.array_split(starts, num_mini_batches)], len(batch))
    parts = [np.arange(begin, end) for begin, end in pairwise(begins)]
    most = max(len(part) for part in parts)
    # Rounded up to a multiple of the ranks: each takes equally many rows of each mini-batch, as collectives need.
    most += -most % dp_size
    fillers = [np.full(most - len(part), part[-1]) for part in parts]
    filled = batch[np.concatenate([rows for pair in zip(parts, fillers, strict=True) for rows in pair])]
    empty = np.concatenate([np.arange(most) >= len(part) for part in parts])
    empty_rows(filled, torch.from_numpy(empty))
    return filled


def empty_rows(batch: DataProto, rows: torch.Tensor) -> None:
    """Take from ``rows`` (bool (B,)) all that they hold: of a row nothing is left but its first token, which no loss,
    no image and no statistic counts.

    Masks are cleared, numbers are zero, and objects other than names are None; ids say which episode the row fills up.
    """
    first = torch.zeros(batch.batch["attention_mask"].shape[1], dtype=torch.bool)
    first[0] = True
    for name, column in list(batch.batch.items()):
        emptied = column.clone()
        if name == "attention_mask":
            emptied[rows] = first
        elif column.dtype == torch.bool or column.is_floating_point():
            emptied[rows] = 0
        batch.batch[name] = emptied
    for name, objects in batch.non_tensor_batch.items():
        if not all(isinstance(one, str | int | float | np.generic) for one in objects[rows.numpy()]):
            batch.non_tensor_batch[name] = objects.copy()
            batch.non_tensor_batch[name][rows.numpy()] = None


def length_metrics(batch: DataProto, order: RowOrder, role: str, dp_size: int) -> Metrics:
    """Tokens of a rank's share, in the order of the rows and in ``order``."""
    lengths = batch.batch["attention_mask"].sum(1).numpy()
    if len(lengths) % dp_size:
        return {}
    plain, balanced = (values.reshape(dp_size, -1).sum(1) for values in (lengths, lengths[order]))
    name = f"global_seqlen/{role}/"
    return {
        f"{name}mean": Mean(float(plain.mean())),
        f"{name}min": Min(float(plain.min())),
        f"{name}max": Max(float(plain.max())),
        f"{name}minmax_diff": Max(float(plain.max() - plain.min())),
        f"{name}balanced_min": Min(float(balanced.min())),
        f"{name}balanced_max": Max(float(balanced.max())),
    }


Values = Mapping[str, torch.Tensor]


def answers(
    batch: DataProto,
    asks: Sequence[RoleAsk],
    clusters: Mapping[str, Cluster],
    residency: Residency,
    replacing: Callable[[Cluster, Callable[[], Values]], Values],
) -> Iterator[Answer]:
    """The answers of the roles of a phase, in their order. Roles without a device in common compute concurrently,
    others take turns; a role without rows is left out.

    Args:
        clusters: by role.
        residency: brings a role onto its devices, which several may share.
        replacing: runs the work of a role, once more where its workers have to be replaced.
    """
    turns: list[list[tuple[RoleAsk, NDArray[np.bool_]]]] = [[]]
    busy: set[int] = set()
    for asked in asks:
        rows = np.ones(len(batch), dtype=bool)
        if asked.tags:
            rows = np.isin(batch.non_tensor_batch["tag"].astype(str), list(asked.tags))
        if not rows.any():
            continue
        devices = set(clusters[asked.role].role.device_mapping or ())
        if devices & busy:
            turns.append([])
            busy = set()
        turns[-1].append((asked, rows))
        busy |= devices
    for turn in turns:
        pending = []
        for asked, rows in turn:
            cluster, part = clusters[asked.role], batch if rows.all() else batch[rows]
            seen = part if asked.view is None else asked.view(part)
            read = read_by(asked.role, asked.ask, seen)
            work = Computation(partial(start_computing, read, cluster, asked.ask, residency))
            pending.append((asked, torch.from_numpy(rows), part, seen, partial(replacing, cluster, work)))
        for asked, used, part, seen, columns in pending:
            yield Answer(asked, used, part, seen, columns())


class Computation(Generic[R]):
    """A computation that begins now and is waited for when it is called; called again, it begins again."""

    def __init__(self, begin: Callable[[], Callable[[], R]]) -> None:
        self._begin = begin
        self._begun: Callable[[], R] | None = None
        with suppress(WorkerDied):  # the call that waits begins again, and raises it
            self._begun = begin()

    def __call__(self) -> R:
        begun, self._begun = self._begun or self._begin(), None
        return begun()


def start_computing(
    batch: DataProto, cluster: Cluster, ask: Ask, residency: Residency | None = None
) -> Callable[[], Values]:
    """Start to compute columns (B, L), on each rank an equal share of the work.

    Args:
        residency: brings the model onto its devices before; None: it is there.

    Returns:
        A function that waits for the columns and gives them in the order of ``batch``.
    """
    if residency is not None:
        residency.bring({cluster.name: WEIGHTS})
    if cluster.dp_size == 1:
        call = cluster.call(ModelWorker.forward, batch, ask)
        return lambda: call.result().batch
    order = order_for(batch, cluster.role.use_prefix_sharing, cluster.dp_size)
    # Selected before they are ordered: indexing copies, and most columns are not sent.
    shares = cluster.call(ModelWorker.forward, _selected(batch, *POLICY_COLUMNS)[order], ask)
    # argsort of a permutation is its inverse.
    return lambda: shares.result()[np.argsort(order)].batch


def read_by(role: str, ask: Ask, batch: DataProto) -> DataProto:
    """``batch`` as a role reads it: less the recorded routes, but for the policy's own pass, in which tokens go to the
    experts that they were sampled with."""
    names = list(batch.batch.keys())  # keys() unpacks no column
    if Output.ROUTES not in names or (role == "actor_train" and not ask.without_adapters):
        return batch
    return batch.select([name for name in names if name != Output.ROUTES])


def _selected(batch: DataProto, *names: str) -> DataProto:
    """The columns among ``names`` that the batch has."""
    tensors = [name for name in names if name in batch.batch.keys()]  # noqa: SIM118 (keys() unpacks no column)
    return batch.select(tensors, [name for name in names if name in batch.non_tensor_batch])


def update_model(
    batch: DataProto,
    cluster: Cluster,
    loss: SampledLoss,
    num_mini_batches: int,
    epochs: int = 1,
    shuffle_seed: tuple[int, ...] | None = None,
) -> Metrics:
    """``epochs`` passes over a batch, with an optimizer step on each of ``num_mini_batches`` parts.

    Mini-batches are of equally many samples, or episodes, whose rows stay in one; of episodes that do not divide, some
    have one fewer than others.

    Args:
        shuffle_seed: seed of the mini-batches, which are drawn again for every pass; None: consecutive rows, each pass
            the same.
    """
    loss = replace(loss, num_groups=int(batch.batch["group_ids"].max()) + 1)
    by_prompt = cluster.role.use_prefix_sharing
    passes = [batch]
    if shuffle_seed is not None:
        seeds = [(*shuffle_seed, epoch) for epoch in range(epochs)]
        passes = [batch[shuffled_rows(batch, seed, by_prompt)] for seed in seeds]
    metrics: list[Metrics] = []
    for ordered in passes:
        shares, lengths = dealt_out(ordered, cluster, num_mini_batches)
        # Without shuffling all epochs are one call, so that the rows are sent once.
        call = cluster.call(TrainWorker.step, shares, loss, mini_batches=num_mini_batches, epochs=epochs // len(passes))
        metrics.append(call.result())
    return merge_metrics(metrics) | lengths


def dealt_out(batch: DataProto, cluster: Cluster, num_mini_batches: int) -> tuple[DataProto, Metrics]:
    """The rows in an order in which consecutive equal shares give every rank its part of every mini-batch, and the
    tokens of the shares."""
    dp_size = cluster.dp_size
    rows = even_mini_batches(batch, num_mini_batches, dp_size) if "episode_ids" in batch.batch else batch
    order = order_for(rows, cluster.role.use_prefix_sharing, dp_size, num_mini_batches)
    shares = rows[order] if dp_size > 1 else rows
    return shares, length_metrics(rows, order, cluster.name, dp_size)


def shuffled_rows(batch: DataProto, seed: tuple[int, ...], by_prompt: bool) -> np.ndarray:
    """int64 (B,): the rows in an order drawn from ``seed``; those of an episode stay together, and with ``by_prompt``
    those of a prompt."""
    generator = np.random.default_rng(seed)
    if not by_prompt and "episode_ids" not in batch.batch:
        return generator.permutation(len(batch))
    together = "group_ids" if by_prompt else "episode_ids"
    _, prompt = np.unique(batch.batch[together].numpy(), return_inverse=True)
    place: np.ndarray = generator.permutation(int(prompt.max()) + 1)
    # Stable: rows of a prompt or episode keep their order.
    return np.argsort(place[prompt], kind="stable")
