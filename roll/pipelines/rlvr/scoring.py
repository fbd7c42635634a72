"""From raw scores to advantages: masks, normalisation, KL in the reward, estimation; with the state they keep."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import torch

from roll.algorithms.advantages import (
    AdvantageInputs,
    AdvantageOptions,
    AdvantageOutputs,
    estimate_advantages,
    resolve_norm_types,
)
from roll.algorithms.batch_watch import BatchWatch
from roll.algorithms.data_metrics import BatchColumns, compute_data_metrics
from roll.algorithms.kl import KLOptions, kl_estimate, make_kl_controller
from roll.algorithms.masked import masked_mean
from roll.algorithms.reward_processing import RewardOptions, RewardPostprocessor, token_level_rewards
from roll.algorithms.sample_selection import SampleMaskOptions, SampleWeightOptions, sample_mask, sample_weights
from roll.config.rlvr import RLVRConfig
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics

logger = logging.getLogger(__name__)


class Scoring:
    """Everything between scores and update that remembers something from step to step."""

    def __init__(self, config: RLVRConfig, norm_types: tuple[str | None, str | None]) -> None:
        self._config = config
        mean_type, std_type = resolve_norm_types(config.adv_estimator, *norm_types)
        self._normalise = RewardPostprocessor(RewardOptions(mean_type, std_type, config.reward_clip))
        self._kl_controller = make_kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self._masks = _options(SampleMaskOptions, config)
        self._weights = _options(SampleWeightOptions, config)
        self._advantages = _options(AdvantageOptions, config)
        self._watch = BatchWatch()

    def __call__(self, batch: DataProto) -> Metrics:
        """Add ``loss_mask``, ``response_level_rewards``, ``token_level_rewards``, ``advantages`` and ``returns`` to
        ``batch`` (and ``sample_weights`` where samples weigh differently); return the metrics of the step's samples.

        Samples without a score take part in nothing, neither in a baseline nor in a mean: their columns are zero."""
        scored = ~batch.batch["scores"].isnan()
        unscored = {"critic/unscored_ratio": Mean(float((~scored).sum()), len(batch))}
        if bool(scored.all()):
            return self._score(batch) | unscored
        part = batch[scored.numpy()]
        metrics = self._score(part)
        for name in part.batch.keys() - batch.batch.keys():
            column = part.batch[name]
            batch.batch[name] = column.new_zeros(len(batch), *column.shape[1:])
            batch.batch[name][scored] = column
        return metrics | unscored

    def _score(self, batch: DataProto) -> Metrics:
        masked = self._add_loss_mask(batch)
        rewarded = self._add_rewards(batch)
        outputs = self._add_advantages(batch)
        return merge_metrics([masked, rewarded, outputs.metrics, _data_metrics(batch, outputs)])

    def _add_loss_mask(self, batch: DataProto) -> Metrics:
        tensors = batch.batch
        scores, group_ids = tensors["scores"], tensors["group_ids"]
        lengths = tensors["response_mask"].sum(-1)
        truncated = _truncated(batch)
        for message in self._watch.observe(scores, truncated):
            logger.warning("%s", message)
        keep, metrics = sample_mask(self._masks, scores, lengths, truncated, group_ids)
        tensors["loss_mask"] = tensors["response_mask"] & keep[:, None]
        weights = sample_weights(self._weights, scores, lengths, group_ids)
        if weights is not None:
            tensors["sample_weights"] = weights
        return metrics

    def _add_rewards(self, batch: DataProto) -> Metrics:
        tensors = batch.batch
        rewards = torch.zeros_like(tensors["scores"])
        metrics: list[Metrics] = []
        domains = batch.non_tensor_batch["domain"]
        for domain in sorted(set(domains)):
            rows = torch.from_numpy(domains == domain)
            rewards[rows], measured = self._normalise(tensors["scores"][rows], tensors["group_ids"][rows], domain)
            metrics.append(measured)
        tensors["response_level_rewards"] = rewards
        kl, kl_coef = None, self._kl_controller.value
        if self._config.add_token_level_kl:
            kl = kl_estimate(
                tensors["old_log_probs"], tensors["ref_log_probs"], KLOptions(estimator=self._config.kl_penalty)
            )
            mean_kl = float(masked_mean(kl, tensors["response_mask"]))
            self._kl_controller.update(mean_kl, num_samples=len(batch))
            metrics.append({"critic/kl": Mean(mean_kl), "critic/kl_coef": Mean(kl_coef)})
        tensors["token_level_rewards"] = token_level_rewards(rewards, tensors["response_mask"], kl, kl_coef)
        return merge_metrics(metrics)

    def _add_advantages(self, batch: DataProto) -> AdvantageOutputs:
        tensors = batch.batch
        scored = ~tensors["scores"].isnan()
        # A sample without a reward is nobody's baseline: it gets a group of its own and no masked token.
        alone = -1 - torch.arange(len(scored))
        inputs = AdvantageInputs(
            token_level_rewards=tensors["token_level_rewards"],
            mask=tensors["response_mask"] & scored[:, None],
            group_ids=torch.where(scored, tensors["group_ids"], alone),
            values=tensors.get("values"),
        )
        outputs = estimate_advantages(inputs, self._advantages)
        tensors["advantages"], tensors["returns"] = outputs.advantages, outputs.returns
        return outputs

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"rewards": self._normalise.state_dict(), "kl": self._kl_controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._normalise.load_state_dict(state["rewards"])
        self._kl_controller.load_state_dict(state["kl"])


def _options(options_class: type[Any], config: RLVRConfig) -> Any:
    """The options whose names are keys of the configuration."""
    names = [option.name for option in fields(options_class) if hasattr(config, option.name)]
    return options_class(**{name: getattr(config, name) for name in names})


def _truncated(batch: DataProto) -> torch.Tensor:
    """bool (B,): responses that were cut off at the length limit."""
    return torch.from_numpy(batch.non_tensor_batch["finish_reason"] == "length")


def _data_metrics(batch: DataProto, outputs: AdvantageOutputs) -> Metrics:
    tensors = batch.batch
    columns = {column.name: tensors.get(column.name) for column in fields(BatchColumns)}
    columns["truncated"] = _truncated(batch)
    columns["raw_advantages"] = outputs.raw_advantages
    return compute_data_metrics(BatchColumns(**columns))
