"""Workers that learn from given rows, with their losses: demonstrations, preferences, reward models, distillation."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from roll.algorithms.aggregation import LossDenominators
from roll.algorithms.distillation import comparison_metrics
from roll.algorithms.preferences import (
    pair_sums,
    preference_loss,
    preference_metrics,
    unpaired_loss,
    unpaired_metrics,
)
from roll.algorithms.reward_models import reward_model_loss, units_of
from roll.config.losses import DivergenceConfig, PreferenceLossConfig, RewardLossConfig, is_unpaired
from roll.distributed import Dispatch, register
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import (
    Comparison,
    ModelHead,
    Output,
    TensorBatch,
    teacher_columns,
)
from roll.strategies.training.micro_batches import merged_floats
from roll.workers.model import MODEL_COLUMNS, ModelSettings, columns_of
from roll.workers.training import TEACHER, TrainingWorker, options_divergence


class SupervisedWorker(TrainingWorker):
    """A model that learns from given rows, on one rank."""

    @abstractmethod
    def update(self, batch: DataProto) -> Metrics:
        """Collective. One optimizer step on the batch of all ranks."""


class SftWorker(SupervisedWorker):
    """``sft_train`` on one rank."""

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        """Collective. One optimizer step on the mean negative log-likelihood of the response tokens of all ranks."""
        (denominators,) = self.denominators([batch.batch["response_mask"]])
        loss = partial(negative_log_likelihood, denominators=denominators)
        return self.optimizer_step(columns_of(batch), loss, [Output.LOG_PROBS], 1.0, prefix="sft_train/")

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def evaluate(self, batch: DataProto) -> Metrics:
        """Collective. Mean negative log-likelihood of the response tokens."""
        log_probs = self.strategy.forward(columns_of(batch), [Output.LOG_PROBS])[Output.LOG_PROBS]
        tokens = float(batch.batch["response_mask"].sum())
        return {"val/loss": Mean(-float(log_probs.sum()), tokens)}


def negative_log_likelihood(
    outputs: TensorBatch, batch: TensorBatch, denominators: LossDenominators
) -> tuple[torch.Tensor, Metrics]:
    """Token-mean negative log-likelihood as a strategy's :class:`~roll.strategies.base.LossFunction`."""
    mask = batch["response_mask"]
    total = -(outputs[Output.LOG_PROBS] * mask).sum()
    return total / max(denominators.tokens, 1.0), {"sft_train/loss": Mean(float(total.detach()), float(mask.sum()))}


PAIR_COLUMNS = ("unit_ids", "ref_log_probs", "slopes", "desirable", "kl")


@dataclass(frozen=True)
class PreferenceSettings(ModelSettings):
    """The loss of ``actor_train``."""

    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)


class PreferenceWorker(SupervisedWorker):
    """``actor_train`` of a DPO run on one rank."""

    settings_class = PreferenceSettings
    settings: PreferenceSettings

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + PAIR_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        """Collective. One optimizer step on the mean loss of the pairs of all ranks.

        Args:
            batch: rows in pairs, the chosen response first; ``unit_ids`` int64 (B,) equal within a pair;
                ``ref_log_probs`` float32 (B, L) where the loss asks for a reference; ``slopes`` float32 (B,) in place
                of the loss: the derivative of the mean loss by the sum of each row's log-probs.  Of a loss of single
                responses: ``desirable`` bool (B,), and ``kl`` float32 (B,), the same for all.
        """
        options = self.settings.loss
        if is_unpaired(options):
            answered = batch.batch["response_mask"].any(1).sum().double()
            rows = self.strategy.all_reduce_sum(answered[None]).item()
            single = partial(unpaired_update_loss, options=options, rows=rows)
            return self.optimizer_step(columns_of(batch), single, [Output.LOG_PROBS], 1.0, prefix="actor/")
        pairs = self.strategy.all_reduce_sum(torch.tensor([len(batch) / 2], dtype=torch.float64)).item()
        outputs = [Output.LOG_PROBS] + ([Output.SUM_OF_SQUARES] if options.use_weighting else [])
        loss = partial(preference_update_loss, options=options, pairs=pairs)
        return self.optimizer_step(columns_of(batch), loss, outputs, 1.0, prefix="actor/")


def preference_update_loss(
    outputs: TensorBatch, batch: TensorBatch, options: PreferenceLossConfig, pairs: float
) -> tuple[torch.Tensor, Metrics]:
    """The preference loss as a strategy's :class:`~roll.strategies.base.LossFunction`; ``pairs`` over all ranks."""
    sums = pair_sums(
        outputs[Output.LOG_PROBS],
        batch["response_mask"],
        batch.get("ref_log_probs"),
        options,
        outputs.get(Output.SUM_OF_SQUARES),
    )
    slopes = batch.get("slopes")
    if slopes is not None:  # of the mean over all pairs
        return (sums.policy * slopes.view(-1, 2)).sum(), preference_metrics(sums, options, None, "actor/")
    losses = preference_loss(sums, options)
    return losses.sum() / pairs, preference_metrics(sums, options, losses, "actor/")


def unpaired_update_loss(
    outputs: TensorBatch, batch: TensorBatch, options: PreferenceLossConfig, rows: float
) -> tuple[torch.Tensor, Metrics]:
    """A loss of single responses as a strategy's :class:`~roll.strategies.base.LossFunction`; ``rows`` over all
    ranks, without those that only fill a batch."""
    mask = batch["response_mask"]
    real, kl = mask.any(1), batch.get("kl")
    log_probs = (outputs[Output.LOG_PROBS] * mask).sum(1)[real]
    ratios = log_probs - (batch["ref_log_probs"] * mask).sum(1)[real]
    desirable = batch["desirable"][real]
    losses = unpaired_loss(ratios, desirable, None if kl is None else kl[real], options)
    return losses.sum() / rows, unpaired_metrics(log_probs, ratios, desirable, losses, options, "actor/")


SCORE_COLUMNS = ("score_mask", "unit_ids", "targets", "margins")


@dataclass(frozen=True)
class RewardTrainSettings(ModelSettings):
    """The loss of ``reward_train``."""

    loss: RewardLossConfig = field(default_factory=RewardLossConfig)


class RewardTrainWorker(SupervisedWorker):
    """``reward_train`` on one rank."""

    settings_class = RewardTrainSettings
    settings: RewardTrainSettings
    head = ModelHead.SCORE

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + SCORE_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        """Collective. One optimizer step on the mean loss of the prompts (responses, steps) of all ranks.

        Args:
            batch: as :func:`roll.algorithms.reward_models.reward_model_loss` takes it; rows of one ``unit_ids`` are
                adjacent and on one rank.
        """
        options = self.settings.loss
        own = torch.tensor([units_of(batch.batch, options)], dtype=torch.float64)
        units = self.strategy.all_reduce_sum(own).item()
        loss = partial(score_update_loss, options=options, units=units)
        return self.optimizer_step(columns_of(batch), loss, [Output.VALUES], 1.0, prefix="reward/")

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def compute_scores(self, batch: DataProto) -> DataProto:
        """``values`` float32 (B, L); scores are those at ``score_mask``."""
        return DataProto.from_dict(self.strategy.forward(columns_of(batch), [Output.VALUES]))


def score_update_loss(
    outputs: TensorBatch, batch: TensorBatch, options: RewardLossConfig, units: float
) -> tuple[torch.Tensor, Metrics]:
    """A reward model's loss as a strategy's :class:`~roll.strategies.base.LossFunction`; ``units`` over all ranks."""
    return reward_model_loss(outputs[Output.VALUES], batch, options, units, "reward/")


@dataclass(frozen=True)
class DistillSettings(ModelSettings):
    """The loss of ``student``."""

    loss: DivergenceConfig = field(default_factory=DivergenceConfig)
    weight: float = 0.5
    """Of the divergence; the rest is that of the negative log-likelihood."""


class DistillWorker(SupervisedWorker):
    """``student`` on one rank."""

    settings_class = DistillSettings
    settings: DistillSettings

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + teacher_columns(TEACHER))
    def update(self, batch: DataProto) -> Metrics:
        """Collective. One optimizer step on the mean over the response tokens of all ranks."""
        (denominators,) = self.denominators([batch.batch["response_mask"]])
        loss = partial(distillation_loss, weight=self.settings.weight, denominators=denominators)
        return self.optimizer_step(
            columns_of(batch), loss, [Output.LOG_PROBS], 1.0, prefix="student/", teachers=self.comparisons()
        )

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + teacher_columns(TEACHER))
    def evaluate(self, batch: DataProto) -> Metrics:
        """Collective. The terms of the loss, without gradient."""
        outputs = self.strategy.forward(columns_of(batch), [Output.LOG_PROBS], 1.0, self.comparisons())
        _, metrics = distillation_loss(outputs, batch.batch, self.settings.weight, LossDenominators(1.0, 1.0), "val/")
        return merged_floats([metrics])

    def comparisons(self) -> list[Comparison]:
        options = self.settings.loss
        return [Comparison(TEACHER, options.kd_temperature, partial(options_divergence, options))]


def distillation_loss(
    outputs: TensorBatch, batch: TensorBatch, weight: float, denominators: LossDenominators, prefix: str = "student/"
) -> tuple[torch.Tensor, Metrics]:
    """(1 - w) NLL + w divergence, each a token mean, as a strategy's :class:`~roll.strategies.base.LossFunction`."""
    mask = batch["response_mask"]
    nll = -(outputs[Output.LOG_PROBS] * mask).sum()
    kd = (outputs[f"{TEACHER}/divergence"] * mask).sum()
    total, tokens = (1.0 - weight) * nll + weight * kd, mask.sum()
    sums = {"loss": total, "nll": nll, "kd_loss": kd}
    means: Any = {prefix + name: (value.detach(), tokens) for name, value in sums.items()}
    metrics: Metrics = {name: Mean(*mean) for name, mean in means.items()}
    of_teacher = {name.removeprefix(f"{TEACHER}/"): value for name, value in outputs.items()}
    return total / max(denominators.tokens, 1.0), metrics | comparison_metrics(of_teacher, mask, prefix)
