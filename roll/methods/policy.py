"""Policy gradients (PPO, GRPO and relatives) as a method: the columns of each model, credit, and losses.

One training step: reference, policy, teachers and critic compute the columns that something needs; scores become
advantages; policy and critic learn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch

from roll.algorithms.advantages import (
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageOutputs,
)
from roll.algorithms.aggregation import masked_mean, row_mean
from roll.algorithms.kl import EntropyController, KLOptions, finite_mean, kl_estimate, make_kl_controller
from roll.algorithms.losses import actor_loss_options, rejection_mask, weight_scale
from roll.algorithms.metrics import BatchColumns, BatchWatch, compute_data_metrics
from roll.algorithms.samples import (
    RewardOptions,
    RewardPostprocessor,
    overlong_penalty,
    resolve_norm_types,
    sample_mask,
    sample_weights,
    token_level_rewards,
    top_entropy_mask,
)
from roll.config.algorithm import PPOConfig, correction_options
from roll.config.choices import DiscountOptions
from roll.config.reading.fields import Choice
from roll.methods.base import MODEL_COLUMNS, VALUES, Answer, Ask, PolicyLoss, RoleAsk, SampledLoss, ValueLoss
from roll.methods.opd import OPD, TEACHING
from roll.methods.opd import PromptRows as PromptRows  # for the pipelines, which do not name a method that is added
from roll.methods.opd import check_rows as check_rows
from roll.methods.opd_keys import is_taught
from roll.methods.policy_plan import PolicyConfig, PolicyPlan
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics
from roll.rollout.flow import build_filter, response_mask
from roll.strategies.base import Output

logger = logging.getLogger(__name__)


class PolicyMethod:
    """The columns that are computed of the samples, how scores become credit, and the losses of policy and critic.

    What it remembers from step to step (moments of rewards, adaptive coefficients) is in :meth:`state_dict`.

    Args:
        norm_types: ``norm_mean_type`` and ``norm_std_type``, each perhaps ``auto``.
        max_new_tokens: the length limit of a response, which the over-long punishment ends at.
    """

    def __init__(self, config: PolicyConfig, norm_types: tuple[str | None, str | None], max_new_tokens: int) -> None:
        self._config = config
        self._max_new_tokens = max_new_tokens
        mean_type, std_type = resolve_norm_types(config.estimator, *norm_types)
        self._normalise = RewardPostprocessor(RewardOptions(mean_type, std_type, config.reward_clip))
        self._kl_controller = make_kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self._entropy_controller = None
        if config.target_entropy is not None:
            self._entropy_controller = EntropyController(config.entropy_loss_coef, config.target_entropy)
        self.entropy_coef = config.entropy_loss_coef
        """Weight of the entropy bonus in the update of the batch that was scored last."""
        self._loss_options = actor_loss_options(config)
        self._correction = correction_options(config.train_infer_correction)
        self.teaching = OPD(config) if is_taught(config) else None
        # gamma 0: each token is credited with its own divergence alone, which is the gradient of the KL at its state.
        self._ignores_rewards = is_taught(config) and config.is_pure_opd
        credited: PPOConfig = config
        if self._ignores_rewards:
            credited = replace(config, estimator=Choice("reinforce", DiscountOptions(gamma=0.0)))
        self._estimator, self._estimate = credited.estimator, AdvantageEstimator(credited)
        self._watch = BatchWatch(learns_from_scores=not self._ignores_rewards)
        self._response_filters = {
            name: build_filter(section.response_filter_config.type, section.response_filter_config.filter_args)
            for name, section in getattr(config, "rewards", {}).items()
            if section.response_filter_config.type != "no_filter"
        }

    def asks(self, plan: PolicyPlan, temperature: float) -> list[RoleAsk]:
        """The columns that something consumes: log-probs by reference, policy and teachers, values by the critic.

        Args:
            temperature: of sampling.
        """
        asks = []
        if plan.needs_reference:
            # Under LoRA the policy without its adapters is the one that it started from.
            is_policy = "reference" not in plan.roles
            ask = Ask(temperature=temperature, without_adapters=is_policy)
            role = "actor_train" if is_policy else "reference"
            asks.append(RoleAsk(role, ask, "ref_log_probs_values", {Output.LOG_PROBS: "ref_log_probs"}))
        if plan.needs_old_log_probs:
            into: dict[str, str] = {Output.LOG_PROBS: "old_log_probs"}
            if plan.needs_old_entropy:
                into[Output.ENTROPY] = "old_entropy"
            if plan.needs_sum_of_squares:
                into[Output.SUM_OF_SQUARES] = "old_sum_of_squares"
            if self._config.actor_train.router_replay.mode == "R2":
                # R2: the update replays the experts that this pass chose; R3 has those of the engine in the batch
                # already.
                into[Output.ROUTES] = Output.ROUTES
            asks.append(RoleAsk("actor_train", Ask(tuple(map(Output, into)), temperature), "old_log_probs", into))
        if self.teaching is not None:
            # After the old log-probs, which the teachers' log-probs are subtracted from.
            asks += self.teaching.asks(plan, temperature)
        if plan.needs_critic:
            asks.append(RoleAsk("critic", VALUES, "values", {Output.VALUES: "values"}, view=_with_bootstrap))
        return asks

    def receive(self, batch: DataProto, answers: Iterable[Answer], phase: str) -> Metrics:
        """Add the columns of a phase to the batch; return their metrics."""
        if phase == TEACHING:
            assert self.teaching is not None
            return self.teaching.receive(batch, answers)
        for answer in answers:
            for name, column in answer.asked.into.items():
                batch.batch[column] = answer.columns[name]
        return {}

    def losses(self, plan: PolicyPlan, temperature: float) -> dict[str, SampledLoss]:
        """The losses of this step's update by role, in the order of the updates."""
        config, norm_length = self._config, float(plan.norm_length)
        losses: dict[str, SampledLoss] = {}
        if plan.needs_critic:
            losses["critic"] = ValueLoss(
                norm_length=norm_length,
                value_clip=config.value_clip,
                loss_agg_mode=config.value_loss_agg_mode,
            )
        actor = PolicyLoss(
            norm_length=norm_length,
            temperature=temperature,
            options=replace(self._loss_options, entropy_loss_coef=self.entropy_coef),
            old_is_rollout=plan.engine_log_probs_as_old,
        )
        losses["actor_train"] = actor if self.teaching is None else self.teaching.loss(actor)
        return losses

    def credit(self, batch: DataProto) -> Metrics:
        """Add ``loss_mask``, ``response_level_rewards``, ``token_level_rewards``, ``advantages`` and ``returns`` to
        ``batch`` (``sample_weights`` where samples weigh differently, ``policy_mask`` where tokens are chosen by their
        entropy); return the metrics of the step's samples.

        Samples without a score take part in nothing, neither in a baseline nor in a mean: their columns are zero."""
        scored, whole = ~batch.batch["scores"].isnan(), batch
        if not bool(scored.all()):
            batch = whole[scored.numpy()]
        lengths = batch.batch["response_mask"].sum(-1)
        truncated = torch.from_numpy(batch.non_tensor_batch["finish_reason"] == "length")
        used, masked = self._add_loss_mask(batch, lengths, truncated)
        inputs, outputs, rewarded = self.add_advantages(batch, lengths)
        batch.batch["token_level_rewards"] = inputs.token_level_rewards
        for message in self._watch.observe_advantages(outputs.advantages, used, self._config.estimator.name):
            logger.warning("%s", message)
        columns: dict[str, Any] = {column.name: batch.batch.get(column.name) for column in fields(BatchColumns)}
        columns |= {"truncated": truncated, "raw_advantages": outputs.raw_advantages}
        metrics = [masked, rewarded, outputs.metrics, compute_data_metrics(BatchColumns(**columns))]
        if self._entropy_controller is not None:
            entropy = float(masked_mean(batch.batch["old_entropy"], batch.batch["loss_mask"]))
            # Before the update of this batch, whose policy it is the weight for (arXiv 2505.22312, section 3).
            self.entropy_coef = self._entropy_controller.step(entropy, int(batch.batch["loss_mask"].sum()))
            metrics.append({"actor/old_entropy": Mean(entropy), "actor/entropy_coef": Mean(self.entropy_coef)})
        if batch is not whole:
            for name in batch.batch.keys() - whole.batch.keys():
                column = batch.batch[name]
                whole.batch[name] = column.new_zeros(len(whole), *column.shape[1:])
                whole.batch[name][scored] = column
        return merge_metrics(metrics) | {"critic/unscored_ratio": Mean(float((~scored).sum()), len(whole))}

    def _add_loss_mask(
        self, batch: DataProto, lengths: torch.Tensor, truncated: torch.Tensor
    ) -> tuple[torch.Tensor, Metrics]:
        """bool (B,): the responses that the loss uses; ``truncated`` bool (B,), those cut off at the length limit."""
        tensors = batch.batch
        scores, group_ids = tensors["scores"], tensors["group_ids"]
        for message in self._watch.observe(scores, truncated):
            logger.warning("%s", message)
        filtered = None
        if self._response_filters:
            domains = batch.non_tensor_batch["domain"]
            filtered = torch.from_numpy(response_mask(scores.numpy(), domains, self._response_filters))
        keep, metrics = sample_mask(self._config, scores, lengths, truncated, group_ids, filtered)
        mask = tensors["response_mask"]
        tensors["loss_mask"] = mask if bool(keep.all()) else mask & keep[:, None]
        correction = self._correction
        if correction.rejections:
            old, sampled, turns = tensors["old_log_probs"], tensors["rollout_log_probs"], tensors.get("turn_ids")
            kept, rejected = rejection_mask(old, sampled, mask, correction, turns)
            tensors["loss_mask"], metrics = tensors["loss_mask"] & kept, metrics | rejected
        weights = sample_weights(self._config, scores, lengths, group_ids)
        if correction.normalized:
            old, sampled, turns = tensors["old_log_probs"], tensors["rollout_log_probs"], tensors.get("turn_ids")
            scale, scaled = weight_scale(old, sampled, mask, correction, turns)
            weights = scale.expand(len(batch)).clone() if weights is None else weights * scale
            metrics |= scaled
        if weights is not None:
            tensors["sample_weights"] = weights
        if self._config.top_entropy_quantile < 1.0:
            entropy = tensors["old_entropy"]
            chosen = top_entropy_mask(entropy, tensors["loss_mask"], self._config.top_entropy_quantile)
            tensors["policy_mask"] = chosen
            metrics |= {"actor/top_entropy_mean": Mean(float(entropy[chosen].sum()), int(chosen.sum()))}
        return keep, metrics

    def add_advantages(
        self, batch: DataProto, lengths: torch.Tensor
    ) -> tuple[AdvantageInputs, AdvantageOutputs, Metrics]:
        """Add ``response_level_rewards``, ``advantages`` and ``returns``; ``lengths`` int64 (B,), response tokens."""
        rewards, metrics = self._add_rewards(batch, lengths)
        tensors = batch.batch
        penalties = tensors.get("teacher_kl")
        if self._ignores_rewards:
            shape = tensors["response_mask"].shape
            # The divergence becomes the reward itself: as a penalty too it would count twice.
            rewards, penalties = -penalties if penalties is not None else torch.zeros(shape), None
        baseline = None
        if "baseline_scores" in tensors:  # the greedy response's reward, made as a sample's is
            baseline = self._penalised(tensors["baseline_scores"], tensors["baseline_lengths"])
            # Clipped like the samples, or a difference of the two would mix clipped and raw rewards.
            bound = self._config.reward_clip
            baseline = baseline if bound is None else baseline.clamp(-bound, bound)
        inputs = AdvantageInputs(
            rewards=rewards,
            penalties=penalties,
            mask=tensors["response_mask"],
            group_ids=tensors["group_ids"],
            scores=tensors["scores"],
            divides=self._normalise.options.norm_std_type is not None,
            values=tensors.get("values"),
            baseline_rewards=baseline,
            reward_components=tensors.get("reward_components"),
            old_log_probs=tensors.get("old_log_probs"),
            old_sum_of_squares=tensors.get("old_sum_of_squares"),
            **self.more_inputs(batch, rewards),
        )
        outputs = self._estimate(inputs)
        tensors["advantages"], tensors["returns"] = outputs.advantages, outputs.returns
        return inputs, outputs, metrics

    def more_inputs(self, batch: DataProto, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        """Further fields of :class:`AdvantageInputs`, by the ``rewards`` in it."""
        return {}

    def _add_rewards(self, batch: DataProto, lengths: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        """The rewards that advantages are made from: (B,), or (B, L) with a divergence in them."""
        tensors = batch.batch
        shaped = tensors["scores"]
        metrics: list[Metrics] = []
        if self._config.overlong_buffer_length is not None:
            shaped = self._penalised(shaped, lengths)
            penalty = float((tensors["scores"] - shaped).sum())
            metrics.append({"critic/overlong_penalty": Mean(penalty, len(shaped))})
        tensors["response_level_rewards"], rewards, measured = self.normalised(batch, shaped)
        metrics.append(measured)
        if self._config.add_token_level_kl:
            kl_coef = self._kl_controller.value
            options = KLOptions(estimator=self._config.kl_penalty)
            kl = kl_estimate(tensors["old_log_probs"], tensors["ref_log_probs"], options)
            mean_kl = float(masked_mean(kl, tensors["response_mask"]))
            # The controller follows the mean over responses, whatever their lengths, as published ones do.
            mask = tensors["response_mask"]
            self._kl_controller.update(*finite_mean(row_mean(kl, mask), mask.any(-1)))
            metrics.append({"critic/kl": Mean(mean_kl), "critic/kl_coef": Mean(kl_coef)})
            # `token_level_rewards` places a number at the end of its response: rewards that are on tokens are added
            # afterwards.
            at_end, tokens = (rewards, None) if rewards.dim() == 1 else (torch.zeros_like(rewards[:, 0]), rewards)
            rewards = token_level_rewards(at_end, tensors["response_mask"], kl, kl_coef)
            rewards = rewards if tokens is None else rewards + tokens
        return rewards, merge_metrics(metrics)

    def normalised(self, batch: DataProto, shaped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Rewards (B,), normalised within their domain; and the same where they are earned: (B,) at the end of each
        response, or (B, L)."""
        domains, group_ids = batch.non_tensor_batch["domain"], batch.batch["group_ids"]
        names = sorted(set(domains.tolist()))
        if len(names) == 1:
            rewards, measured = self._normalise(shaped, group_ids, names[0])
            return rewards, rewards, measured
        rewards = torch.empty_like(shaped)
        metrics: list[Metrics] = []
        for domain in names:
            rows = torch.from_numpy(domains == domain)
            rewards[rows], measured = self._normalise(shaped[rows], group_ids[rows], domain)
            metrics.append(measured)
        return rewards, rewards, merge_metrics(metrics)

    def _penalised(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Raw scores (B,) less the over-long punishment of responses with ``lengths`` tokens."""
        buffer = self._config.overlong_buffer_length
        if buffer is None:
            return scores
        return scores + overlong_penalty(lengths, self._max_new_tokens, buffer, self._config.overlong_penalty_factor)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        state = {"rewards": self._normalise.state_dict(), "kl": self._kl_controller.state_dict()}
        if self._entropy_controller is not None:
            state["entropy"] = self._entropy_controller.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._normalise.load_state_dict(state["rewards"])
        self._kl_controller.load_state_dict(state["kl"])
        if self._entropy_controller is not None and "entropy" in state:
            self._entropy_controller.load_state_dict(state["entropy"])


def _with_bootstrap(batch: DataProto) -> DataProto:
    """Rows whose values are also wanted where ``bootstrap_mask`` is set, after a response."""
    if "bootstrap_mask" not in batch.batch:
        return batch
    seen = batch.select(
        [name for name in batch.batch.keys() if name in MODEL_COLUMNS],  # noqa: SIM118 (keys() unpacks no column)
        [name for name in batch.non_tensor_batch if name in (*MODEL_COLUMNS, "prompt_id")],
    )
    for name in ("attention_mask", "response_mask"):
        seen.batch[name] = batch.batch[name] | batch.batch["bootstrap_mask"]
    return seen
