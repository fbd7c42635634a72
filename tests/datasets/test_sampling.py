from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.data import DataArguments
from roll.datasets import DataError, DomainSampler, PromptRow, ShuffledEpochs


def prompts(domain: str, count: int) -> list[PromptRow]:
    return [PromptRow(f"{domain}{i}", domain, "", [i], "", None, {}) for i in range(count)]


def datasets(**counts: int) -> dict[str, list[PromptRow]]:
    return {domain: prompts(domain, count) for domain, count in counts.items()}


def ids(rows: list[PromptRow]) -> list[str]:
    return [row.prompt_id for row in rows]


def test_an_epoch_holds_every_row_once_in_an_order_of_its_own() -> None:
    stream = ShuffledEpochs(list(range(50)), seed=1)
    first, second = stream.next_batch(50), stream.next_batch(50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert first == ShuffledEpochs(list(range(50)), seed=1).next_batch(50)
    assert first != ShuffledEpochs(list(range(50)), seed=2).next_batch(50)
    assert first != ShuffledEpochs(list(range(50)), seed=1, name="other").next_batch(50)
    in_order = ShuffledEpochs(list(range(50)), seed=1, data_args=DataArguments(shuffle=False))
    assert in_order.next_batch(60) == [*range(50), *range(10)]


@given(
    st.lists(st.integers(min_value=1, max_value=1000), min_size=1, max_size=6),
    st.lists(st.integers(min_value=1, max_value=17), min_size=1, max_size=12),
)
def test_shares_hold_at_every_moment_whatever_the_batch_sizes(weights: list[int], sizes: list[int]) -> None:
    probs = {f"d{i}": float(weight) for i, weight in enumerate(weights)}
    sampler = DomainSampler({domain: prompts(domain, 5) for domain in probs}, probs)
    counts: Counter[str] = Counter()
    total = sum(weights)
    for n, row in enumerate((row for size in sizes for row in sampler.next_batch(size)), 1):
        counts[row.domain] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[f"d{i}"] - Fraction(weight, total) * n) < 1
    assert counts == Counter(sampler.counts())


def test_batches_do_not_change_the_sequence_and_ids_are_unique_over_epochs() -> None:
    whole = DomainSampler(datasets(a=5, b=9), {"a": 0.3, "b": 0.7}).next_batch(40)
    parts = DomainSampler(datasets(a=5, b=9), {"a": 0.3, "b": 0.7})
    assert whole == [row for size in (1, 7, 2, 13, 17) for row in parts.next_batch(size)]
    sampler = DomainSampler(datasets(a=30, b=10, c=0))
    assert len(set(ids(sampler.next_batch(40)))) == 40
    assert sampler.counts() == {"a": 30, "b": 10}, "without shares the number of rows decides"
    drawn = ids(DomainSampler(datasets(a=3)).next_batch(7))
    assert sorted(drawn[:3]) == ["a0", "a1", "a2"]
    assert sorted(drawn[3:6]) == ["a0@1", "a1@1", "a2@1"]
    assert drawn[6].endswith("@2")
    decimal = DomainSampler(datasets(a=7, b=11, c=3), {"a": 0.1, "b": 0.7, "c": 0.2})
    for _ in range(1000):
        decimal.next_batch(3)
    assert decimal.counts() == {"a": 300, "b": 2100, "c": 600}, "exact after many draws"
    never = DomainSampler(datasets(a=2, b=2), {"a": 1.0, "b": 0})
    assert {row.domain for row in never.next_batch(20)} == {"a"}


@given(st.integers(min_value=0, max_value=60), st.integers(min_value=0, max_value=60))
def test_restored_equals_uninterrupted(before: int, after: int) -> None:
    probs = {"a": 0.25, "b": 0.75}
    one = DomainSampler(datasets(a=4, b=9), probs, seed=3)
    one.next_batch(before)
    state = json.loads(json.dumps(one.state_dict()))
    other = DomainSampler(datasets(a=4, b=9), probs, seed=3)
    other.next_batch(5)
    other.load_state_dict(state)
    assert other.next_batch(after) == one.next_batch(after)
    assert other.state_dict() == one.state_dict()


def with_truth(truth: str) -> dict[str, list[PromptRow]]:
    rows = datasets(a=4, b=9)
    return rows | {"a": [replace(rows["a"][0], ground_truth=truth), *rows["a"][1:]]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (DomainSampler(datasets(a=4, b=8), {"a": 0.25, "b": 0.75}), "'b': .* other data .*rows 9, now 8"),
        (DomainSampler(with_truth("6"), {"a": 0.25, "b": 0.75}), "'a': .* other data .contents "),
        (DomainSampler(datasets(a=4, b=9), {"a": 0.5, "b": 0.5}), "domain_interleave_probs changed"),
        (DomainSampler(datasets(a=4, b=9), {"a": 0.25, "b": 0.75}, seed=1), "seed 42, now 1"),
    ],
)
def test_a_state_of_other_data_is_refused(changed: DomainSampler, message: str) -> None:
    state = DomainSampler(datasets(a=4, b=9), {"a": 0.25, "b": 0.75}).state_dict()
    with pytest.raises(DataError, match=message):
        changed.load_state_dict(state)


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ({"a": 0.5, "x": 0.5}, r"probs\.x: this domain has no rows; domains with rows: a \(2\), b \(2\)"),
        ({"a": 1.0}, "no entry for 'b', which has rows"),
        ({"a": -1, "b": 1}, r"domain_interleave_probs\.a = -1: must be a number >= 0"),
        ({"a": float("nan"), "b": 1}, "must be a number"),
        ({"a": 0, "b": 0}, "no domain has a share above 0"),
    ],
)
def test_shares_that_do_not_work_say_why(probs: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DomainSampler(datasets(a=2, b=2), probs)


def test_nothing_to_draw_from() -> None:
    with pytest.raises(DataError, match="no domain has a share"):
        DomainSampler({})
    with pytest.raises(DataError, match="no rows to draw from"):
        ShuffledEpochs([], seed=0)
