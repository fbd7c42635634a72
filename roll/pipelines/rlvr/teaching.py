"""The phase of on-policy distillation: what teachers say of the student's samples, as columns of the batch.

For a token a that the student pi sampled in state s, with d = log pi(a|s) - log pi_T(a|s),

    E[d] = KL(pi || pi_T) at s,    and    A = -d    is its score-function form (no gradient flows through d).

The gradient is unbiased where the tokens were sampled from pi itself; differentiating the estimate d instead would have
expected gradient 0. Both log-probs are the trainers' at the temperature of sampling, over the whole vocabulary, never
the engine's. ``opd_form: topk`` and ``full_vocabulary`` differentiate the divergence of the distributions at s, which
has no sampling noise and leaves out what a token does to later states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from roll.algorithms.kl import KLOptions, kl_estimate
from roll.config.policy import PolicyRunConfig
from roll.distributed import Cluster, PendingCall
from roll.models.layouts import TopTokens
from roll.pipelines.rlvr.given import as_teachers_see, back_in_place
from roll.pipelines.rlvr.phases import asked
from roll.pipelines.rlvr.teachers import coefficients
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import TEACHER_COLUMNS, teacher_columns
from roll.workers.model import ModelWorker
from roll.workers.training import TEACHER, TEACHER_INDEX, TEACHER_WEIGHTS


def routed(batch: DataProto, tags: Sequence[str] | None) -> np.ndarray:
    """bool (B,): rows with one of ``tags``; all where there are none."""
    of_rows = batch.non_tensor_batch["tag"]
    return np.isin(of_rows.astype(str), list(tags)) if tags else np.ones(len(batch), dtype=bool)


@dataclass(frozen=True)
class TeacherAnswer:
    """One teacher's answer."""

    teacher: str
    rows: np.ndarray
    """bool (B,): the rows that it was asked about."""
    part: DataProto
    """Those rows."""
    seen: DataProto
    """The same as it read them."""
    columns: Mapping[str, torch.Tensor]
    """In place of the tokens of ``seen``."""


def ask_teachers(
    batch: DataProto,
    teachers: Mapping[str, Cluster],
    config: PolicyRunConfig,
    enter: Callable[[Cluster], None],
    ask: Callable[[Cluster, DataProto], PendingCall[DataProto]],
) -> Iterator[TeacherAnswer]:
    """Each teacher's answer for its rows, in their order. Teachers without a device in common compute concurrently,
    others take turns."""
    waiting: list[tuple[str, np.ndarray, DataProto, DataProto, Callable[[], Mapping[str, torch.Tensor]]]] = []
    busy: set[int] = set()

    def answers() -> Iterator[TeacherAnswer]:
        return (TeacherAnswer(name, rows, part, seen, columns()) for name, rows, part, seen, columns in waiting)

    for name, cluster in teachers.items():
        rows = routed(batch, config.teacher[name].tag_included)
        if not rows.any():
            continue
        devices = set(config.teacher[name].device_mapping or ())
        if devices & busy:
            yield from answers()
            waiting, busy = [], set()
        enter(cluster)
        part = batch if rows.all() else batch[rows]
        seen = as_teachers_see(part)
        waiting.append((name, rows, part, seen, asked(seen, cluster, partial(ask, cluster))))
        busy |= devices
    yield from answers()


def estimated(own: torch.Tensor, of_teacher: torch.Tensor, config: PolicyRunConfig) -> torch.Tensor:
    """``kl_penalty`` of each sampled token's log-probs, (B, L), within +- ``opd_clamp``."""
    estimate = kl_estimate(own, of_teacher, KLOptions(estimator=config.kl_penalty))
    return estimate if config.opd_clamp is None else estimate.clamp(-config.opd_clamp, config.opd_clamp)


def add_teacher_divergence(
    batch: DataProto,
    teachers: Mapping[str, Cluster],
    config: PolicyRunConfig,
    temperature: float,
    enter: Callable[[Cluster], None],
) -> Metrics:
    """``teacher_kl`` float32 (B, L): the weighted sum over teachers of each sampled token's divergence, 0 outside the
    response mask; from ``old_log_probs``.

    Args:
        enter: brings a teacher onto its devices, which several may share.

    Returns:
        The metrics of each teacher.
    """
    tensors, weights = batch.batch, coefficients(config)
    total, metrics = torch.zeros_like(tensors["old_log_probs"]), Metrics()

    def ask(cluster: Cluster, some: DataProto) -> PendingCall[DataProto]:
        return cluster.call(ModelWorker.compute_log_probs, some, temperature=temperature)

    for answer in ask_teachers(batch, teachers, config, enter, ask):
        name, rows, part = answer.teacher, answer.rows, answer.part
        of_teacher = back_in_place(answer.columns["log_probs"], answer.seen, part)
        mask, own = part.batch["response_mask"], part.batch["old_log_probs"]
        estimate = estimated(own, of_teacher, config) * mask
        total[torch.from_numpy(rows)] += weights[name] * estimate
        tokens = float(mask.sum())
        metrics[f"opd/{name}/kl"] = Mean(float(((own - of_teacher) * mask).sum()), tokens)
        metrics[f"opd/{name}/teacher_log_prob"] = Mean(float((of_teacher * mask).sum()), tokens)
    tensors["teacher_kl"] = total
    mask = tensors["response_mask"]
    return metrics | {"opd/kl": Mean(float(total.sum()), float(mask.sum()))}


def add_teacher_targets(
    batch: DataProto,
    teachers: Mapping[str, Cluster],
    config: PolicyRunConfig,
    temperature: float,
    wanted: TopTokens,
    enter: Callable[[Cluster], None],
) -> None:
    """The columns of the teacher of each row (:func:`~roll.strategies.base.teacher_columns`), its number
    ``TEACHER_INDEX`` int64 (B,), -1 for none, and its weight ``TEACHER_WEIGHTS`` float32 (B,)."""
    tensors, weights = batch.batch, coefficients(config)
    tensors[TEACHER_INDEX] = torch.full((len(batch),), -1, dtype=torch.int64)
    tensors[TEACHER_WEIGHTS] = torch.zeros(len(batch))
    numbers = {name: number for number, name in enumerate(teachers)}

    def ask(cluster: Cluster, some: DataProto) -> PendingCall[DataProto]:
        compute_top_tokens, count, limit = ModelWorker.compute_top_tokens, wanted.count, wanted.limit
        return cluster.call(compute_top_tokens, some, count=count, limit=limit, temperature=temperature)

    for answer in ask_teachers(batch, teachers, config, enter, ask):
        own = torch.from_numpy(answer.rows)
        for column, source in zip(teacher_columns(TEACHER), TEACHER_COLUMNS, strict=True):
            values = back_in_place(answer.columns[source], answer.seen, answer.part)
            if column not in tensors:
                tensors[column] = values.new_zeros(len(batch), *values.shape[1:])
            tensors[column][own] = values
        tensors[TEACHER_INDEX][own] = numbers[answer.teacher]
        tensors[TEACHER_WEIGHTS][own] = weights[answer.teacher]
