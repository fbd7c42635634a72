"""DataProto files: what is saved comes back, nothing in a file is executed, a half-written file replaces nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file

from roll.protocol import DataProto
from tests.protocol.batches import EXAMPLES, batches


@EXAMPLES
@given(data=batches())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, data: DataProto) -> None:
    path = tmp_path_factory.getbasetemp() / "data.safetensors"
    data.save(path)
    assert DataProto.load(path).equals(data)


def test_objects(tmp_path: Path) -> None:
    values = [
        {"role": "user", "content": "größer ∑ \U0001f600 \x00 \ud83d"},
        ("a", (1, [2.5])),
        b"\x00\xff",
        {1: "int key", "$tuple": [1], ("x", 2): None},
        np.float32(0.1),
        np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
        np.array([None, "x", [1]], dtype=object),
        torch.randn(2, 3, dtype=torch.bfloat16),
        [float("inf"), float("nan"), -0.0, 2**80, True],
        {"$odd": 1},
        {},
    ]
    base = torch.arange(33).view(11, 3)
    columns = {"z": base, "a": base, "view": base[:, 1:]}  # they share memory
    data = DataProto.from_dict(columns, {"value": values}, {"when": {"step": 3, "sizes": (1, 2)}})
    data.save(tmp_path / "objects")
    loaded = DataProto.load(tmp_path / "objects")
    assert loaded.equals(data) and list(loaded.batch) == ["z", "a", "view"]
    assert type(loaded.meta_info["when"]["sizes"]) is tuple
    loaded.non_tensor_batch["value"][5][0, 0] = 9  # arrays are writable


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of what it cannot hold, which is named; other files are refused."""
    path = tmp_path / "data"
    DataProto({"x": torch.ones(1)}).save(path)

    def full_disk(tensors: object, filename: str, metadata: object) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError("no space left on device")

    bad = DataProto.from_dict({"x": torch.zeros(1)}, {"env": [{"state": object()}]})
    with pytest.raises(TypeError, match=r"non_tensor_batch\['env'\]\['state'\] holds a object"):
        bad.save(path)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space left"):
        patched.setattr("safetensors.torch.save_file", full_disk)
        DataProto({"x": torch.zeros(1)}).save(path)
    assert DataProto.load(path).batch["x"].item() == 1
    assert [file.name for file in tmp_path.iterdir()] == ["data"]
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is no DataProto file: its format is None"):
        DataProto.load(tmp_path / "model.safetensors")
