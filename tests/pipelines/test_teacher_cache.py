"""What runs leave on disk for others: the teacher's log-probs and columns made of them; rollouts (what is learnt from
them: ``test_vision_run.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from roll.config.reading.errors import ConfigError
from roll.config.roles import ModelArguments
from roll.config.run import RolloutMockConfig
from roll.datasets import DataError
from roll.methods.distill import RowTargets, TeacherCache, columns_from, row_key, rows_of, weights_identity
from roll.pipelines.batches import RecordedRollouts
from roll.protocol import DataProto
from tests.config.good import changed, load

MADE_WITH = {"teacher": "big", "logits_topk": 3}


def targets(tokens: int, seed: int) -> RowTargets:
    random = torch.Generator().manual_seed(seed)
    return {
        "log_probs": -torch.rand(tokens, 3, generator=random).half(),
        "ids": torch.randint(0, 200_000, (tokens, 3), generator=random, dtype=torch.int32),
        "tail": -torch.rand(tokens, generator=random),
    }


def test_rows_come_back_as_they_were_also_from_a_later_process(tmp_path: Path) -> None:
    rows = [(bytes([number]) * 16, targets(number + 1, number)) for number in range(4)]
    cache = TeacherCache(str(tmp_path), MADE_WITH)
    cache.put(rows[:2])
    cache.flush()
    cache.put(rows[1:])
    assert len(cache) == 4 and len(list(tmp_path.glob("shard-*.safetensors"))) == 1
    again = TeacherCache(str(tmp_path), MADE_WITH)
    assert len(again) == 2, "what is not flushed is not there"
    cache.flush()
    for one in (cache, TeacherCache(str(tmp_path), MADE_WITH)):
        for key, wanted in rows:
            found = one.get(key)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(KeyError):
        again.get(rows[3][0])


def test_shards_that_the_index_does_not_name_and_caches_of_something_else(tmp_path: Path) -> None:
    cache = TeacherCache(str(tmp_path), MADE_WITH)
    cache.put([(b"a" * 16, targets(2, 0))])
    cache.flush()
    (tmp_path / "shard-00001.safetensors").write_bytes(b"torn")
    again = TeacherCache(str(tmp_path), MADE_WITH)
    again.put([(b"b" * 16, targets(1, 1))])
    again.flush()
    assert len(TeacherCache(str(tmp_path), MADE_WITH)) == 2
    with pytest.raises(ConfigError, match="was made with logits_topk 3, not 5"):
        TeacherCache(str(tmp_path), MADE_WITH | {"logits_topk": 5})


def test_a_row_is_its_ids_what_counts_of_them_and_its_images() -> None:
    ids, counted = np.array([3, 4, 5]), np.array([False, True, True])
    key = row_key(ids, counted)
    others = [(ids, np.array([False, False, True]), ()), (np.array([3, 4, 6]), counted, ()), (ids, counted, ("x",))]
    assert key == row_key(ids.astype(np.int32), counted)
    assert len({key, *(row_key(*other) for other in others)}) == 4


def test_columns_and_rows_are_each_others_inverse() -> None:
    mask = torch.tensor([[False, True, True, False], [False, False, True, True], [False, True, False, False]])
    rows = [targets(int(own.sum()), number) for number, own in enumerate(mask)]
    columns = columns_from(rows, mask)
    assert columns["top_ids"].shape == (3, 4, 3) and not columns["tail_log_prob"][~mask].any()
    for (_, found), wanted in zip(rows_of(columns, mask, [b""] * 3), rows, strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_teacher_is_known_by_its_weights(tmp_path: Path) -> None:
    def folder(name: str, seed: int) -> Path:
        torch.manual_seed(seed)
        (tmp_path / name).mkdir(exist_ok=True)
        save_file({"w": torch.randn(8, 8)}, tmp_path / name / "model.safetensors")
        return tmp_path / name

    def identity(path: Path, **changes: Any) -> str:
        return json.dumps(weights_identity(str(path), ModelArguments(**changes)))

    first = identity(folder("teacher", 0))
    assert identity(folder("copy", 0)) == first, "the same weights under another path"
    assert identity(folder("teacher", 1)) != first, "replaced in place"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"1")
    adapted = identity(folder("teacher", 0), adapter_name_or_path=str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"2")
    others = [
        identity(folder("teacher", 0), adapter_name_or_path=str(tmp_path / "adapter")),
        identity(folder("teacher", 0), dtype="fp32"),
        identity(folder("teacher", 0), model_config_kwargs={"rope_theta": 1.0}),
    ]
    assert len({first, adapted, *others}) == 5
    weights = torch.zeros(64, 1024)
    other = weights.clone()
    other[40, 3] = 1.0

    def pickled(name: str, config: dict[str, Any], weights: torch.Tensor) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        torch.save({"w": weights}, tmp_path / name / "pytorch_model-00001-of-00001.bin")
        return identity(tmp_path / name)

    first = pickled("pickled", {"rope_theta": 1e4, "_name_or_path": "a"}, weights)
    assert str(tmp_path) not in first
    assert pickled("again", {"_name_or_path": "b", "rope_theta": 1e4}, weights) == first
    changed = [pickled("again", {"rope_theta": 1e6}, weights), pickled("again", {"rope_theta": 1e4}, other)]
    assert len({first, *changed}) == 3, "known by its configuration and by weights of other formats"


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
