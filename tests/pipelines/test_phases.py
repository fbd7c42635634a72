import numpy as np
import pytest

from roll.pipelines.rlvr.phases import interleave_for_mini_batches


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_mini_batches_hold_the_same_rows_for_any_rank_count(dp_size):
    num_rows, num_mini = 48, 3
    order = interleave_for_mini_batches(num_rows, num_mini, dp_size)
    ranks = order.reshape(dp_size, num_mini, -1)
    for mini in range(num_mini):
        together = np.sort(ranks[:, mini].reshape(-1))
        assert together.tolist() == list(range(mini * 16, (mini + 1) * 16))
