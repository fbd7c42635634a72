"""Methods that learn from given rows (SFT, preferences, reward models, distillation).

A method reads its rows, makes batches of them, adds the columns that other models compute, and names the loss; it also
says what is measured on held-out rows. The run is the same for all: :class:`roll.pipelines.rows.RowsPipeline`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np

from roll.config.loader import LoadedConfig
from roll.config.roles import DataArguments
from roll.datasets.preparation import StreamedEpochs
from roll.datasets.sampling import PreparedRows
from roll.datasets.types import SftRow
from roll.datasets.vision_model import VisionModel
from roll.methods.base import LOG_PROBS, Ask, Loss
from roll.methods.supervised import SupervisedConfig, SupervisedPlan
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics, to_floats
from roll.protocol.vision import IMAGES, VisionInputs
from roll.rollout.groups import token_columns
from roll.strategies.base import ModelHead, TensorBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)
RowT = TypeVar("RowT")
Completion = Callable[[], Metrics]
"""Waits for columns of the frozen model and adds them to their batch; returns metrics of the step."""


class Models(Protocol):
    """The models of a run, as its method sees them. None of these calls computes a gradient."""

    @property
    def pad_token_id(self) -> int:
        """Fills rows up."""

    @property
    def frozen(self) -> object | None:
        """Workers of the role that never learns; None: it has none of its own."""

    def forward(self, batch: DataProto, ask: Ask = LOG_PROBS) -> TensorBatch:
        """Columns that the learner computes with its present weights."""

    def measure(self, batch: DataProto, loss: Loss) -> Metrics:
        """Metrics of the learner's loss."""

    def begin_frozen(self, batch: DataProto, ask: Ask = LOG_PROBS) -> Callable[[], TensorBatch]:
        """Start to compute columns by the frozen model; without one, by the learner less its adapters. The result waits
        for them. Dead workers are replaced once."""

    def parts(self, rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Consecutive slices of as many rows as the learner's ranks compute together without gradient."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the block as ``time/<name>``."""

    def record(self, metrics: Metrics) -> None:
        """Add metrics to the current step."""


class RowMethod(ABC, Generic[ConfigT, RowT]):
    """An algorithm on given rows."""

    head: ClassVar[ModelHead] = ModelHead.CAUSAL_LM
    frozen_role: ClassVar[str | None] = None
    """The role whose model never learns."""
    stream: ClassVar[str]
    """Name of the order in which rows are drawn, part of its seeds."""
    state_key: ClassVar[str]
    """Name of the rows' state in checkpoints."""
    dropped_metric: ClassVar[str | None] = None
    """Counts the rows that were too long or bad."""
    samples: ClassVar[Literal["demonstrations", "pairs"] | None] = None
    """The form in which reports show the rows."""
    evaluates_at_end: ClassVar[bool] = True
    """Evaluate the final weights, unless an evaluation follows the last step anyway."""
    steps_in_flight: ClassVar[int] = 1
    """More than 1: workers find the next batch waiting when they finish one. Only where no column depends on the
    learner's present weights."""

    def __init__(self, loaded: LoadedConfig[ConfigT]) -> None:
        self.loaded = loaded
        self.config = loaded.config
        assert isinstance(loaded.plan, SupervisedPlan)
        self.plan = loaded.plan
        (self.role,) = self.plan.training
        """The role that learns."""

    @property
    @abstractmethod
    def loss(self) -> Loss:
        """Minimised by the learner."""

    def open(self) -> None:
        """Look at what the hub has brought, before any process starts.

        Raises:
            ConfigError: models that do not go together.
        """

    # Rows

    @classmethod
    @abstractmethod
    def data_set(cls, config: ConfigT) -> Callable[..., PreparedRows[RowT]]:
        """The ``build`` of the data set class, with the settings that only this method has."""

    @classmethod
    def read(
        cls, config: ConfigT, plan: SupervisedPlan, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase
    ) -> PreparedRows[RowT]:
        """One set, rendered as the configuration says."""
        (learner,) = plan.training
        role = plan.roles[learner]
        return cls.data_set(config)(
            data_args,
            tokenizer,
            config.sequence_length,
            global_template=config.global_template,
            vision=VisionModel.load(str(role.model_path), tokenizer, role.section.model_args.trust_remote_code),
        )

    def stream_of_rows(self, tokenizer: PreTrainedTokenizerBase) -> StreamedEpochs | None:
        """The training set, prepared as it is drawn; None: :meth:`read` prepares it at the start."""
        return None

    # A step

    def lengths(self, rows: Sequence[RowT]) -> list[int] | None:
        """Tokens of each row, by which rows are dealt out to ranks; None: :meth:`batch` does that."""
        return None

    @abstractmethod
    def batch(self, rows: Sequence[RowT], pad: int, ranks: int = 1) -> DataProto:
        """The rows as tensors, right-padded.

        Args:
            ranks: each gets an equal share of consecutive rows of the batch.
        """

    def request(self, rows: Sequence[RowT], batch: DataProto, models: Models, of_set: str) -> Completion | None:
        """Start to compute the columns of the frozen model.

        Args:
            of_set: ``train`` or ``validation``.

        Returns:
            None: the batch has them, or needs none.
        """
        return None

    def add_estimates(self, rows: Sequence[RowT], batch: DataProto, models: Models) -> None:
        """Add columns that come from other samples than the batch's own.

        Args:
            rows: as they were drawn.
        """

    def add_own_columns(self, batch: DataProto, models: Models) -> None:
        """Add the columns that depend on the learner's present weights."""

    # Held-out rows

    def held_out_batch(self, rows: Sequence[RowT], models: Models) -> DataProto:
        """The rows with the columns of the frozen model."""
        batch = self.batch(rows, models.pad_token_id)
        complete = self.request(rows, batch, models, "validation")
        if complete is not None:
            complete()
        return batch

    def measure(self, rows: Sequence[RowT], models: Models) -> dict[str, float]:
        """The metrics of all held-out rows under the present weights: those of the loss, each weighted by what it is a
        mean over."""
        loss = replace(self.loss, prefix="val/")
        parts = (self.held_out_batch(part, models) for part in models.parts(rows))
        return to_floats(merge_metrics([models.measure(batch, loss) for batch in parts]))

    # Files

    def flush(self) -> None:
        """Write what the method keeps beside checkpoints and the trained model."""

    def facts(self, training: Sequence[RowT], held_out: Sequence[RowT], models: Models) -> dict[str, Any] | None:
        """Further entries of the trained model's ``config.json``."""
        return None


def image_column(images: Sequence[VisionInputs | None]) -> dict[str, Any]:
    """The column ``images`` of a batch, one entry a row; none where no row has some."""
    return {} if all(inputs is None for inputs in images) else {IMAGES: images}


def demonstration_batch(rows: Sequence[SftRow], pad: int) -> DataProto:
    """One row a demonstration, right-padded: ``input_ids`` int64, ``attention_mask``, ``response_mask`` bool (B, L);
    and ``images`` where a row has some."""
    lengths = np.array([len(row.input_ids) for row in rows])
    ids, mask = (np.concatenate([getattr(row, name) for row in rows]) for name in ("input_ids", "response_mask"))
    return DataProto.from_dict(token_columns(lengths, ids, mask, pad), image_column([row.vision for row in rows]))
