"""Pipelines of given rows in this process: their own loop, driver and workers, on a model without context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from roll.pipelines import rows
from roll.pipelines.model_calls import Residency
from roll.pipelines.sample_records import SampleRecorder
from roll.protocol import DataProto
from roll.strategies.base import Output, TensorBatch


class TokenModel:
    """In place of a strategy: the log-prob of a token is a number of its own, whatever stands before it."""

    def __init__(self, seed: int) -> None:
        self.log_prob_of = -torch.rand(1000, generator=torch.Generator().manual_seed(seed))
        self.loaded: list[Path] = []

    def forward(self, batch: TensorBatch, outputs: Any, *_: Any) -> TensorBatch:
        return {Output.LOG_PROBS: self.log_prob_of[batch["input_ids"]] * batch["response_mask"]}

    def backward(self, batch: TensorBatch, loss: Callable[..., Any], outputs: Any, *_: Any) -> Any:
        return loss(self.forward(batch, outputs), batch)[1]

    def optimizer_step(self) -> Any:
        return {}

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def load(self, path: Path) -> None:
        self.loaded.append(path)


class Done:
    """A call that has its answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def result(self) -> Any:
        return self.answer


class Here:
    """A cluster of one worker in this process, and what it was asked.

    Args:
        compute: answers in the worker's place.
    """

    world_size = dp_size = 1

    def __init__(self, name: str, worker: Any = None, compute: Callable[..., Any] | None = None) -> None:
        self.name, self._worker, self._compute = name, worker, compute
        self.asked: list[tuple[str, Any]] = []

    def call(self, method: Any, *args: Any, **keys: Any) -> Done:
        name = method.__name__
        self.asked.append((name, args[0] if args else None))
        if self._compute is not None:
            return Done(self._compute(name, *args, **keys))
        return Done(getattr(self._worker, name)(*args, **keys))

    call_all = call

    def names(self) -> list[str]:
        return [name for name, _ in self.asked]

    def batches(self, name: str) -> Iterator[DataProto]:
        return (given for asked, given in self.asked if asked == name)


def worker_on(worker_class: Any, settings: Any, seed: int) -> Any:
    """A worker as it is, on a :class:`TokenModel`."""
    made = worker_class.__new__(worker_class)
    made.settings, made.strategy = settings, TokenModel(seed)
    return made


def prepare(pipeline: Any, learner: Here, frozen: Here | None = None) -> Any:
    """The pipeline with its data read and clusters of this process, as :meth:`start` leaves it."""
    pipeline.residency = Residency(pipeline.plan, False)
    pipeline.learner, pipeline.frozen = learner, frozen
    pipeline.context.samples = SampleRecorder(None, pipeline.config.sample_log)
    pipeline.load_data()
    return pipeline


def run_here(pipeline: Any, patch: pytest.MonkeyPatch) -> tuple[dict[int, dict[str, float]], list[int]]:
    """The whole loop of a prepared pipeline, without Ray; its validations by steps done, and after how many updates it
    exported the model."""
    context, exported = pipeline.context, list[int]()
    patch.setattr(pipeline, "start", lambda resources: 0)
    patch.setattr(context, "running", lambda: nullcontext())
    patch.setattr(context, "_leave_account", lambda: None)
    patch.setattr(context, "_tracker", MagicMock(), raising=False)
    patch.setattr(context, "_timeline", MagicMock(), raising=False)
    patch.setattr(context, "finish", lambda steps: None)

    def export(learner: Here, *_: Any) -> None:
        exported.append(learner.names().count("step"))

    @contextmanager
    def no_checkpoint(*_: Any) -> Iterator[Path]:
        yield Path()

    patch.setattr(context._checkpoints, "writing", no_checkpoint)
    patch.setattr(rows, "export_model", export)
    pipeline.run()
    return context._validations, exported
