import numpy as np
import pytest

from roll.rollout.filters import build_filter


@pytest.mark.parametrize(
    ("kind", "arguments", "scores", "kept"),
    [
        ("no_filter", {}, [0.0, 0.0], True),
        ("mean_filter", {}, [0.0, 0.0], False),
        ("mean_filter", {}, [1.0, 1.0], False),
        ("mean_filter", {}, [0.0, 1.0], True),
        ("mean_filter", {"threshold_up": 0.6, "threshold_down": 0.4}, [0.0, 0.0, 1.0, 0.0], False),
        ("std_filter", {}, [0.3, 0.3, 0.3], False),
        ("std_filter", {"std_threshold": 0.05}, [0.3, 0.31], False),
        ("std_filter", {"std_threshold": 0.05}, [0.0, 1.0], True),
        ("mean_filter", {}, [np.nan, 0.0, 1.0], True),
        ("no_filter", {}, [np.nan, np.nan], False),
    ],
)
def test_filters(kind, arguments, scores, kept):
    assert build_filter(kind, arguments)(np.array(scores, dtype=np.float32)) is kept
