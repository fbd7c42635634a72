"""Rows are dealt out to ranks by work, and the numbers of a mini-batch do not depend on how."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.models.partitions import workload
from roll.pipelines.model_calls import balanced_order, length_metrics, order_for
from roll.protocol import DataProto


@given(
    dp_size=st.integers(1, 4),
    num_mini=st.integers(1, 3),
    rows=st.integers(1, 5),
    data=st.data(),
)
def test_mini_batches_hold_the_same_rows_for_any_rank_count(
    dp_size: int, num_mini: int, rows: int, data: st.DataObject
) -> None:
    per_mini = rows * dp_size
    total = per_mini * num_mini
    lengths = data.draw(st.lists(st.integers(1, 99), min_size=total, max_size=total))
    order = balanced_order(lengths, dp_size, num_mini)
    ranks = order.reshape(dp_size, num_mini, rows)
    for mini in range(num_mini):
        together = np.sort(ranks[:, mini].reshape(-1))
        assert together.tolist() == list(range(mini * per_mini, (mini + 1) * per_mini))
    if dp_size == 1:
        assert order.tolist() == list(range(total))


def test_ranks_get_nearly_equal_work() -> None:
    lengths = np.random.default_rng(0).integers(100, 8192, 512)
    work = workload(lengths)
    ranks = balanced_order(lengths, 8, num_mini_batches=2).reshape(8, 2, -1)
    for mini in range(2):
        loads = work[ranks[:, mini]].sum(1)
        assert loads.max() / loads.min() < 1.01
        plain = work.reshape(2, 8, -1)[mini].sum(1)
        assert plain.max() / plain.min() > 1.1


def test_rows_behind_one_prompt_stay_together() -> None:
    groups = [f"p{index}" for index in range(16) for _ in range(4)]
    lengths = np.random.default_rng(1).integers(1, 500, 64)
    order = balanced_order(lengths, 2, num_mini_batches=2, groups=groups)
    units = order.reshape(-1, 4)
    assert all(unit.tolist() == list(range(unit[0], unit[0] + 4)) and unit[0] % 4 == 0 for unit in units)
    loads = workload(lengths)[order.reshape(2, 2, 16)].sum(2)
    assert (loads.max(0) / loads.min(0) < 1.25).all()


@pytest.mark.parametrize("groups", [list("aaabbbb" + "c"), list("aaaabbbb")], ids=["ragged", "larger than a share"])
def test_groups_that_do_not_divide_leave_the_order_alone(groups: list[str]) -> None:
    order = balanced_order([1, 9, 1, 9, 5, 6, 7, 8], 4, groups=groups)
    assert order.tolist() == list(range(8))


def test_rows_that_do_not_divide_stay_as_they_are() -> None:
    assert balanced_order([3, 1, 2], 2).tolist() == [0, 1, 2]


def test_batches_are_ordered_by_the_lengths_of_their_rows() -> None:
    mask = torch.arange(8) < torch.tensor([8, 8, 1, 1])[:, None]
    batch = DataProto.from_dict(
        {"attention_mask": mask}, non_tensors={"prompt_id": np.array(["a", "a", "b", "b"], dtype=object)}
    )
    order = order_for(batch, role_shares_prompts=False, dp_size=2)
    assert sorted(mask.sum(1)[order[:2]].tolist()) == [1, 8]
    assert order_for(batch, role_shares_prompts=True, dp_size=2).tolist() in ([0, 1, 2, 3], [2, 3, 0, 1])
    metrics = {name: metric.value() for name, metric in length_metrics(batch, order, "actor_train", 2).items()}
    assert metrics == {
        "global_seqlen/actor_train/mean": 9.0,
        "global_seqlen/actor_train/min": 2.0,
        "global_seqlen/actor_train/max": 16.0,
        "global_seqlen/actor_train/minmax_diff": 14.0,
        "global_seqlen/actor_train/balanced_min": 9.0,
        "global_seqlen/actor_train/balanced_max": 9.0,
    }
