"""Batches on disk: those of the steps that ``dump_batches`` names, and of steps whose loss or gradient was not finite.

A file holds the batch as the models got it, the state of the driver before the step, and the metrics of the step, so
that ``roll replay`` can compute them again and say which differ.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from roll.config.run import PolicyRunConfig
from roll.datasets import DataError
from roll.distributed.failures import NotFinite
from roll.methods.policy_plan import rollout_file
from roll.protocol import DataProto
from roll.protocol.columns import object_array
from roll.protocol.metrics import Mean, Metrics
from roll.protocol.vision import IMAGES, VisionInputs

logger = logging.getLogger(__name__)

FOLDER = "batches"
MOST_NOT_FINITE = 20  # files of a run for batches that were not finite: of a broken model every batch is one
_RECORD = "recorded"
_SKIPPED, _SCALE = "skipped_updates", "loss_scale"


@dataclass(frozen=True)
class RecordedBatch:
    """A batch with what belongs to it."""

    pipeline: str  # name of the pipeline
    step: int
    batch: DataProto
    state: dict[str, Any] = field(default_factory=dict)  # state of the driver before the step
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the step

    def save(self, file: Path) -> None:
        """Write the file; OSError: it could not be written, and no part of it remains."""
        file.parent.mkdir(parents=True, exist_ok=True)
        batch = stored_images(self.batch)
        facts = {"pipeline": self.pipeline, "step": self.step, "state": self.state, "metrics": self.metrics}
        batch.meta_info = {**batch.meta_info, _RECORD: facts}
        batch.save(file)

    @classmethod
    def load(cls, file: Path) -> RecordedBatch:
        """The batch in a file; DataError: there is no such file, or one that holds something else."""
        batch = load_batch(file)
        facts = batch.meta_info.pop(_RECORD, None)
        if facts is None:
            raise DataError(f"{file}: a batch without the metrics of its step; dump_batches writes files with them")
        return cls(batch=batch, **facts)


@dataclass
class BatchRecorder:
    """Holds the batch of the step in flight, and writes it every so many steps (``dump_batches``), or when a number was
    not finite."""

    folder: Path
    pipeline: str
    every: int  # steps between files (``dump_batches``); 0: none but those that are not finite
    on_nonfinite: str
    held: RecordedBatch | None = None
    num_not_finite: int = 0

    def hold(self, step: int, batch: DataProto, state: Mapping[str, Any]) -> None:
        """Keep the columns that ``batch`` has now, without those added later, and the driver's ``state`` before it."""
        self.held = RecordedBatch(self.pipeline, step, batch.select(), dict(state))

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the batch held, if its time has come or a number was not finite. Raises ``NotFinite``: a loss or
        gradient was not finite, and ``on_nonfinite`` does not let the run continue as it is."""
        held, self.held = self.held, None
        # Skipped updates by which the loss scale of fp16 is found do not count. At a scale of 1 nothing is left to
        # lower: the update itself was not finite.
        scaling = any(name.endswith(_SCALE) and value > 1 for name, value in metrics.items())
        bad = metrics.get(_SKIPPED, 0) > 0 and not scaling
        due = bool(self.every) and step % self.every == 0
        where = ""
        if held is not None and (due or (bad and self.num_not_finite < MOST_NOT_FINITE)):
            file = self.folder / f"step-{step:06d}.safetensors"
            try:
                replace(held, metrics=dict(metrics)).save(file)
                where = f"; its batch is in {file}"
            except OSError as error:  # a full disk ends no run
                logger.error("the batch of step %d was not written: %s", step, error)
        if not bad:
            return
        self.num_not_finite += 1
        text = f"step {step}: a loss or gradient was not finite, and the models did not learn from it{where}"
        if self.on_nonfinite == "skip":
            logger.warning("%s (on_nonfinite: skip)", text)
            return
        raise NotFinite(f"{text} (on_nonfinite: {self.on_nonfinite})", rewinds=self.on_nonfinite == "rewind")


def load_batch(file: Path) -> DataProto:
    """The batch in a file; DataError: there is no such file, or one that holds no batch."""
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    try:
        batch = DataProto.load(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{file}: holds no rollout: {error}") from error
    if IMAGES in batch.meta_info:
        images = [VisionInputs.from_plain(one) for one in batch.meta_info.pop(IMAGES)]
        rows = [None if index is None else images[index] for index in batch.non_tensor_batch[IMAGES]]
        batch.non_tensor_batch[IMAGES] = object_array(IMAGES, rows)
    return batch


def stored_images(batch: DataProto) -> DataProto:
    """The batch with the images of each prompt once, as plain values; :func:`load_batch` undoes it."""
    batch = batch.select()
    images = batch.non_tensor_batch.get(IMAGES)
    if images is not None:
        # By identity: the samples of a prompt share one object.
        distinct = {id(one): one for one in images if one is not None}
        place = {name: index for index, name in enumerate(distinct)}
        batch.non_tensor_batch[IMAGES] = object_array(IMAGES, [place.get(id(one)) for one in images])
        batch.meta_info = {**batch.meta_info, IMAGES: [one.to_plain() for one in distinct.values()]}
    return batch


class RecordedRollouts:
    """The batches of a run's steps (``rollout_mock``), one safetensors file a step; in ``output_dir`` where the
    configuration names no folder."""

    def __init__(self, config: PolicyRunConfig, output_dir: Path) -> None:
        section = config.rollout_mock
        self._folder = Path(section.dump_dir).expanduser() if section.dump_dir else output_dir / "rollouts"
        self.writes = section.enable and section.mode == "dump"
        self.replays = section.enable and section.mode == "mock"

    def write(self, step: int, batch: DataProto) -> None:
        """Keep the batch as the rewards have left it; one that the disk has no room for is lost, which is logged."""
        file = rollout_file(self._folder, step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            stored_images(batch).save(file)
        except OSError as error:
            logger.error("rollout_mock: %s was not written; the run goes on: %s", file, error)

    def read(self, step: int, num_samples: int | None) -> tuple[DataProto, Metrics]:
        """The batch that was written for this step, and its size; DataError: no such file, one that holds no batch, or
        one of another size than ``num_samples`` (None: any)."""
        file = rollout_file(self._folder, step)
        if not file.is_file():
            raise DataError(f"{file}: no rollout was written for step {step} (rollout_mock.mode: mock reads it)")
        batch = load_batch(file)
        if num_samples is not None and len(batch) != num_samples:
            raise DataError(
                f"{file}: {len(batch)} samples, but rollout_batch_size x num_return_sequences_in_group is {num_samples}"
            )
        tokens = float(batch.batch["attention_mask"].sum())
        return batch, {"system/samples": Mean(len(batch)), "system/tokens": Mean(tokens)}
