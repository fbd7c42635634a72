"""Pieces of tensors in the files of several ranks give any elements of the whole ones, or say what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from roll.checkpoint import CheckpointDamagedError
from roll.checkpoint.tensors import FOLDER, WEIGHT, Piece, Pieces, stored_tensors

WHOLE = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)
RANGES = [(begin, end) for begin in range(43) for end in range(begin, 43)]


def columns(left: int, right: int, first: int = 0, last: int = 7) -> Piece:
    tensor = WHOLE[first:last, left:right]
    return Piece("w", {WEIGHT: tensor, "exp_avg": -tensor}, first * 6 + left, 6, updates=3)


def run(begin: int, end: int) -> Piece:
    tensor = WHOLE.flatten()[begin:end]
    return Piece("w", {WEIGHT: tensor, "exp_avg": -tensor}, begin, updates=3)


@pytest.mark.parametrize(
    "ranks",
    [
        [[run(0, 42)]],
        [[run(0, 17)], [run(17, 20)], [run(20, 42)]],
        [[columns(0, 2)], [columns(2, 5), columns(5, 6)]],
        [[columns(0, 4, 0, 3), run(18, 30)], [columns(4, 6, 0, 3), run(30, 42)]],
    ],
)
def test_any_elements_come_out_of_any_pieces(tmp_path: Path, ranks: list[list[Piece]]) -> None:
    for rank, pieces in enumerate(ranks):
        Pieces(pieces, {"bias": torch.arange(3)} if rank == 0 else None).write(tmp_path, rank)
    with stored_tensors(tmp_path) as stored:
        assert stored.updates("w") == 3 and stored.has("exp_avg", "w") and not stored.has("exp_avg_sq", "w")
        assert torch.equal(stored.buffers()["bias"], torch.arange(3)), "in its own type"
        for begin, end in RANGES:
            assert torch.equal(stored.read(WEIGHT, "w", begin, end), WHOLE.flatten()[begin:end]), (begin, end)
        assert torch.equal(stored.read("exp_avg", "w", 1, 40), -WHOLE.flatten()[1:40])


def test_missing_elements_are_named(tmp_path: Path) -> None:
    Pieces([run(0, 17)]).write(tmp_path, 0)
    with stored_tensors(tmp_path) as stored:
        with pytest.raises(CheckpointDamagedError, match=r"has 7 of the elements 10 to 20 of weight/w; files are"):
            stored.read(WEIGHT, "w", 10, 20)
        with pytest.raises(CheckpointDamagedError, match="has 0 of the elements"):
            stored.read(WEIGHT, "other", 0, 1)
    (tmp_path / FOLDER / "rank00001.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointDamagedError, match="cannot be read"), stored_tensors(tmp_path):
        pass
    save_file({"x": WHOLE}, tmp_path / FOLDER / "rank00001.safetensors")
    with (
        pytest.raises(CheckpointDamagedError, match=r"rank00001\.safetensors does not say which"),
        stored_tensors(tmp_path),
    ):
        pass
