"""``rollout_mock``: a run on another run's rollouts learns exactly what that one learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from roll.config.run import RolloutMockConfig
from roll.datasets import DataError
from roll.pipelines.batches import RecordedRollouts
from roll.protocol import DataProto
from tests.config.good import changed, load
from tests.pipelines.conftest import Run

LEARNT = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "critic/advantages/max", "system/samples")


@pytest.mark.e2e
def test_training_on_recorded_rollouts_is_the_same_training(run: Run, tmp_path: Path) -> None:
    dump = {"rollout_mock": {"enable": True, "mode": "dump", "dump_dir": str(tmp_path)}}
    save = {"actor_train.training_args.save_hf_model": True}
    first = run(dump | save)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "rollout_step_000000.safetensors",
        "rollout_step_000001.safetensors",
    ]
    again = run({"rollout_mock": {**dump["rollout_mock"], "mode": "mock"}} | save)
    for name in LEARNT:
        assert again.values(name) == first.values(name), name
    assert "scheduler/collect_query_count" not in again.steps[0], "nothing was generated"
    weights = [load_file(one.output / "model" / "model.safetensors") for one in (first, again)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


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
