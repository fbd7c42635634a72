"""Rollouts on disk (``rollout_mock``): written by one run, trained on by another that generates nothing."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from roll.datasets.types import DataError
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.planning import recorded_rollouts, rollout_file
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics


class RecordedRollouts:
    """The batches of a run's steps in a folder, one safetensors file a step.

    Args:
        output_dir: of the run; holds the folder where the configuration names none.
        num_samples: rows of a step's batch.
    """

    def __init__(self, config: RLVRConfig, output_dir: Path, num_samples: int) -> None:
        section = config.rollout_mock
        self._folder = recorded_rollouts(config, output_dir)
        self._num_samples = num_samples
        self.writes = section.enable and section.mode == "dump"
        self.replays = section.enable and section.mode == "mock"

    def write(self, step: int, batch: DataProto) -> None:
        """Keep the batch as the rewards have left it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        batch.save(rollout_file(self._folder, step))

    def read(self, step: int) -> tuple[DataProto, Metrics]:
        """The batch that was written for this step, and its size.

        Raises:
            DataError: no such file, one that holds no batch, or one of another size.
        """
        file = rollout_file(self._folder, step)
        if not file.is_file():
            raise DataError(f"{file}: no rollout was written for step {step} (rollout_mock.mode: mock reads it)")
        try:
            batch = DataProto.load(file)
        except (OSError, ValueError, SafetensorError) as error:
            raise DataError(f"{file}: holds no rollout: {error}") from error
        if len(batch) != self._num_samples:
            raise DataError(
                f"{file}: {len(batch)} samples, but rollout_batch_size x num_return_sequences_in_group is "
                f"{self._num_samples}"
            )
        tokens = float(batch.batch["attention_mask"].sum())
        return batch, {"system/samples": Mean(len(batch)), "system/tokens": Mean(tokens)}
