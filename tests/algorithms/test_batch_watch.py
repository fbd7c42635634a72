from __future__ import annotations

import torch

from roll.algorithms.metrics import BatchWatch

VARIED, SAME = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.zeros(4)
CUT, WHOLE = torch.tensor([True, True, True, False]), torch.zeros(4, dtype=torch.bool)


def test_equal_scores_are_reported_once_after_several_steps_in_a_row() -> None:
    watch = BatchWatch(patience=3)
    said = [watch.observe(scores, WHOLE) for scores in (SAME, SAME, VARIED, SAME, SAME, SAME, SAME)]
    assert [len(messages) for messages in said] == [0, 0, 0, 0, 0, 1, 0]
    assert "score 0" in said[5][0]


def test_truncation_is_reported_with_its_share() -> None:
    watch = BatchWatch(patience=2)
    said = [watch.observe(VARIED, truncated) for truncated in (CUT, WHOLE, CUT, CUT, CUT)]
    assert [len(messages) for messages in said] == [0, 0, 0, 1, 0]
    assert "75%" in said[3][0]


def test_zero_advantages_are_reported_unless_equal_scores_say_why() -> None:
    used = torch.tensor([True, True, True, False])
    rounding, unused = torch.full((4, 3), -1e-9), torch.tensor([[0.0] * 3] * 3 + [[0.0, 7.0, 0.0]])
    something = torch.tensor([[0.0, -0.5, 0.0]] * 4)
    watch = BatchWatch(patience=2)
    said = []
    for advantages in (rounding, something, unused, rounding, rounding):
        assert watch.observe(VARIED, WHOLE) == []
        said.append(watch.observe_advantages(advantages, used, "pass@k"))
    assert [len(messages) for messages in said] == [0, 0, 0, 1, 0]
    assert "pass@k" in said[3][0]
    watch = BatchWatch(patience=2)
    said = [watch.observe(SAME, WHOLE) + watch.observe_advantages(rounding, used, "grpo") for _ in range(4)]
    assert [len(messages) for messages in said] == [0, 1, 0, 0]
    assert "score 0" in said[1][0]
    assert BatchWatch(patience=0).observe_advantages(rounding, used, "grpo") == []


def test_too_little_to_judge() -> None:
    watch = BatchWatch(patience=1)
    assert watch.observe(torch.zeros(1), torch.zeros(1, dtype=torch.bool)) == []
    assert watch.observe(torch.zeros(0), torch.zeros(0, dtype=torch.bool)) == []
