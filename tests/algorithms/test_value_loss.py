from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.aggregation import denominators_from, denominators_of
from roll.algorithms.losses import value_loss
from roll.protocol.metrics import merge_metrics, to_floats
from tests.algorithms.reference import Batch, batches, make_batch


@given(batch=batches, clip=st.sampled_from([None, 0.1, 0.5]))
def test_equals_the_loop(batch: Batch, clip: float | None) -> None:
    values = batch.values + 0.3 * batch.advantages
    total, count = 0.0, int(batch.mask.sum())
    for i, t in batch.mask.nonzero().tolist():
        v, old, target = float(values[i, t]), float(batch.values[i, t]), float(batch.rewards[i, t])
        error = (v - target) ** 2
        if clip is not None:
            error = max(error, (min(max(v, old - clip), old + clip) - target) ** 2)
        total += 0.5 * error / count
    denominators = denominators_from(denominators_of(batch.mask))
    result = value_loss(values, batch.values, batch.rewards, batch.mask, clip, denominators)
    assert_close(float(result.loss), total, rtol=1e-9, atol=1e-12)


@given(cut=st.integers(0, 6), seed=st.integers(0, 1000))
def test_fault_11_the_loss_uses_global_denominators(cut: int, seed: int) -> None:
    """Shares of two ranks add up to the loss, and their gradients to its gradient."""
    batch = make_batch(seed, 6, 8)
    denominators = denominators_from(denominators_of(batch.mask))
    values = (batch.values + 0.3 * batch.advantages).requires_grad_()

    def share(rows: slice) -> tuple[torch.Tensor, dict[str, float]]:
        result = value_loss(values[rows], batch.values[rows], batch.rewards[rows], batch.mask[rows], 0.2, denominators)
        return result.loss, result.metrics

    whole, whole_metrics = share(slice(None))
    parts = [share(slice(0, cut)), share(slice(cut, None))]
    summed = parts[0][0] + parts[1][0]
    assert_close(summed, whole)
    assert_close(torch.autograd.grad(summed, values), torch.autograd.grad(whole, values))
    merged = to_floats(merge_metrics(metrics for _, metrics in parts))
    assert merged == pytest.approx(to_floats(whole_metrics), abs=1e-12)


def test_gradient() -> None:
    batch = make_batch(2, 3, 5)
    denominators = denominators_from(denominators_of(batch.mask))
    values = (batch.values + 0.3 * batch.advantages).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, batch.values, batch.rewards, batch.mask, 0.2, denominators).loss, values
    )
