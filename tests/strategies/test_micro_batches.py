"""Every row is in one micro-batch, budgets hold, and all ranks make the same number of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.config.plan.plan import MicroBatching
from roll.models import patterns
from roll.models.layouts import packed_layout, tree_layout
from roll.protocol.metrics import Max, Mean, Sum
from roll.strategies.base import TensorBatch
from roll.strategies.training import micro_batches
from roll.strategies.training.micro_batches import (
    SHARING,
    divide,
    fixed_rows,
    is_empty,
    lay_out,
    merged_floats,
    micro_batch,
    plan_micro_batches,
)
from tests.strategies.samples import make_turns

LONGEST = 12


def batch(lengths: list[int], prompts: list[int] | None = None, width: int = LONGEST) -> TensorBatch:
    """Rows of the given lengths; a row's prompt is its first token, ``prompts[i]``, and the rest its response."""
    columns = torch.arange(width)
    mask = columns < torch.tensor(lengths, dtype=torch.int64).reshape(-1, 1)
    ids = columns.expand(len(lengths), width).clone()
    if prompts is not None:
        ids[:, 0] = torch.tensor(prompts)
    return {"input_ids": ids, "attention_mask": mask, "response_mask": mask & (columns > 0)}


def itself(count: int) -> int:
    return count


rules = st.one_of(
    st.builds(MicroBatching, rows=st.integers(1, 5), removes_padding=st.booleans()),
    st.builds(
        MicroBatching,
        rows=st.just(1),
        removes_padding=st.booleans(),
        max_tokens=st.integers(16, 60),
        width_multiple=st.sampled_from([1, 4, 8]),
    ),
    st.builds(
        MicroBatching,
        rows=st.just(1),
        removes_padding=st.just(True),
        max_tokens=st.one_of(st.none(), st.integers(LONGEST, 60)),
        balances=st.just(True),
        min_count=st.integers(1, 6),
    ),
)


@given(lengths=st.lists(st.integers(1, LONGEST), max_size=20), rule=rules, shares=st.booleans(), more=st.integers(0, 3))
def test_every_row_once_within_the_budget(lengths, rule, shares, more):
    whole = batch(lengths, [row // 3 for row in range(len(lengths))])
    plan = plan_micro_batches(whole, rule, lambda count: count + more, shares)
    assert sorted(chain(*plan)) == list(range(len(lengths)))
    assert all(list(rows) == sorted(rows) for rows in plan)
    if rule.balances:
        assert len(plan) >= min(rule.min_count, len(lengths))
    for rows in plan:
        if rule.max_tokens is None or not rows:
            continue
        own = [lengths[row] for row in rows]
        if shares:
            prompts = {int(whole["input_ids"][row, 0]) for row in rows if lengths[row] > 1}
            assert sum(length - 1 for length in own) + len(prompts) <= rule.max_tokens
        elif rule.removes_padding:
            assert sum(own) <= rule.max_tokens
        else:
            width = -(-max(own) // rule.width_multiple) * rule.width_multiple
            assert len(own) * width <= rule.max_tokens


@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=20),
    rule=rules,
    prompts=st.booleans(),
    ranks=st.sampled_from([2, 3, 4, 6]),
    sharing=st.sampled_from([0.0, SHARING, 1e3]),
)
def test_divided_micro_batches_hold_every_row_once_within_a_ranks_budget(lengths, rule, prompts, ranks, sharing):
    whole = batch(lengths, [row // 3 for row in range(len(lengths))])
    for rows in plan_micro_batches(whole, rule, itself, prompts):
        part = micro_batch(whole, rows)
        width = -(-part["input_ids"].shape[1] // rule.width_multiple) * rule.width_multiple
        with mock.patch.object(micro_batches, "SHARING", sharing):
            shares = divide(part, rule, ranks, prompts)
        assert len(shares) == ranks
        sharers = [(own, len(list(same))) for own, same in groupby(shares)]
        assert sorted(chain(*(own for own, _ in sharers))) == list(range(len(rows)))
        first = 0
        for own, count in sharers:
            # So that those who share are one of the groups of `count` consecutive ranks.
            assert ranks % count == first % count == 0
            first += count
            share = {name: column[own] for name, column in part.items()}
            tokens = lay_out(share, rule, prompts).input_ids.numel()
            assert count == ranks or tokens <= (rule.max_tokens or len(rows) * width) * count / ranks
        if not prompts and rule.removes_padding:
            times = [sum(seconds(lengths[rows[row]], sharing, count) for row in own) for own, count in sharers]
            together = sum(seconds(lengths[row], sharing, ranks) for row in rows)
            assert max(times) <= together * (1 + 1e-9)
            assert sharing or len(sharers) == 1 or max(times) == pytest.approx(together)


def seconds(length: int, sharing: float, ranks: int) -> float:
    """By the words of :func:`divide`, for a row of which the last token is computed as well."""
    return (24576 * length * (1 + sharing * (1 - 1 / ranks)) + length**2) / ranks


def test_long_rows_stay_shared_and_short_ones_do_not():
    rule = MicroBatching(rows=1, removes_padding=True, max_tokens=24)
    assert divide(batch([12, 6, 6]), rule, 4, False) == [[0], [0], [1], [2]]
    assert divide(batch([12, 12]), rule, 4, False) == [[0], [0], [1], [1]]
    assert divide(batch([12, 2, 2]), rule, 4, False) == [[0, 1, 2]] * 4  # two ranks would wait for two others
    assert divide(batch([6, 6, 6, 5]), rule, 4, False) == [[0], [2], [1, 3], [1, 3]]
    assert divide(batch([6, 6, 6, 2]), rule, 4, False) == [[0, 1, 2, 3]] * 4


@given(lengths=st.lists(st.integers(2, LONGEST), max_size=10), rule=rules, shares=st.booleans(), more=st.integers(0, 3))
def test_compared_rows_stay_together(lengths, rule, shares, more):
    rule = replace(rule, max_tokens=rule.max_tokens and 2 * rule.max_tokens)
    pairs = [length for one in lengths for length in (one, max(2, one - 3))]
    whole = batch(pairs, [row // 2 for row in range(len(pairs))])
    whole["unit_ids"] = torch.arange(len(lengths)).repeat_interleave(2)
    plan = plan_micro_batches(whole, rule, lambda count: count + more, shares)
    assert sorted(chain(*plan)) == list(range(len(pairs)))
    for rows in plan:
        assert [row for row in rows if row % 2 == 0] == [row - 1 for row in rows if row % 2]
        if rule.max_tokens is None:
            assert rule.balances or len(rows) <= 2 * rule.rows
        elif rows:
            common = shares * len(rows) // 2
            packs = shares or rule.removes_padding
            width = -(-max(pairs[row] for row in rows) // rule.width_multiple) * rule.width_multiple
            assert (sum(pairs[row] for row in rows) - common if packs else len(rows) * width) <= rule.max_tokens


def test_pairs_that_do_not_fit_are_named():
    whole = batch([9, 8], [1, 1]) | {"unit_ids": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"max_tokens_per_microbatch_\* of 18 would do"):
        plan_micro_batches(whole, MicroBatching(rows=1, max_tokens=17), itself)


def test_rows_of_like_lengths_come_together_and_packs_have_like_work():
    rule = MicroBatching(rows=1, max_tokens=24, width_multiple=4)
    plan = plan_micro_batches(batch([12, 2, 11, 3, 4, 1, 12]), rule, itself)
    assert plan == [[0, 6], [2, 4], [1, 3, 5]]
    rule = MicroBatching(rows=1, removes_padding=True, max_tokens=16, balances=True, min_count=3)
    lengths = [12, 4, 5, 5, 6, 3, 3, 4]
    plan = plan_micro_batches(batch(lengths), rule, itself)
    # First fit would fill the first two: 16, 16, 10.
    assert sorted(sum(lengths[row] for row in rows) for rows in plan) == [13, 14, 15]


def test_a_rank_makes_as_many_packs_as_the_one_with_most():
    rule = MicroBatching(rows=1, removes_padding=True, max_tokens=40, balances=True)
    plan = plan_micro_batches(batch([4] * 8), rule, lambda count: 4)
    assert [len(rows) for rows in plan] == [2, 2, 2, 2]
    plan = plan_micro_batches(batch([4]), rule, lambda count: 3)
    assert [len(rows) for rows in plan] == [1, 0, 0]


def test_rows_behind_one_prompt_come_together():
    rule = MicroBatching(rows=1, removes_padding=True, max_tokens=12)
    plan = plan_micro_batches(batch([5, 5, 4, 4, 5, 5], [1, 1, 2, 2, 3, 3]), rule, itself, shares_prompts=True)
    assert sorted(map(list, plan)) == [[0, 1], [2, 3], [4, 5]]


def test_turns_of_an_episode_come_together():
    """Three episodes of four turns; a budget of one episode's own tokens holds all of its rows."""
    whole = make_turns()
    sizes = [tree_layout(*columns(whole, range(begin, begin + 4))).input_ids.numel() for begin in (0, 4, 8)]
    longest = int(whole["attention_mask"].sum(1).max())
    assert max(sizes) < longest + 20
    # One more than a tree's tokens for each row that ends in it: plans count a row's last token too.
    rule = MicroBatching(rows=1, removes_padding=True, max_tokens=max(sizes) + 4)
    plan = plan_micro_batches(whole, rule, itself, shares_prompts=True)
    assert sorted(map(list, plan)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    together = plan_micro_batches(whole, replace(rule, max_tokens=300), itself, shares_prompts=True)
    assert [list(rows) for rows in together] == [list(range(12))]


def columns(whole: TensorBatch, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    part = micro_batch(whole, list(rows))
    return part["input_ids"], part["response_mask"]


@given(seed=st.integers(0, 200), budget=st.integers(30, 120), balances=st.booleans(), least=st.integers(1, 6))
def test_trees_are_within_the_budget(seed, budget, balances, least):
    """Rows that begin as an earlier row does, up to anywhere in it; the tokens of the layout are counted."""
    random = torch.Generator().manual_seed(seed)
    rows: list[tuple[list[int], int]] = []
    for _ in range(10):
        number = torch.randint(0, 1000, (3,), generator=random).tolist()
        earlier = rows[number[0] % len(rows)][0] if rows else []
        prompt = [*earlier[: number[1] % (len(earlier) + 1)], *torch.randint(1, 4, (2,), generator=random).tolist()]
        response = torch.randint(1, 4, (1 + number[2] % 5,), generator=random).tolist()
        rows.append(([*prompt, *response][:30], min(len(prompt), 29)))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    attended = torch.arange(width) < torch.tensor([[len(ids)] for ids, _ in rows])
    answers = attended & (torch.arange(width) >= torch.tensor([[first] for _, first in rows]))
    whole = {"input_ids": ids, "attention_mask": attended, "response_mask": answers}
    rule = MicroBatching(rows=1, removes_padding=True, max_tokens=budget, balances=balances)
    with mock.patch.object(patterns, "MIN_SHARED", least):
        plan = plan_micro_batches(whole, rule, itself, shares_prompts=True)
        assert sorted(chain(*plan)) == list(range(10))
        for one in plan:
            assert tree_layout(*columns(whole, one), packed_layout).input_ids.numel() <= budget


@pytest.mark.parametrize("removes_padding", [True, False])
def test_a_row_that_does_not_fit_is_named(removes_padding):
    rule = MicroBatching(rows=1, removes_padding=removes_padding, max_tokens=8)
    with pytest.raises(ValueError, match="9 tokens"):
        plan_micro_batches(batch([4, 9]), rule, itself)


def scored(lengths: list[int], width: int = LONGEST) -> TensorBatch:
    """With a column of tokens and one of rows."""
    count = len(lengths)
    return batch(lengths, width=width) | {"advantages": torch.rand(count, width), "scores": torch.arange(count)}


@given(lengths=st.lists(st.integers(0, 9), max_size=12), rows=st.integers(1, 5), padding=st.integers(0, 3))
def test_micro_batches_hold_every_row_once_cut_to_the_longest(lengths, rows, padding):
    whole = scored(lengths, 9 + padding)
    parts = [micro_batch(whole, own) for own in fixed_rows(len(lengths), rows)]
    assert [score for part in parts for score in part["scores"].tolist()] == list(range(len(lengths)))
    for part in parts:
        longest = max(lengths[score] for score in part["scores"].tolist())
        assert {part[name].shape[1] for name in ("input_ids", "attention_mask", "advantages")} == {max(1, longest)}


def test_rows_are_cut_to_the_longest_of_them_and_none_have_nothing_to_predict():
    whole = scored([3, 9, 4])
    part, nothing = micro_batch(whole, [0, 2]), micro_batch(whole, range(0))
    assert part["scores"].tolist() == [0, 2] and not is_empty(part)
    assert part["input_ids"].shape == part["advantages"].shape == (2, 4)
    assert is_empty(nothing) and nothing["input_ids"].shape == (1, 1)


def test_tensors_in_metrics_become_floats_after_merging():
    merged = merged_floats(
        [
            {"loss": Mean(torch.tensor(6.0), torch.tensor(2)), "rows": Sum(2.0)},
            {"loss": Mean(torch.tensor(2.0), torch.tensor(2)), "rows": Sum(1.0), "ratio": Max(torch.tensor(1.5))},
        ]
    )
    assert merged == {"loss": Mean(8.0, 4.0), "rows": Sum(3.0), "ratio": Max(1.5)}
    assert all(type(value) is float for value in (merged["loss"].total, merged["ratio"].number))  # type: ignore[attr-defined]
