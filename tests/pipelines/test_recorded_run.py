"""``rollout_mock``: what is written of a run is read by another; what that learns: ``test_vision_run.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roll.config.run import RolloutMockConfig
from roll.datasets import DataError
from roll.pipelines.batches import RecordedRollouts
from roll.protocol import DataProto
from tests.config.good import changed, load


def recorded(tmp_path: Path, mode: str) -> RecordedRollouts:
    section = {"enable": True, "mode": mode, "dump_dir": str(tmp_path / "rollouts")}
    config = load(tmp_path, changed({"rollout_mock": section})).config
    assert isinstance(config.rollout_mock, RolloutMockConfig)
    return RecordedRollouts(config, tmp_path)


def test_what_is_written_is_read_and_nothing_else(tmp_path: Path) -> None:
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    batch = DataProto.from_dict(
        {"attention_mask": mask, "scores": torch.tensor([1.0, float("nan"), 0.5])}, non_tensors={"tag": list("abc")}
    )
    writer, reader = recorded(tmp_path, "dump"), recorded(tmp_path, "mock")
    assert (writer.writes, writer.replays, reader.writes, reader.replays) == (True, False, False, True)
    writer.write(4, batch)
    found, metrics = reader.read(4, 3)
    assert torch.equal(found.batch["attention_mask"], mask) and list(found.non_tensor_batch["tag"]) == list("abc")
    assert torch.equal(found.batch["scores"].isnan(), torch.tensor([False, True, False]))
    assert set(metrics) == {"system/samples", "system/tokens"}
    with pytest.raises(DataError, match="no rollout was written for step 5"):
        reader.read(5, 3)
    writer.write(6, batch[:2])
    with pytest.raises(DataError, match="2 samples, but rollout_batch_size x num_return_sequences_in_group is 3"):
        reader.read(6, 3)
    (tmp_path / "rollouts" / "rollout_step_000007.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="holds no rollout"):
        reader.read(7, 3)
