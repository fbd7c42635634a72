"""The two things that travel to a worker: a loss to minimise, and columns to compute.

The driver builds both and sends them along with the rows, so that one class of worker serves every role and algorithm
(:class:`roll.workers.model.TrainWorker`), and a new loss is one class in one file.

The loss of an optimizer step is a sum over all micro-batches and ranks, divided by *global* denominators (tokens, rows,
pairs). So each rank counts its own rows (:meth:`Loss.counts`), the counts are summed over ranks before the first
backward pass, and each micro-batch contributes its share of the whole (:meth:`Loss.__call__`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from roll.models.layouts import TopTokens
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
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

    @abstractmethod
    def counts(self, batch: TensorBatch) -> Totals:
        """This rank's part of the denominators of an optimizer step on ``batch``."""

    @abstractmethod
    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]: ...


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
