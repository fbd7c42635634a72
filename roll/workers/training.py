"""Workers whose model learns: what all of them share; actor and critic with their losses. The actor sends its weights
to the engines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roll.algorithms.aggregation import (
    LossDenominators,
    denominators_from,
    denominators_of,
    group_tokens_of,
    needs_groups,
)
from roll.algorithms.distillation import comparison_metrics, divergence
from roll.algorithms.losses import ActorLossOptions, actor_loss, value_loss
from roll.algorithms.policy_losses import LossInputs
from roll.config.losses import DivergenceConfig
from roll.distributed import Dispatch, register
from roll.platforms import current_platform
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics
from roll.strategies.base import (
    Comparison,
    LossFunction,
    ModelHead,
    Output,
    TensorBatch,
    WeightSelection,
    teacher_columns,
)
from roll.weight_sync.encoding import LostEngines, SyncOptions, SyncReport, WeightSyncError
from roll.weight_sync.sender import RayEngines, Update, WeightSender, build_transport
from roll.workers.model import MODEL_COLUMNS, POLICY_COLUMNS, ModelSettings, ModelWorker, columns_of

TEACHER = "teacher"
"""Begins the names of a teacher's columns and outputs."""
TEACHER_INDEX, TEACHER_WEIGHTS = f"{TEACHER}/index", f"{TEACHER}/weights"
"""Columns of on-policy distillation by a divergence: the number of a row's teacher, and its weight."""
STEP_METRICS = ("grad_norm", "lr", "loss_scale", "tokens_per_micro_batch", "padding_ratio", "moe_")
"""Beginnings of the names of what a strategy itself reports."""


class TrainingWorker(ModelWorker):
    """A model that learns on one rank."""

    def denominators(
        self,
        masks: list[torch.Tensor],
        norm_length: float | None = None,
        groups: tuple[list[torch.Tensor], int] | None = None,
        sequence_tokens: list[torch.Tensor | None] | None = None,
    ) -> list[LossDenominators]:
        """Collective. Of each mini-batch, summed over all ranks, from the loss masks of this rank's shares.

        Args:
            sequence_tokens: of each mini-batch, where trajectories may have several rows.
            groups: the ids of each mini-batch's rows and their number, where the loss is aggregated by prompts.
        """
        of_rows = sequence_tokens or [None] * len(masks)
        local = torch.stack([denominators_of(mask, tokens) for mask, tokens in zip(masks, of_rows, strict=True)])
        totals = [denominators_from(summed, norm_length) for summed in self.strategy.all_reduce_sum(local).unbind()]
        if groups is None:
            return totals
        ids, number = groups
        tokens = torch.stack([group_tokens_of(mask, of, number) for mask, of in zip(masks, ids, strict=True)])
        by_mini_batch = zip(totals, self.strategy.all_reduce_sum(tokens).unbind(), strict=True)
        return [replace(total, group_tokens=summed) for total, summed in by_mini_batch]

    def mini_batches(
        self, batch: DataProto, count: int, modes: Collection[str | None], num_groups: int, norm_length: float
    ) -> list[tuple[TensorBatch, LossDenominators]]:
        """Collective. This rank's share of each of ``count`` mini-batches, with the denominators over all ranks.

        Args:
            modes: aggregation modes of the loss; None: a term that it does not have.
            num_groups: prompts of the whole batch, whose rows ``group_ids`` count.
            norm_length: denominator of the modes that divide by a fixed length.
        """
        shares = equal_parts(columns_of(batch), count)
        groups = None
        if any(mode is not None and needs_groups(mode) for mode in modes):
            groups = [share["group_ids"] for share in shares], num_groups
        sequence_tokens = [share.get("sequence_tokens") for share in shares]
        masks = [share["loss_mask"] for share in shares]
        return list(zip(shares, self.denominators(masks, norm_length, groups, sequence_tokens), strict=True))

    def optimizer_step(
        self,
        batch: TensorBatch,
        loss: LossFunction,
        outputs: Collection[Output],
        temperature: float,
        prefix: str,
        teachers: Sequence[Comparison] = (),
    ) -> Metrics:
        """Collective. One optimizer step; what the strategy itself reports stands under ``prefix``.

        A loss that is not finite on any rank drops the step on all, as a gradient does.
        """
        metrics = self.strategy.train_step(batch, partial(watched_loss, loss=loss), outputs, temperature, teachers)
        return {prefix + name if name.startswith(STEP_METRICS) else name: metric for name, metric in metrics.items()}

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Collective. Everything needed to continue, written into the folder ``path``; see :meth:`checkpoint_saved`."""
        self.strategy.save(Path(path))

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_saved(self, wait: bool) -> bool:
        """True when this rank's part of the last :meth:`save_checkpoint` is on disk; ``wait`` until it is."""
        return self.strategy.saved(wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Collective. The inverse of :meth:`save_checkpoint`."""
        self.strategy.load(Path(path))


def watched_loss(outputs: TensorBatch, batch: TensorBatch, loss: LossFunction) -> tuple[torch.Tensor, Metrics]:
    """``loss``, whose gradient is nan where its value is not finite.

    Such a loss may have a finite gradient (the infinity of a masked term, say), and only on one rank. The norm of the
    gradient is what all ranks know and agree on.
    """
    value, metrics = loss(outputs, batch)
    return _NanGradient.apply(value), metrics


class _NanGradient(torch.autograd.Function):
    """The identity; without a wait for the device, and exact where the value is finite (a factor of 1)."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones_like(value).masked_fill(~value.isfinite(), torch.nan))
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (factor,) = ctx.saved_tensors
        return gradient * factor


def equal_parts(batch: TensorBatch, count: int) -> list[TensorBatch]:
    """Divide this rank's rows into ``count`` consecutive mini-batches of equal size."""
    total = len(batch["input_ids"])
    assert total % count == 0, f"{total} rows do not divide into {count} mini-batches"
    rows = total // count
    return [{k: v[begin : begin + rows] for k, v in batch.items()} for begin in range(0, total, rows)]


LOSS_COLUMNS = (
    "loss_mask",
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "sample_weights",
    "policy_mask",
    "group_ids",
    "turn_ids",
    "sequence_tokens",
)


TAUGHT_COLUMNS = (*teacher_columns(TEACHER), TEACHER_INDEX, TEACHER_WEIGHTS)


@dataclass(frozen=True)
class ActorSettings(ModelSettings):
    """The loss of ``actor_train``."""

    loss: ActorLossOptions = field(default_factory=ActorLossOptions)
    old_is_rollout: bool = False
    """Its old log-probs are the engine's."""
    divergence: DivergenceConfig | None = None
    """Of teachers that a term of the loss compares the policy with; None: there are none."""
    teachers: tuple[str, ...] = ()
    """Their names, by number."""


class ActorWorker(TrainingWorker):
    """``actor_train`` on one rank."""

    settings_class = ActorSettings
    settings: ActorSettings
    _sender: WeightSender | None = None

    @register(Dispatch.DP_MP_COMPUTE, columns=POLICY_COLUMNS + LOSS_COLUMNS + TAUGHT_COLUMNS)
    def update(
        self,
        batch: DataProto,
        *,
        mini_batches: int,
        epochs: int,
        num_groups: int,
        norm_length: float,
        temperature: float,
        entropy_loss_coef: float | None = None,
    ) -> Metrics:
        """Collective. ``epochs`` passes over the rows, with an optimizer step on each of ``mini_batches`` equal parts.

        Args:
            num_groups, norm_length: see :meth:`mini_batches`.
            entropy_loss_coef: weight of the entropy bonus in this update; None: that of the settings.
        """
        options = self.settings.loss
        if entropy_loss_coef is not None:
            options = replace(options, entropy_loss_coef=entropy_loss_coef)
        modes = (options.loss_agg_mode, options.kl_loss_agg_mode, options.entropy_loss_agg_mode)
        shares = self.mini_batches(batch, mini_batches, modes, num_groups, norm_length)
        outputs = [Output.LOG_PROBS] + ([Output.ENTROPY] if options.needs_entropy or options.log_entropy else [])
        compared = []
        if self.settings.divergence is not None:
            compared = [Comparison(TEACHER, temperature, partial(options_divergence, self.settings.divergence))]
        metrics = []
        for _ in range(epochs):
            for share, denominators in shares:
                loss = partial(
                    policy_update_loss,
                    options=options,
                    denominators=denominators,
                    old_is_rollout=self.settings.old_is_rollout,
                    teachers=self.settings.teachers,
                )
                metrics.append(self.optimizer_step(share, loss, outputs, temperature, "actor/", compared))
        return merge_metrics(metrics)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(
        self, engines: dict[int, Any], version: int, base_version: int | None, options: SyncOptions
    ) -> SyncReport | LostEngines | None:
        """Collective. Rank 0 sends the policy to ``engines`` and verifies it; the others help to gather.

        Args:
            base_version: what all of the engines hold; None: they are sent everything.
        """
        selection = WeightSelection(base_version is not None, options.adapters_apart)
        buckets = self.strategy.named_full_weights(options.bucket_bytes, selection)
        if self.context.rank == 0:
            scalings = self.strategy.adapter_scalings() if options.adapters_apart else {}
            update = Update(version, options.deadline, base_version, scalings, options.patience)
            try:
                return self._weight_sender(options).send(buckets, RayEngines(engines), update)
            except WeightSyncError as error:
                # The other ranks take part in the rest of the gathering, so this one must: the update may be repeated.
                for _ in buckets:
                    pass
                if error.lost:
                    return LostEngines(error.lost, str(error))
                raise
        for _ in buckets:
            pass
        return None

    def _weight_sender(self, options: SyncOptions) -> WeightSender:
        """Made at the first update; it stays, with its connections and what it remembers."""
        if self._sender is None:
            backend, host = current_platform().collective_backend, self.context.master_addr
            transport = build_transport(options.transport, options.directory, backend, host)
            self._sender = WeightSender(transport, options.bucket_bytes, delta=options.mode == "delta")
        return self._sender


def policy_update_loss(
    outputs: TensorBatch,
    batch: TensorBatch,
    options: ActorLossOptions,
    denominators: LossDenominators,
    old_is_rollout: bool = False,
    teachers: tuple[str, ...] = (),
) -> tuple[torch.Tensor, Metrics]:
    """The actor's loss as a strategy's :class:`~roll.strategies.base.LossFunction`."""
    inputs = LossInputs(
        log_probs=outputs[Output.LOG_PROBS],
        entropy=outputs.get(Output.ENTROPY),
        mask=batch["loss_mask"],
        **{name: batch.get(name) for name in LOSS_COLUMNS if name not in ("loss_mask", "advantages")},
        advantages=batch["advantages"],
        old_is_rollout=old_is_rollout,
        teacher_divergence=outputs[f"{TEACHER}/divergence"] * batch[TEACHER_WEIGHTS][:, None] if teachers else None,
    )
    result = actor_loss(inputs, options, denominators)
    return result.loss, result.metrics | teacher_metrics(outputs, batch, teachers)


def teacher_metrics(outputs: TensorBatch, batch: TensorBatch, teachers: tuple[str, ...]) -> Metrics:
    """Of each teacher over the response tokens of its rows: the divergence, and how the distributions compare."""
    metrics: Metrics = {}
    of_teacher = {name.removeprefix(f"{TEACHER}/"): values for name, values in outputs.items()}
    for number, name in enumerate(teachers):
        mask = batch["response_mask"] & (batch[TEACHER_INDEX] == number)[:, None]
        total: Any = (of_teacher["divergence"] * mask).sum().detach()
        tokens: Any = mask.sum()
        metrics[f"opd/{name}/kl"] = Mean(total, tokens)
        metrics |= comparison_metrics(of_teacher, mask, f"opd/{name}/")
    return metrics


def options_divergence(
    options: DivergenceConfig, student: torch.Tensor, teacher: torch.Tensor, has_tail: bool
) -> torch.Tensor:
    """As :class:`~roll.strategies.base.Comparison` wants it."""
    return divergence(student, teacher, options, has_tail)


@dataclass(frozen=True)
class CriticSettings(ModelSettings):
    """The loss of ``critic``."""

    value_clip: float | None = None
    """Bound of the change of a value in one update."""
    value_loss_type: str = "mse"
    loss_agg_mode: str = "token-mean"
    """The key ``value_loss_agg_mode``."""


class CriticWorker(TrainingWorker):
    """``critic`` on one rank."""

    settings_class = CriticSettings
    settings: CriticSettings
    head = ModelHead.VALUE

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def compute_values(self, batch: DataProto) -> DataProto:
        """``values`` float32 (B, L): the value of the state in which each response token was sampled."""
        return DataProto.from_dict(self.strategy.forward(columns_of(batch), [Output.VALUES]))

    @register(
        Dispatch.DP_MP_COMPUTE,
        columns=(*MODEL_COLUMNS, "loss_mask", "values", "returns", "group_ids", "sequence_tokens"),
    )
    def update(
        self, batch: DataProto, *, mini_batches: int, epochs: int, num_groups: int, norm_length: float
    ) -> Metrics:
        """Collective. Optimizer steps as of :meth:`ActorWorker.update`."""
        settings = self.settings
        shares = self.mini_batches(batch, mini_batches, (settings.loss_agg_mode,), num_groups, norm_length)
        metrics = []
        for _ in range(epochs):
            for share, denominators in shares:
                loss = partial(
                    value_update_loss,
                    value_clip=settings.value_clip,
                    value_loss_type=settings.value_loss_type,
                    loss_agg_mode=settings.loss_agg_mode,
                    denominators=denominators,
                )
                metrics.append(self.optimizer_step(share, loss, [Output.VALUES], 1.0, prefix="critic/"))
        return merge_metrics(metrics)


def value_update_loss(
    outputs: TensorBatch,
    batch: TensorBatch,
    value_clip: float | None,
    value_loss_type: str,
    loss_agg_mode: str,
    denominators: LossDenominators,
) -> tuple[torch.Tensor, Metrics]:
    """The critic's loss as a strategy's :class:`~roll.strategies.base.LossFunction`."""
    result = value_loss(
        values=outputs[Output.VALUES],
        old_values=batch["values"],
        returns=batch["returns"],
        mask=batch["loss_mask"],
        value_clip=value_clip,
        value_loss_type=value_loss_type,
        loss_agg_mode=loss_agg_mode,
        denominators=denominators,
        group_ids=batch.get("group_ids"),
        sequence_tokens=batch.get("sequence_tokens"),
    )
    return result.loss, result.metrics
