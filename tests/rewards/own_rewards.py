"""Rewards as a user would write them."""

from __future__ import annotations

from dataclasses import dataclass

from roll.rewards import RewardResult, RewardRule, RewardSample
from roll.rewards.text_rules import Gsm8kRule


def shortness(response: str, limit: int = 10) -> float:
    return float(len(response) <= limit)


def everything(prompt: str, response: str, ground_truth: str, **row: object) -> dict[str, object]:
    assert response != "boom", "the response went boom"
    return {"score": float(response == ground_truth), "columns": len(row), "difficulty": row.get("difficulty", -1)}


def returns(response: str) -> object:
    results = {"nan": float("nan"), "huge": 1e300, "none": None, "text": "high", "dict": {"points": 1}, "true": True}
    return results[response]


@dataclass
class Constant(RewardRule):
    value: float

    def judge(self, sample: RewardSample) -> RewardResult:
        return RewardResult(self.value)


@dataclass(frozen=True)
class OwnGsm8k(Gsm8kRule):
    answers_file: str = ""


class NoRule:
    pass


answer = 42
