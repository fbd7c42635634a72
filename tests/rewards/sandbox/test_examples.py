"""The example's section and its data: right programs score 1, wrong ones less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.config.loader import load_config
from roll.rewards import RewardSample, build_section

EXAMPLES = Path(__file__).parents[3] / "examples/rewards"
PROGRAMS = {
    "code-0": "def double(n): return n * 2",
    "code-1": "def vowels(text): return sum(letter in 'aeiou' for letter in text)",
    "code-2": "print(sum(map(int, input().split())))",
    "code-3": "print(*[input() for _ in range(int(input()))][::-1], sep='\\n')",
    "code-4": "from itertools import accumulate\ndef running_sum(numbers): return list(accumulate(numbers))",
    "code-5": "def mean(numbers): return sum(numbers) / len(numbers)",
    "code-6": "class Counter:\n    n = 0\n    def add(self, n): self.n += n\n    def total(self): return self.n",
    "code-7": "def safe_div(a, b):\n    if b == 0: raise ValueError\n    return a / b",
}


@pytest.mark.long
def test_the_example_scores_its_rows() -> None:
    section = load_config(None, EXAMPLES / "code_sandbox.yaml", check_files=False).config.rewards["code"]
    rows = [json.loads(line) for line in (EXAMPLES / "code.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["id"] for row in rows} == set(PROGRAMS)
    reward = build_section("code", section)
    reward.prepare()
    right = [RewardSample("", f"So:\n```python\n{PROGRAMS[row['id']]}\n```", None, row=row) for row in rows]
    wrong = [RewardSample("", "```python\ndef double(n): return 4\n```", None, row=row) for row in rows]
    assert [result.score for result in reward(right)] == [1.0] * len(rows)
    assert [result.score for result in reward(wrong)] == [1 / 3, *[0.0] * 7]
    reward.close()
