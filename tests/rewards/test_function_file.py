"""A reward function in a file of verl's kind is called as verl calls it."""

from __future__ import annotations

from pathlib import Path

from roll.rewards import RewardSample, build_reward

TEXT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "d" and extra_info["split"] == "train"
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str), "note": "text"}


def plain(data_source, solution_str, ground_truth, extra_info=None):
    return (0.25, "first counts")
"""
ROW = {"data_source": "d", "extra_info": {"split": "train"}}


def test_scores_numbers_and_options(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(TEXT, encoding="utf-8")
    path = "roll.rewards.function_file.score"
    samples = [RewardSample("p", "72", "72", row=ROW), RewardSample("p", "7", "72", row=ROW)]
    results = build_reward(path, {"path": str(file), "options": {"bonus": 0.5}})(samples)
    assert [(result.score, result.metrics) for result in results] == [(1.5, {"length": 2.0}), (0.5, {"length": 1.0})]
    assert build_reward(path, {"path": str(file), "name": "plain"})(samples)[0].score == 0.25
    missing = build_reward(path, {"path": str(tmp_path / "none.py")})(samples)[0]
    assert missing.score is None and "no such Python file" in str(missing.error)
    assert "has no function f" in str(build_reward(path, {"path": str(file), "name": "f"})(samples)[0].error)
