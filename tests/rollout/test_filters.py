from itertools import product

import numpy as np
import pytest

from roll.rollout.flow import GroupFilter, build_filter, response_mask


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
        ("mean_filter", {"threshold_down": 0.1}, [0.1, 0.1, 0.1], False),
        ("mean_filter", {"threshold_up": 0.9}, [0.9, 0.9, 0.9], False),
        ("mean_filter", {"threshold_down": 0.1}, [0.1, 0.1, 0.2], True),
        ("std_filter", {}, [np.float32(0.1) + np.float32(0.2), 0.3, np.float32(0.7) - np.float32(0.4)], False),
    ],
)
def test_filters(kind, arguments, scores, kept):
    assert build_filter(kind, arguments)(np.array(scores, dtype=np.float32)) is kept


def test_single_responses_are_judged_by_the_filter_of_their_domain():
    scores = np.array([0.0, 0.5, 1.0, np.nan, 0.0, 2.0])
    domains = np.array(["math", "math", "math", "math", "code", "code"], dtype=object)
    kept = response_mask(scores, domains, {"math": build_filter("mean_filter", {"threshold_up": 2.0})})
    assert kept.tolist() == [False, True, True, False, True, True]


def best_of(at_least: float) -> GroupFilter:
    return lambda scores: bool(np.nanmax(scores) >= at_least)


def test_a_filter_of_ones_own_by_dotted_path():
    keep = build_filter(f"{__name__}.best_of", {"at_least": 0.5})
    assert keep(np.array([0.0, 0.7])) is True
    assert keep(np.array([0.0, 0.4])) is False
    assert keep(np.array([np.nan, np.nan])) is False
    with pytest.raises(ValueError, match=r"at_most.*do not fit .*best_of"):
        build_filter(f"{__name__}.best_of", {"at_most": 0.5})
    with pytest.raises(ValueError, match="cannot be imported"):
        build_filter("no_such.module.filter", {})


def test_equal_scores_do_not_spread() -> None:
    keep = build_filter("std_filter", {})
    for score, number in product([0.1, 0.7, 1 / 3, 1e-7, 1e6], range(2, 20)):
        scores = np.full(number, score, dtype=np.float32)
        assert not keep(scores)
        assert not keep(np.append(scores, np.float32(np.nan)))
        scores[0] *= np.float32(1.5)
        assert keep(scores)
