"""Object detection: boxes in the response against the true ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from roll.rewards.answers import after_thought, tagged_answer
from roll.rewards.base import RewardOptionError, RewardResult, RewardRule, RewardSample, failure

NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
_QUADRUPLE = re.compile(
    rf"[\[(]\s*\(?\s*({NUMBER})\s*,\s*({NUMBER})\s*\)?\s*,\s*\(?\s*({NUMBER})\s*,\s*({NUMBER})\s*\)?\s*[\])]"
)
_BOX_TAG = re.compile(
    rf"<(?:box|bbox|\|box_start\|)>[\s\[(]*({NUMBER})[,\s)(]+({NUMBER})[,\s)(]+({NUMBER})[,\s)(]+({NUMBER})"
)
_LABEL_TAG = re.compile(r"<(?:ref|label|\|object_ref_start\|)>([^<]{1,200})<[^>]{1,30}>\s*$")
_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
BOX_KEYS = ("bbox_2d", "bbox", "box_2d", "box", "bounding_box", "Position")
LABEL_KEYS = ("label", "category", "name", "class")
MAX_BOXES = 300  # boxes of a response that are looked at: matching costs their product with the true ones


@dataclass(frozen=True, slots=True)
class Box:
    """Corners, and the label if there is one."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str | None = None

    @property
    def area(self) -> float:
        return max(0.0, self.x2 - self.x1) * max(0.0, self.y2 - self.y1)


def iou(one: Box, other: Box) -> float:
    """Intersection over union, 0..1; 0 for a box without area."""
    width = min(one.x2, other.x2) - max(one.x1, other.x1)
    height = min(one.y2, other.y2) - max(one.y1, other.y1)
    shared = max(0.0, width) * max(0.0, height)
    union = one.area + other.area - shared
    return shared / union if union > 0 and math.isfinite(union) else 0.0


def read_boxes(text: str) -> list[Box]:
    """Boxes as models write them, in order: JSON (a list of objects or of four numbers), ``<box>`` tags, else every
    ``[x1, y1, x2, y2]`` or ``(x1, y1), (x2, y2)`` in the text."""
    fenced = _FENCE.findall(text)
    # From the first opening to the last closing square bracket.
    inner = text[max(0, text.find("[")) : text.rfind("]") + 1]
    for candidate in (fenced[-1] if fenced else text, inner if "{" in inner else ""):
        found = boxes_in_json(candidate)
        if found:
            return found[:MAX_BOXES]
    tagged = []
    for match in _BOX_TAG.finditer(text):
        label = _LABEL_TAG.search(text[max(0, match.start() - 300) : match.start()])
        tagged.append(make_box(match.groups(), label=label[1].strip() if label else None))
    plain = tagged or [make_box(match.groups()) for match in _QUADRUPLE.finditer(text)]
    return [box for box in plain if box is not None][:MAX_BOXES]


def boxes_in_json(text: str) -> list[Box]:
    """Boxes in a text that is JSON; none in one that is not, or is nested too deep."""
    try:
        return boxes_of(json.loads(text))
    except (ValueError, RecursionError):
        return []


def boxes_of(value: object) -> list[Box]:
    """Boxes in what JSON or a data row holds: an object, four numbers, or a list of those."""
    if isinstance(value, str):
        return boxes_in_json(value)
    if isinstance(value, dict):
        key = next((key for key in BOX_KEYS if key in value), None)
        if key is None:
            return [box for inner in value.values() if isinstance(inner, list | dict) for box in boxes_of(inner)]
        label = next((str(value[name]) for name in LABEL_KEYS if value.get(name) is not None), None)
        box = make_box(value[key], label)
        return [box] if box is not None else boxes_of(value[key])
    if not isinstance(value, list | tuple):
        return []
    box = make_box(value)
    return [box] if box is not None else [box for inner in value for box in boxes_of(inner)]


def make_box(corners: object, label: str | None = None) -> Box | None:
    """A box of four finite numbers, corners in order; None for anything else."""
    if not isinstance(corners, list | tuple) or len(corners) != 4:
        return None
    try:
        x1, y1, x2, y2 = (float(number) for number in corners)
    except (TypeError, ValueError, OverflowError):
        return None
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        return None
    return Box(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2), label)


def best_matching(weights: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Pairs (row, column) of the greatest sum of weights, each row and column at most once; weights are at least 0.

    The Hungarian method with potentials (Kuhn 1955; the form of Jonker and Volgenant 1987), O(n^2 m), n <= m.
    """
    rows, columns = len(weights), len(weights[0]) if weights else 0
    if rows > columns:
        turned = best_matching([[weights[row][column] for row in range(rows)] for column in range(columns)])
        return sorted((row, column) for column, row in turned)
    row_of = [-1] * columns
    row_price, column_price = [0.0] * rows, [0.0] * columns
    for start in range(rows):
        # Match one row more along the cheapest path; costs are the negated weights, reduced by the prices.
        distance, came_from, is_done = [math.inf] * columns, [-1] * columns, [False] * columns
        row, base, last = start, 0.0, -1
        while row >= 0:
            nearest, at = math.inf, -1
            for column in range(columns):
                if is_done[column]:
                    continue
                # At least 0 up to rounding, since the prices are feasible: Dijkstra's algorithm applies.
                reduced = base - weights[row][column] - row_price[row] - column_price[column]
                if reduced < distance[column]:
                    distance[column], came_from[column] = reduced, last
                if distance[column] < nearest:
                    nearest, at = distance[column], column
            base, last, is_done[at] = nearest, at, True
            row = row_of[at]
        row_price[start] += base
        for column in range(columns):
            if is_done[column]:
                gain = base - distance[column]
                if row_of[column] >= 0:
                    row_price[row_of[column]] += gain
                column_price[column] -= gain
        while last >= 0:
            before = came_from[last]
            row_of[last] = row_of[before] if before >= 0 else start
            last = before
    return sorted((row, column) for column, row in enumerate(row_of) if row >= 0)


@dataclass
class Detection(RewardRule):
    """Boxes are matched one to one so that the sum of their IoUs is greatest; ``metric`` says what is scored of it.

    The ground truth is a list of boxes: ``[x1, y1, x2, y2]`` or objects with ``bbox`` and perhaps ``label``, or JSON of
    that.  An empty list is right to be answered with no box.
    """

    numbers: ClassVar[tuple[str, ...]] = ("mean_iou", "precision", "recall", "f1", "answered")
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    metric: Literal["mean_iou", "precision", "recall", "f1"] = "mean_iou"
    """``mean_iou``: IoUs of the matched pairs over the greater number of boxes, so that missing and surplus boxes cost
    the same; the others count pairs from ``iou_threshold`` on."""
    iou_threshold: float = 0.5
    match_labels: bool = True  # pair only boxes of one label (in any case), where the truth has labels
    score: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.iou_threshold <= 1:
            raise RewardOptionError(f"iou_threshold = {self.iou_threshold}: must be greater than 0 and at most 1")

    def judge(self, sample: RewardSample) -> RewardResult:
        wanted = boxes_of(sample.ground_truth)
        if not wanted and sample.ground_truth not in ([], "[]"):
            return failure(f"detection: ground_truth {str(sample.ground_truth)[:100]!r} is no list of boxes")
        text = after_thought(sample.response, sample.prompt) or ""
        answer = tagged_answer(text)
        given = read_boxes(text if answer is None else answer)
        given_labels, wanted_labels = (
            [None if box.label is None else box.label.strip().lower() for box in boxes] for boxes in (given, wanted)
        )
        overlaps = [
            [
                0.0 if self.match_labels and right not in (None, label) else iou(box, truth)
                for truth, right in zip(wanted, wanted_labels, strict=True)
            ]
            for box, label in zip(given, given_labels, strict=True)
        ]
        pairs = [overlaps[row][column] for row, column in best_matching(overlaps)] if given and wanted else []
        hits = sum(overlap >= self.iou_threshold for overlap in pairs)
        nothing = not given and not wanted
        precision = hits / len(given) if given else float(nothing)
        recall = hits / len(wanted) if wanted else float(nothing)
        most = max(len(given), len(wanted))
        metrics = {
            "mean_iou": sum(pairs) / most if most else 1.0,
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / (precision + recall) if precision + recall else 0.0,
            "answered": float(bool(given)),
        }
        return RewardResult(self.score * metrics[self.metric], metrics)
