"""The models of a run: which of them are on the devices, columns that they compute, and their optimizer steps.

Roles that share devices take turns (:class:`Residency`): what a phase needs is brought onto the devices, what it does
not need leaves.  A role that shares its devices with no other role never moves.

Ranks that share gradients wait for the slowest.  Which rank computes a row changes no sum, so the rows of every
mini-batch are dealt out in equal numbers and as equal as possible in :func:`~roll.models.partitions.workload`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from roll.config.plan.plan import Plan
from roll.config.roles import GenerationWorkerConfig, WorkerConfig
from roll.config.run import RunConfig
from roll.distributed import Cluster, DeadlineExceeded, RemoteError, ResourceManager, WorkerDied
from roll.distributed.signals import ending
from roll.methods.base import POLICY_COLUMNS, Answer, Ask, RoleAsk, SampledLoss
from roll.models.partitions import balance_partitions, workload
from roll.platforms import current_platform
from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean, Metrics, Min, merge_metrics
from roll.strategies.base import Output, StateKind
from roll.workers.generation import GenerationWorker
from roll.workers.model import ModelWorker, TrainWorker

logger = logging.getLogger(__name__)

R = TypeVar("R")
RowOrder = NDArray[np.int64]
Values = Mapping[str, torch.Tensor]

WEIGHTS = frozenset({StateKind.MODEL_PARAMS})
TRAINING = frozenset({StateKind.MODEL_PARAMS, StateKind.OTHER_PARAMS, StateKind.OPTIMIZER_STATES})
GENERATION = frozenset({StateKind.MODEL_PARAMS, StateKind.KV_CACHE})


def start_cluster(
    config: RunConfig, name: str, worker: str, resources: ResourceManager, role: WorkerConfig, settings: object = None
) -> Cluster:
    """Start the processes of a role, of the class at the dotted path ``worker``, with the run's seed and deadline;
    ``settings``: what they need besides the section ``role``."""
    limit = config.rpc_timeout
    return Cluster(name, worker, resources, role, seed=config.seed, settings=settings, rpc_timeout=limit)


@dataclass
class _Tenant:
    """A role on shared devices, with all of its states and those that are there."""

    cluster: Cluster
    devices: frozenset[int]
    states: frozenset[StateKind]
    resident: frozenset[StateKind]


def _ask_engines(cluster: Cluster, method: Callable[..., None], *arguments: object) -> None:
    """Those that are lost are left out as long as there are others."""
    timeout = cluster.role.engine_timeout if isinstance(cluster.role, GenerationWorkerConfig) else None
    try:
        cluster.call_all(method, *arguments).within(timeout).result()
    except RemoteError as loss:
        silent = loss.silent_ranks if isinstance(loss, DeadlineExceeded) else []
        lost = {*silent, *(report.rank for report in loss.reports)}
        if lost.issuperset(cluster.live_ranks):
            raise
        for rank in lost:
            cluster.leave_out(rank)
        logger.warning("an engine is lost, and the run goes on with the others:\n%s", loss)


class Residency:
    """Moves the states of roles that share devices; ``enabled`` False: everything stays where it is, None: as the
    device's memory is the host's or not."""

    def __init__(self, plan: Plan, enabled: bool | None) -> None:
        # On a CPU nothing becomes free when a role leaves.
        moves = current_platform().device_type != "cpu" if enabled is None else enabled
        shared = {name: role for name, role in plan.roles.items() if role.colocated_with and role.device_mapping}
        self._devices = {name: frozenset(role.device_mapping) for name, role in shared.items()} if moves else {}
        self._tenants: dict[str, _Tenant] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def moves(self, role: str) -> bool:
        """True if this role ever leaves its devices."""
        return role in self._devices

    def admit(self, cluster: Cluster, states: frozenset[StateKind]) -> None:
        """Take charge of a role that has just been built; if it shares devices, it makes room for those that are built
        after it."""
        if cluster.name in self._devices:
            self._tenants[cluster.name] = _Tenant(cluster, self._devices[cluster.name], states, states)
            self._move(cluster.name, states, arrives=False)

    def dismiss(self, name: str) -> None:
        self._tenants.pop(name, None)

    def bring(self, needs: Mapping[str, frozenset[StateKind]]) -> None:
        """Have exactly what the next phase needs on the devices that it uses: offload, then onload. A signal waits
        until all moves are made."""
        # Roles with devices of their own are no tenants, and never move.
        needed = {name: kinds for name, kinds in needs.items() if name in self._tenants}
        if not needed:
            return
        with ending.holding():
            wanted: set[int] = set().union(*(self._tenants[name].devices for name in needed))
            for name, tenant in self._tenants.items():
                superfluous = tenant.resident - needed.get(name, frozenset())
                # All that leaves does so before anything comes: the two together need not fit onto a device.
                others = [self._tenants[other] for other in needed if other != name]
                # What a role has on devices that it shares with no other one of the phase may stay.
                alone = name in needed and not any(other.devices & tenant.devices for other in others)
                if superfluous and tenant.devices & wanted and not alone:
                    self._move(name, superfluous, arrives=False)
            for name, kinds in needed.items():
                tenant = self._tenants[name]
                if (kinds & tenant.states) - tenant.resident:
                    self._move(name, kinds & tenant.states, arrives=True)

    def _move(self, name: str, kinds: frozenset[StateKind], arrives: bool) -> None:
        begin, tenant = time.perf_counter(), self._tenants[name]
        if StateKind.KV_CACHE not in tenant.states:
            method = ModelWorker.load_states if arrives else ModelWorker.offload_states
            tenant.cluster.call_all(method, sorted(kinds)).result()
        elif arrives:
            # Without the KV cache an exchange of weights has room for the trainer's copy beside the engine's.
            _ask_engines(tenant.cluster, GenerationWorker.wake, StateKind.KV_CACHE not in kinds)
        else:
            kinds = tenant.states  # an engine leaves as a whole
            _ask_engines(tenant.cluster, GenerationWorker.sleep)
        tenant.resident = tenant.resident | kinds if arrives else tenant.resident - kinds
        self._seconds[f"time/{name}/{'onload' if arrives else 'offload'}/total"] += time.perf_counter() - begin

    def metrics(self) -> Metrics:
        """Seconds of the moves since the last call, by role and direction."""
        metrics: Metrics = {name: Mean(seconds) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


def balanced_order(
    lengths: Sequence[int] | NDArray[np.int64],
    dp_size: int,
    num_mini_batches: int = 1,
    groups: Sequence[object] | None = None,
) -> RowOrder:
    """The order of rows in which consecutive equal shares give every rank its part of every mini-batch, which consists
    of rows [m * n, (m + 1) * n) of the batch, whatever the number of ranks.

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
    return len(np.unique(batch.batch["episode_ids"].numpy())) if "episode_ids" in batch.batch else len(batch)


def even_mini_batches(batch: DataProto, num_mini_batches: int, dp_size: int) -> DataProto:
    """A batch of episodes whose rows divide into mini-batches of equally many consecutive episodes, or one fewer, and
    each of them onto ``dp_size`` ranks.  Where one has fewer rows than the largest, rows of a single token fill it up,
    with all masks empty, so that they weigh nothing.
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
    rows = torch.from_numpy(empty)
    # Nothing is left but the first token, which no loss, no image and no statistic counts, and ids, which say what
    # episode the row fills up.
    for name, column in list(filled.batch.items()):
        emptied = column.clone()
        if name == "attention_mask" or column.dtype == torch.bool or column.is_floating_point():
            emptied[rows] = 0
        if name == "attention_mask":
            emptied[rows, 0] = True
        filled.batch[name] = emptied
    for name, objects in filled.non_tensor_batch.items():
        if not all(isinstance(one, str | int | float | np.generic) for one in objects[empty]):
            filled.non_tensor_batch[name] = objects.copy()
            filled.non_tensor_batch[name][empty] = None
    return filled


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


def answers(
    batch: DataProto,
    asks: Sequence[RoleAsk],
    clusters: Mapping[str, Cluster],
    residency: Residency,
    replacing: Callable[[Cluster, Callable[[], Values]], Values],
) -> Iterator[Answer]:
    """The answers of the roles of a phase, in their order. Roles without a device in common compute concurrently,
    others take turns; a role without rows is left out. ``replacing`` runs the work of a role, once more where its
    workers have to be replaced."""
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
    """Start to compute columns (B, L), on each rank an equal share of the work; the function returned waits for them,
    and gives them in the order of ``batch``. ``residency`` brings the model onto its devices before; None: it is there.
    """
    if residency is not None:
        residency.bring({cluster.name: WEIGHTS})
    if cluster.dp_size == 1:
        call = cluster.call(ModelWorker.forward, batch, ask)
        return lambda: call.result().batch
    order = order_for(batch, cluster.role.use_prefix_sharing, cluster.dp_size)
    # Selected before they are ordered: indexing copies, and most columns are not sent.
    tensors = [name for name in batch.batch.keys() if name in POLICY_COLUMNS]  # noqa: SIM118 (keys() unpacks no column)
    sent = batch.select(tensors, [name for name in batch.non_tensor_batch if name in POLICY_COLUMNS])
    shares = cluster.call(ModelWorker.forward, sent[order], ask)
    # argsort of a permutation is its inverse.
    return lambda: shares.result()[np.argsort(order)].batch


def read_by(role: str, ask: Ask, batch: DataProto) -> DataProto:
    """``batch`` as a role reads it: less the recorded routes, but for the policy's own pass, in which tokens go to the
    experts that they were sampled with."""
    names = list(batch.batch.keys())  # keys() unpacks no column
    if Output.ROUTES not in names or (role == "actor_train" and not ask.without_adapters):
        return batch
    return batch.select([name for name in names if name != Output.ROUTES])


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
    have one fewer than others. They are drawn from ``shuffle_seed`` again for every pass; None: consecutive rows, each
    pass the same.
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
    """The rows in the order of :func:`balanced_order`, and the tokens of the ranks' shares."""
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
