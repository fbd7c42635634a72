"""Metrics of a step's batch, and warnings about batches that teach nothing."""

from __future__ import annotations

import pytest
import torch

from roll.algorithms.metrics import BatchColumns, BatchWatch, compute_data_metrics
from roll.protocol.metrics import to_floats
from tests.algorithms.reference import Batch, each_batch, mean, members, std


def columns_of(batch: Batch) -> BatchColumns:
    given = {name: getattr(batch, name) for name in ("advantages", "values", "group_ids")}
    rewards = {"scores": batch.response_rewards, "response_level_rewards": batch.sample_weights}
    masks = {"response_mask": batch.mask, "attention_mask": torch.ones_like(batch.mask)}
    truncated = batch.mask.sum(-1) == batch.mask.shape[1]
    others = {"token_level_rewards": batch.rewards, "returns": batch.log_probs, "truncated": truncated}
    return BatchColumns(**given, **rewards, **masks, **others)


def check(metrics: dict[str, float], name: str, values: list[float]) -> None:
    if not values:
        assert f"{name}/max" not in metrics
        assert metrics[f"{name}/mean"] == 0.0
        return
    assert metrics[f"{name}/mean"] == pytest.approx(mean(values), rel=1e-5, abs=1e-6)
    assert metrics[f"{name}/max"] == pytest.approx(max(values), rel=1e-5, abs=1e-6)
    assert metrics[f"{name}/min"] == pytest.approx(min(values), rel=1e-5, abs=1e-6)


@each_batch()
def test_values_and_lengths_equal_the_loop(batch: Batch) -> None:
    metrics = to_floats(compute_data_metrics(columns_of(batch)))
    scores = batch.response_rewards.tolist()
    lengths = batch.mask.sum(-1).tolist()
    width = batch.mask.shape[1]
    prompts = [row.index(True) if any(row) else width for row in batch.mask.tolist()]
    check(metrics, "critic/score", scores)
    check(metrics, "critic/rewards", batch.sample_weights.tolist())
    check(metrics, "critic/advantages", batch.advantages[batch.mask].tolist())
    check(metrics, "critic/raw_advantages", batch.advantages[batch.mask].tolist())
    check(metrics, "critic/returns", batch.log_probs[batch.mask].tolist())
    check(metrics, "critic/values", batch.values[batch.mask].tolist())
    check(metrics, "token/response_length", lengths)
    check(metrics, "token/prompt_length", prompts)
    check(metrics, "token/total_length", [width] * len(scores))
    assert metrics["token/response_length/diff"] == max(lengths) - min(lengths)
    assert metrics["critic/correct/mean"] == pytest.approx(mean([float(s >= 1) for s in scores]))
    assert metrics["token/total_response_length/clip"] == pytest.approx(mean([float(n == width) for n in lengths]))
    for name, wanted in (("right", True), ("error", False)):
        rows = [i for i, s in enumerate(scores) if (s >= 1) == wanted]
        check(metrics, f"token/{name}_response_length", [lengths[i] for i in rows])
        chosen = batch.advantages[rows][batch.mask[rows]].tolist()
        check(metrics, f"critic/{name}_response/advantages", chosen)
        expected = std(chosen) if chosen else 0.0
        assert metrics[f"critic/{name}_response/advantages/std"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@each_batch()
def test_group_metrics_equal_the_loop(batch: Batch) -> None:
    metrics = to_floats(compute_data_metrics(columns_of(batch)))
    ids = batch.group_ids.tolist()
    groups = [members(ids, ids.index(g)) for g in sorted(set(ids))]
    lengths = batch.mask.sum(-1).tolist()
    advantage = [
        float(a[m].mean()) if bool(m.any()) else 0.0 for a, m in zip(batch.advantages, batch.mask, strict=True)
    ]
    right = [s >= 1 for s in batch.response_rewards.tolist()]
    ratios = [mean([float(right[i]) for i in group]) for group in groups]
    mixed = [group for group, ratio in zip(groups, ratios, strict=True) if 0 < ratio < 1]
    check(metrics, "group/correct_ratio", ratios)
    for name, values in (("response_length", lengths), ("advantage", advantage)):
        check(metrics, f"group/{name}_diff", [max(values[i] for i in g) - min(values[i] for i in g) for g in groups])
    differences = [
        mean([advantage[i] for i in g if right[i]]) - mean([advantage[i] for i in g if not right[i]]) for g in mixed
    ]
    check(metrics, "group/correct_vs_incorrect_advantage_diff", differences)
    assert metrics["group/mixed_groups_ratio"] == pytest.approx(len(mixed) / len(groups))
    assert metrics["group/all_correct_groups_ratio"] == pytest.approx(ratios.count(1.0) / len(groups))
    assert metrics["group/all_incorrect_groups_ratio"] == pytest.approx(ratios.count(0.0) / len(groups))


VARIED, SAME = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.zeros(4)
CUT, WHOLE = torch.tensor([True, True, True, False]), torch.zeros(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("learns", "scores", "truncated", "messages", "words"),
    [
        (True, [SAME, SAME, VARIED, SAME, SAME, SAME, SAME], [WHOLE] * 7, [0, 0, 0, 0, 0, 1, 0], "score 0"),
        (False, [SAME] * 4, [WHOLE, CUT, CUT, CUT], [0, 0, 0, 1], "75%"),  # nothing is learnt from scores
        (True, [VARIED] * 6, [CUT, WHOLE, CUT, CUT, CUT, CUT], [0, 0, 0, 0, 1, 0], "75%"),
        (True, [SAME[:1]] * 4, [WHOLE[:1]] * 4, [0] * 4, ""),  # too few to judge
        (True, [SAME[:0]] * 4, [WHOLE[:0]] * 4, [0] * 4, ""),
    ],
)
def test_batches_that_teach_nothing_are_reported_once(
    learns: bool, scores: list[torch.Tensor], truncated: list[torch.Tensor], messages: list[int], words: str
) -> None:
    watch = BatchWatch(learns_from_scores=learns)
    said = [watch.observe(*batch) for batch in zip(scores, truncated, strict=True)]
    assert [len(one) for one in said] == messages
    assert all(words in one for step in said for one in step)


def test_zero_advantages_are_reported_unless_equal_scores_say_why() -> None:
    used = torch.tensor([True, True, True, False])
    rounding, unused = torch.full((4, 3), -1e-9), torch.tensor([[0.0] * 3] * 3 + [[0.0, 7.0, 0.0]])
    something = torch.tensor([[0.0, -0.5, 0.0]] * 4)
    watch = BatchWatch()
    said = []
    for advantages in (rounding, something, unused, rounding, rounding, rounding):
        assert watch.observe(VARIED, WHOLE) == []
        said.append(watch.observe_advantages(advantages, used, "pass@k"))
    assert [len(messages) for messages in said] == [0, 0, 0, 0, 1, 0]
    assert "pass@k" in said[4][0]
    watch = BatchWatch()
    said = [watch.observe(SAME, WHOLE) + watch.observe_advantages(rounding, used, "grpo") for _ in range(4)]
    assert [len(messages) for messages in said] == [0, 0, 1, 0]
    assert "score 0" in said[2][0]
