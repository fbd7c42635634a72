"""The two things that travel to a worker: a loss to minimise, and columns to compute. Among the losses are those of
policy gradients (PPO, GRPO and relatives) and of the critic, over tokens that the policy has sampled.

The driver builds both and sends them along with the rows, so that one class of worker serves every role and algorithm
(:class:`roll.workers.model.TrainWorker`), and a new loss is one class in one file.

The loss of an optimizer step is a sum over all micro-batches and ranks, divided by *global* denominators (tokens, rows,
pairs). So each rank counts its own rows (:meth:`Loss.counts`), the counts are summed over ranks before the first
backward pass, and each micro-batch contributes its share of the whole (:meth:`Loss.__call__`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from roll.algorithms.aggregation import denominators_from, denominators_of, group_tokens_of, needs_groups
from roll.algorithms.losses import ActorLossOptions, actor_loss, value_loss
from roll.algorithms.policy_losses import LossInputs
from roll.models.layouts import TopTokens
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, Sum
from roll.protocol.vision import IMAGES
from roll.strategies.base import Comparison, Output, TensorBatch

MODEL_COLUMNS = ("input_ids", "attention_mask", "response_mask", IMAGES)
"""Read by every pass."""
POLICY_COLUMNS = (*MODEL_COLUMNS, str(Output.ROUTES))
"""Columns of the policy, which may replay the experts of its tokens."""

Totals = dict[str, Tensor]
"""Counts, float64, of any shape; summed over ranks."""


@dataclass(frozen=True)
class Loss(ABC):
    """A loss to minimise. It is pickled for every call, so it holds options and numbers, no tensors of rows.

    Called with the outputs of a micro-batch (:class:`~roll.strategies.base.Output` tensors float32 (B, L), with
    gradient), its columns, and the totals of the optimizer step, it returns its share of the step's loss and metrics.
    """

    columns: ClassVar[tuple[str, ...]] = MODEL_COLUMNS
    """Columns of the rows that are sent to the workers; a column that a batch lacks is left out."""
    prefix: str = field(default="", kw_only=True)
    """Begins the names of metrics."""
    temperature: float = field(default=1.0, kw_only=True)
    """Divides the logits."""

    @property
    def outputs(self) -> Sequence[Output]:
        return (Output.LOG_PROBS,)

    @property
    def comparisons(self) -> Sequence[Comparison]:
        """Distributions that the model is compared with, whose columns the rows have."""
        return ()

    def counts(self, batch: TensorBatch) -> Totals:
        """This rank's part of the denominators of an optimizer step on ``batch``; here its response tokens."""
        return {"tokens": batch["response_mask"].sum()}

    @abstractmethod
    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]: ...


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


@dataclass(frozen=True)
class Ask:
    """Columns for a model to compute without gradient: ``outputs``, or the most probable tokens."""

    outputs: tuple[Output, ...] = (Output.LOG_PROBS,)
    temperature: float = 1.0
    without_adapters: bool = False
    """Compute by the base of a LoRA model."""
    top: TopTokens | None = None
    """In place of ``outputs``: :data:`~roll.strategies.base.TOP_COLUMNS` of ``softmax(logits / temperature)``."""
    dtype: str = "fp32"
    """Type of the log-probs of ``top``; the tail's is float32."""


LOG_PROBS, VALUES = Ask(), Ask((Output.VALUES,))
"""``log_probs`` float32 (B, L) of every response token; ``values`` float32 (B, L): a critic's, of the state in which
each response token was sampled, or a reward model's scores."""


@dataclass(frozen=True)
class RoleAsk:
    """Columns that a role computes of a batch before credit is assigned."""

    role: str
    ask: Ask
    phase: str
    """Name of the step's phase; roles of one phase that have no device in common compute at the same time."""
    into: Mapping[str, str] = field(default_factory=dict)
    """Names of the batch's columns by those of the answer."""
    tags: Sequence[str] | None = None
    """Only rows with one of these tags; None: all rows."""
    view: Callable[[DataProto], DataProto] | None = None
    """The rows as the role sees them."""


@dataclass(frozen=True)
class Answer:
    """A role's columns for the rows that it was given."""

    asked: RoleAsk
    rows: Tensor
    """bool (B,)."""
    part: DataProto
    """The rows themselves, a part of the batch."""
    seen: DataProto
    """The same as the role saw them."""
    columns: Mapping[str, Tensor]
