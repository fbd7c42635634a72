"""Boxes: how they are written, how they are matched (against all permutations), what is scored."""

from __future__ import annotations

import itertools
import random

import pytest

from roll.rewards import RewardSample, build_reward
from roll.rewards.detection import Box, best_matching, iou, read_boxes


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0),
        ((0, 0, 2, 2), (1, 1, 3, 3), 1 / 7),
        ((0, 0, 2, 2), (2, 0, 4, 2), 0.0),
        ((0, 0, 4, 4), (1, 1, 3, 3), 0.25),
        ((0, 0, 0, 0), (0, 0, 0, 0), 0.0),
        ((0, 0, 1e308, 1e308), (0, 0, 1e308, 1e308), 0.0),
    ],
)
def test_iou(one: tuple[float, ...], other: tuple[float, ...], expected: float) -> None:
    assert iou(Box(*one), Box(*other)) == pytest.approx(expected)
    assert iou(Box(*other), Box(*one)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("[1, 2, 3, 4]", [(1, 2, 3, 4)]),
        ("[[1,2,3,4],[5,6,7,8]]", [(1, 2, 3, 4), (5, 6, 7, 8)]),
        ("The cat is at [10, 20.5, 30, 40] and (1,2,3,4).", [(10, 20.5, 30, 40), (1, 2, 3, 4)]),
        ("from (5, 6) on: [(1, 2), (3, 4)]", [(1, 2, 3, 4)]),
        ("[3, 4, 1, 2]", [(1, 2, 3, 4)]),
        ("<box>(1,2),(3,4)</box>", [(1, 2, 3, 4)]),
        ("<|box_start|>(1,2),(3,4)<|box_end|>", [(1, 2, 3, 4)]),
        ("<box>1 2 3 4</box> <box>5, 6, 7, 8</box>", [(1, 2, 3, 4), (5, 6, 7, 8)]),
        ('Here:\n```json\n[{"bbox_2d": [1, 2, 3, 4]}]\n```', [(1, 2, 3, 4)]),
        ('{"objects": [{"bbox": [1, 2, 3, 4]}]}', [(1, 2, 3, 4)]),
        ('I see [{"Position": [1, 2, 3, 4], "Confidence": 0.5}] there', [(1, 2, 3, 4)]),
        ("[1, 2, 3]", []),
        ("[1, 2, 3, 4, 5]", []),
        ('["a", 2, 3, 4]', []),
        ("no box", []),
        ("[" * 50_000, []),
        ("[1e999, 0, 1, 1]", []),
    ],
)
def test_ways_to_write_boxes(text: str, boxes: list[tuple[float, ...]]) -> None:
    assert [(box.x1, box.y1, box.x2, box.y2) for box in read_boxes(text)] == boxes


def test_labels() -> None:
    (box,) = read_boxes('[{"bbox_2d": [1,2,3,4], "label": "cat", "score": 0.5}]')
    assert box.label == "cat"
    (box,) = read_boxes("<ref>a dog</ref><box>(1,2),(3,4)</box>")
    assert box.label == "a dog"


def test_the_matching_is_the_best_of_all() -> None:
    rng = random.Random(0)
    for _ in range(300):
        rows, columns = rng.randint(1, 5), rng.randint(1, 5)
        weights = [[rng.choice([0.0, rng.random()]) for _ in range(columns)] for _ in range(rows)]
        pairs = best_matching(weights)
        assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == len(pairs)
        small, large = sorted((rows, columns))
        turned = weights if rows <= columns else [list(column) for column in zip(*weights, strict=True)]
        best = max(
            sum(turned[row][column] for row, column in enumerate(chosen))
            for chosen in itertools.permutations(range(large), small)
        )
        assert sum(weights[row][column] for row, column in pairs) == pytest.approx(best)
    assert best_matching([]) == []


@pytest.mark.parametrize("depth", [600, 100_000])
def test_deep_nesting_is_no_box_and_no_error(depth: int) -> None:
    for text in ("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        (result,) = build_reward("detection")([RewardSample("p", text, "[[0, 0, 1, 1]]")])
        assert (result.score, result.error) == (0.0, None)
