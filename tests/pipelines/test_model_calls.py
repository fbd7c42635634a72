"""Rows are dealt out to ranks by work, in every pass anew, and come back in the order of the batch."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.config.roles import WorkerConfig
from roll.methods.base import LOG_PROBS, PolicyLoss
from roll.models.partitions import workload
from roll.pipelines.model_calls import balanced_order, length_metrics, order_for, start_computing, update_model
from roll.protocol import DataProto
from roll.protocol.metrics import Mean
from roll.workers.model import ModelWorker, TrainWorker


@pytest.mark.long
@given(dp_size=st.integers(1, 4), num_mini=st.integers(1, 3), rows=st.integers(1, 5), data=st.data())
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


def test_groups_and_rows_that_do_not_divide_leave_the_order_alone() -> None:
    for groups in ("aaabbbbc", "aaaabbbb"):  # ragged; larger than a share
        assert balanced_order([1, 9, 1, 9, 5, 6, 7, 8], 4, groups=list(groups)).tolist() == list(range(8))
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


@pytest.mark.parametrize("dp_size", [1, 2])
def test_what_ranks_compute_comes_back_in_the_order_of_the_batch(dp_size: int) -> None:
    ids = torch.arange(48).view(8, 6)
    mask = torch.arange(6) < torch.tensor([6, 6, 5, 5, 1, 2, 1, 1])[:, None]
    batch = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "response_mask": mask, "advantages": torch.rand(8, 6)},
        non_tensors={"prompt_id": list("aabbccdd")},
    )
    seen: list[DataProto] = []

    def call(method: Any, shares: DataProto, ask: Any) -> Any:
        assert method is ModelWorker.forward and ask is LOG_PROBS
        seen.append(shares)
        answer = DataProto.from_dict({"log_probs": shares.batch["input_ids"] * 2.0})
        return SimpleNamespace(result=lambda: answer)

    cluster: Any = SimpleNamespace(dp_size=dp_size, role=WorkerConfig(), call=call)
    assert torch.equal(start_computing(batch, cluster, LOG_PROBS)()["log_probs"], ids * 2.0)
    if dp_size == 2:
        work = seen[0].batch["attention_mask"].view(2, 4, 6).sum((1, 2))
        assert work.max() - work.min() <= 1, "each rank's share in tokens"
        assert set(seen[0].batch.keys()) == {"input_ids", "attention_mask", "response_mask"}


class FakeTrainer:
    """Keeps the samples of each mini-batch of each pass, over all ranks."""

    name = "actor_train"

    def __init__(self, role: WorkerConfig, dp_size: int) -> None:
        self.role, self.dp_size = role, dp_size
        self.passes: list[list[list[int]]] = []

    def call(self, method: Any, shares: DataProto, loss: PolicyLoss, **arguments: Any) -> Any:
        assert method is TrainWorker.step and loss.num_groups == 4
        count, epochs = arguments["mini_batches"], arguments["epochs"]
        ranks = shares.batch["input_ids"][:, 0].view(self.dp_size, count, -1)
        mini_batches = [sorted(ranks[:, mini].flatten().tolist()) for mini in range(count)]
        self.passes += [mini_batches] * epochs
        return SimpleNamespace(result=lambda: {"actor/pg_loss": Mean(float(epochs), 1.0)})


@pytest.mark.parametrize("by_prompt", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_mini_batches_are_drawn_anew_in_every_pass(dp_size: int, by_prompt: bool) -> None:
    rows = torch.arange(16)
    batch = DataProto.from_dict(
        {"input_ids": rows[:, None], "attention_mask": torch.ones(16, 1).bool(), "group_ids": rows // 4},
        non_tensors={"prompt_id": list("aaaabbbbccccdddd")},
    )

    def run(seed: tuple[int, ...] | None) -> list[list[list[int]]]:
        trainer = FakeTrainer(WorkerConfig(use_prefix_sharing=by_prompt), dp_size)
        update_model(batch, trainer, PolicyLoss(), 2, 3, seed)  # type: ignore[arg-type]
        return trainer.passes

    assert run(None) == [[list(range(8)), list(range(8, 16))]] * 3
    shuffled = run((42, 7))
    assert run((42, 7)) == shuffled != run((42, 8))
    assert all(sorted(chain(*mini_batches)) == list(range(16)) for mini_batches in shuffled)
    assert len({str(mini_batches) for mini_batches in shuffled}) > 1
    if by_prompt:
        assert all(len({row // 4 for row in mini}) == 2 for mini_batches in shuffled for mini in mini_batches)
