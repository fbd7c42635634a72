from itertools import combinations

import numpy as np
import pytest

from roll.pipelines.rlvr.validation import accuracy_metrics, pass_at_k
from tests.rollout.helpers import make_group


@pytest.mark.parametrize(("n", "c", "k"), [(8, 0, 4), (8, 3, 1), (8, 3, 4), (8, 8, 8), (5, 2, 3), (4, 1, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n, c, k):
    correct = np.array([True] * c + [False] * (n - c))
    subsets = list(combinations(correct, k))
    assert pass_at_k(correct, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_accuracy_counts_only_full_scores_and_weighs_samples_alike():
    groups = [
        make_group(0, [1], [[1], [2]], [1.0, 0.5], tag="a"),
        make_group(1, [1], [[1, 1], [2]], [1.0, 1.0], tag="b"),
        make_group(2, [1], [[1], [2]], [None, 0.0], tag="b"),
    ]
    metrics = accuracy_metrics(groups, "sampled", is_primary=True)
    assert metrics["val/sampled/accuracy"] == pytest.approx(3 / 6)
    assert metrics["val_correct/all/mean"] == pytest.approx(3 / 6)
    assert metrics["val_correct/a/mean"] == pytest.approx(1 / 2)
    assert metrics["val/sampled/b/accuracy"] == pytest.approx(2 / 4)
    assert metrics["val/sampled/response_length"] == pytest.approx(7 / 6)
    assert metrics["val/sampled/pass@1"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert metrics["val/sampled/pass@2"] == pytest.approx(2 / 3)
    assert "val/sampled/pass@4" not in metrics
