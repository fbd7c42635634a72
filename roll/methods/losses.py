"""Policy gradients (PPO, GRPO and relatives) and the critic: losses over tokens that the policy has sampled."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from roll.algorithms.aggregation import (
    denominators_from,
    denominators_of,
    group_tokens_of,
    needs_groups,
)
from roll.algorithms.losses import ActorLossOptions, actor_loss, value_loss
from roll.algorithms.policy_losses import LossInputs
from roll.methods.base import MODEL_COLUMNS, POLICY_COLUMNS, Loss, Totals
from roll.protocol.metrics import Metrics, Sum
from roll.strategies.base import Output, TensorBatch

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

# Column, bool (B, L): tokens whose log-probs must be the engine's to the last bit (`strict_on_policy`).
SAME_WEIGHTS = "same_weights"
COMPARED_TOKENS = "actor/strict_on_policy_tokens"
# Text of an error about the first token whose log-probs differ.
UNEQUAL = re.compile(
    r"the log-prob of token (?P<position>\d+) is (?P<trainer>\S+) in the trainer and (?P<engine>\S+) in the engine, in "
    r"the sequence \[(?P<sequence>[\d, ]+)\]"
)


def compare_with_engine(log_probs: Tensor, batch: TensorBatch) -> Metrics:
    """Count the tokens of ``SAME_WEIGHTS``.

    Raises:
        RuntimeError: of one of them ``log_probs`` (B, L) is not what the engine had; in the words of ``UNEQUAL``.
    """
    same, sampled = batch[SAME_WEIGHTS], batch["rollout_log_probs"]
    # Equal, not close: under strict_on_policy trainer and engine run the same kernels.
    different = (same & (log_probs.detach() != sampled)).nonzero()
    if len(different):
        row, position = different[0].tolist()
        sequence = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        own, other = float(log_probs[row, position]), float(sampled[row, position])
        raise RuntimeError(
            f"the log-prob of token {position} is {own!r} in the trainer and {other!r} in the engine, in the sequence "
            f"{sequence}"
        )
    return {COMPARED_TOKENS: Sum(float(same.sum()))}


@dataclass(frozen=True)
class SampledLoss(Loss):
    """A loss over tokens that were sampled, aggregated by modes over tokens, samples or prompts."""

    num_groups: int = 1
    """Prompts of the whole batch, whose rows ``group_ids`` count."""
    norm_length: float | None = None
    """Denominator of the modes that divide by a fixed length."""

    @property
    def modes(self) -> Collection[str | None]:
        """Aggregation modes in use; None: a term that the loss does not have."""
        return ()

    def counts(self, batch: TensorBatch) -> Totals:
        mask = batch["loss_mask"]
        # Modes over prompts need a count of each prompt on every rank; the others save that transfer.
        counts = {"rows": denominators_of(mask, batch.get("sequence_tokens"))}
        if any(mode is not None and needs_groups(mode) for mode in self.modes):
            counts["groups"] = group_tokens_of(mask, batch["group_ids"], self.num_groups)
        return counts


@dataclass(frozen=True)
class PolicyLoss(SampledLoss):
    """The loss of the policy: policy gradient, KL to the reference, entropy; see
    :func:`roll.algorithms.losses.actor_loss`."""

    options: ActorLossOptions = field(default_factory=ActorLossOptions)
    old_is_rollout: bool = False
    """The old log-probs are the engine's."""
    prefix: str = field(default="actor/", kw_only=True)
    columns: ClassVar[tuple[str, ...]] = (*POLICY_COLUMNS, *LOSS_COLUMNS, SAME_WEIGHTS)

    @property
    def modes(self) -> Collection[str | None]:
        options = self.options
        return (options.loss_agg_mode, options.kl_loss_agg_mode, options.entropy_loss_agg_mode)

    @property
    def outputs(self) -> Sequence[Output]:
        wanted = self.options.entropy_loss_coef != 0.0 or self.options.log_entropy
        return (Output.LOG_PROBS, Output.ENTROPY) if wanted else (Output.LOG_PROBS,)

    def inputs(self, outputs: TensorBatch, batch: TensorBatch) -> LossInputs:
        given: Any = {name: batch.get(name) for name in LOSS_COLUMNS if name != "loss_mask"}
        return LossInputs(
            log_probs=outputs[Output.LOG_PROBS],
            entropy=outputs.get(Output.ENTROPY),
            mask=batch["loss_mask"],
            old_is_rollout=self.old_is_rollout,
            **given,
        )

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        compared = compare_with_engine(outputs[Output.LOG_PROBS], batch) if SAME_WEIGHTS in batch else {}
        denominators = denominators_from(totals["rows"], self.norm_length, totals.get("groups"))
        result = actor_loss(self.inputs(outputs, batch), self.options, denominators)
        return result.loss, result.metrics | compared


@dataclass(frozen=True)
class ValueLoss(SampledLoss):
    """The critic's loss; see :func:`roll.algorithms.losses.value_loss`."""

    value_clip: float | None = None
    """Bound of the change of a value in one update."""
    loss_agg_mode: str = "token-mean"
    prefix: str = field(default="critic/", kw_only=True)
    columns = (*MODEL_COLUMNS, "loss_mask", "values", "returns", "group_ids", "sequence_tokens")

    @property
    def modes(self) -> Collection[str | None]:
        return (self.loss_agg_mode,)

    @property
    def outputs(self) -> Sequence[Output]:
        return (Output.VALUES,)

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        result = value_loss(
            values=outputs[Output.VALUES],
            old_values=batch["values"],
            returns=batch["returns"],
            mask=batch["loss_mask"],
            value_clip=self.value_clip,
            loss_agg_mode=self.loss_agg_mode,
            denominators=denominators_from(totals["rows"], self.norm_length, totals.get("groups")),
            group_ids=batch.get("group_ids"),
            sequence_tokens=batch.get("sequence_tokens"),
        )
        return result.loss, result.metrics
