from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from roll.algorithms.returns import discounted_returns, generalized_advantages, reverse_discounted_sum
from tests.algorithms import reference
from tests.algorithms.reference import make_batch


@pytest.mark.parametrize("length", [1, 31, 32, 33, 1024, 1025, 2100])
@pytest.mark.parametrize("discount", [0.9, 1.0])
def test_blocks_join_at_every_length(length: int, discount: float) -> None:
    values = torch.randn(3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    expected = values.clone()
    for t in reversed(range(length - 1)):
        expected[:, t] += discount * expected[:, t + 1]
    assert_close(reverse_discounted_sum(values, discount), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [31, 33, 300, 1030])
@pytest.mark.parametrize(
    ("gamma", "lambd"),
    [(1.0, 0.95), (0.99, 0.9), (1.0, 0.28), (1.0, 0.27), (1.0, 0.05), (1e-3, 1e-3), (0.9, 0.0), (0.0, 0.9)],
)
def test_tool_output_over_many_blocks(length: int, gamma: float, lambd: float) -> None:
    """Turns and tool output of random lengths, longer and shorter than a block; the loop is in float64."""
    generator = torch.Generator().manual_seed(length)
    rows = 5
    spans = torch.randint(1, 60, (rows, length), generator=generator).cumsum(-1)
    turn = torch.searchsorted(spans, torch.arange(length).expand(rows, -1).contiguous(), right=True)
    mask = (turn % 2 == 0) & (torch.arange(length) < torch.tensor([length, length, length * 2 // 3, 7, 0])[:, None])
    rewards, values = torch.randn(2, rows, length, dtype=torch.float64, generator=generator).unbind(0)
    expected = reference.gae(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lambd)
    dirty = torch.where(mask, 0.0, torch.nan)  # whatever is outside the mask
    advantages, returns = generalized_advantages(rewards + dirty, values + dirty, mask, gamma, lambd)
    assert_close(advantages, expected, rtol=1e-10, atol=1e-10)
    assert_close(returns, torch.where(mask, expected + values, 0.0), rtol=1e-10, atol=1e-10)
    single, _ = generalized_advantages(rewards.float(), values.float(), mask, gamma, lambd)
    # Sums of up to some 20 terms of size 1, rounded to 6e-8 each.
    assert_close(single.double(), expected, rtol=1e-5, atol=1e-5)
    sums = discounted_returns(rewards, mask, gamma)
    assert_close(sums, reference.returns(rewards.tolist(), mask.tolist(), gamma), rtol=1e-10, atol=1e-10)
    assert not advantages[~mask].any() and not returns[~mask].any() and not sums[~mask].any()


def test_float32_stays_accurate_over_long_rows() -> None:
    batch = make_batch(5, 8, 4000, density=0.95)
    exact, _ = generalized_advantages(batch.rewards, batch.values, batch.mask, 1.0, 1.0)
    single, _ = generalized_advantages(batch.rewards.float(), batch.values.float(), batch.mask, 1.0, 1.0)
    # Sums of 4,000 terms of size 1: about 60 in size, so 1e-3 is some 30 float32 roundings.
    assert_close(single.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_to_sum(shape: tuple[int, int]) -> None:
    nothing, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    advantages, returns = generalized_advantages(nothing, nothing, mask, 1.0, 0.95)
    assert advantages.shape == returns.shape == discounted_returns(nothing, mask, 0.9).shape == shape
