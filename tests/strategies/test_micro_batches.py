from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.protocol.metrics import Max, Mean, Sum
from roll.strategies.training.micro_batches import fixed_rows, is_empty, merged_floats, micro_batch


def batch(lengths: list[int], width: int) -> dict[str, torch.Tensor]:
    columns = torch.arange(width)
    mask = columns < torch.tensor(lengths, dtype=torch.int64).reshape(-1, 1)
    return {
        "input_ids": columns.expand(len(lengths), width),
        "attention_mask": mask,
        "response_mask": mask & (columns > 0),
        "advantages": torch.rand(len(lengths), width),
        "scores": torch.arange(len(lengths)),
    }


@given(lengths=st.lists(st.integers(0, 9), max_size=12), rows=st.integers(1, 5), padding=st.integers(0, 3))
def test_micro_batches_hold_every_row_once_cut_to_the_longest(lengths: list[int], rows: int, padding: int) -> None:
    whole = batch(lengths, 9 + padding)
    parts = [micro_batch(whole, own) for own in fixed_rows(len(lengths), rows)]
    assert [score for part in parts for score in part["scores"].tolist()] == list(range(len(lengths)))
    for part in parts:
        longest = max(lengths[score] for score in part["scores"].tolist())
        assert {part[name].shape[1] for name in ("input_ids", "attention_mask", "advantages")} == {max(1, longest)}


def test_without_rows_there_is_nothing_to_predict() -> None:
    part = micro_batch(batch([3, 4], 5), range(0))
    assert is_empty(part) and part["input_ids"].shape == (1, 1)
    assert not is_empty(micro_batch(batch([3, 4], 5), [0, 1]))


def test_any_rows_are_cut_to_the_longest_of_them() -> None:
    part = micro_batch(batch([3, 9, 4], 10), [0, 2])
    assert part["scores"].tolist() == [0, 2]
    assert part["input_ids"].shape == part["advantages"].shape == (2, 4)


def test_tensors_in_metrics_become_floats_after_merging() -> None:
    merged = merged_floats(
        [
            {"loss": Mean(torch.tensor(6.0), torch.tensor(2)), "rows": Sum(2.0)},
            {"loss": Mean(torch.tensor(2.0), torch.tensor(2)), "rows": Sum(1.0), "ratio": Max(torch.tensor(1.5))},
        ]
    )
    assert merged == {"loss": Mean(8.0, 4.0), "rows": Sum(3.0), "ratio": Max(1.5)}
    assert all(type(value) is float for value in (merged["loss"].total, merged["ratio"].maximum))  # type: ignore[attr-defined]


def test_rows_per_micro_batch_must_be_positive() -> None:
    with pytest.raises(AssertionError):
        fixed_rows(1, 0)
