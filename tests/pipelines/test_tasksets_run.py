"""Environments of verifiers in whole runs; skipped without an interpreter that has the package."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agents.tasksets import FOLDER, PYTHON, needs_verifiers
from tests.pipelines.conftest import Run

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def entry(name: str, **config: Any) -> dict[str, Any]:
    return {
        "env_type": f"verifiers:{name}",
        "env_config": {"python": str(PYTHON), **config},
        "agent_config": {"env": {"PYTHONPATH": str(FOLDER)}},
        "max_steps": 3,
        "max_tokens_per_step": 8,
    }


CALLS = {"agent": {"sampling": {"tool_choice": "required"}}}
"""The untrained model calls no tool of itself."""
TASKSETS = {
    "custom_envs": {
        "vowels": entry("vowels-v1"),
        "letters": entry("letters-v1", select={"limit": 8}),
        "sums": entry("calculator-v1", **CALLS),
        "held_out": entry("vowels-v1", taskset={"split": "test", "count": 4}),
    },
    "train_env_manager": {"num_env_groups": 6, "group_size": 4, "tags": ["vowels", "letters", "sums"]},
    "val_env_manager": {"num_env_groups": 4, "group_size": 1, "tags": ["held_out"]},
    "sequence_length": 512,
    "rollout_batch_size": 24,
    "val_batch_size": 4,
    "max_steps": 3,
    "eval_steps": 3,
}


@needs_verifiers
def test_three_environments_are_played_and_trained(run: Run) -> None:
    """A single turn, several turns, and tools: what is trained is what was sampled, rewards and metrics are those of
    the environments' own rubrics."""
    finished = run(TASKSETS, "agentic")
    assert len(finished.steps) == 3
    for name in ("agent/retokenized_tokens", "agent/trained_once_violations", "agent/foreign_responses"):
        assert finished.values(name) == [0.0] * 3, name
    assert all(value > 0 for value in finished.values("actor/grad_norm"))
    rows = [row for step in range(3) for row in finished.samples(step)]
    assert len(rows) == 3 * 24 and {row["outcome"] for row in rows} == {"terminated"}
    cut = 0
    for row in rows:
        turns, metrics = row["turns"], row["metrics"]
        if row["tag"] == "sums":
            assert (len(turns), metrics["demanded_calls"], metrics["results"]) == (3, 3, 2)
            assert all("math_calc" in turn["prompt"] + turn["response"] for turn in turns)
            assert row["score"] == metrics["right"]
            continue
        weight = 2 if row["tag"] == "vowels" else 1
        assert row["score"] == pytest.approx(weight * metrics["vowels"])
        if all(turn["finish_reason"] == "length" for turn in turns):  # no token ended it, whose text is no response
            cut += 1
            assert metrics["vowels"] == pytest.approx(
                sum(share_of_vowels(turn["response"]) for turn in turns) / len(turns)
            )
    assert cut > 2
    tasks = {tag: {row["prompt"] for row in rows if row["tag"] == tag} for tag in ("vowels", "letters")}
    assert len(tasks["vowels"]) == 6 and all("train" in text for text in tasks["vowels"]), "no task twice in an epoch"
    assert {len(row["turns"]) for row in rows if row["tag"] == "letters"} == {2, 3}
    letters = [row["metrics"]["letters"] for row in rows[:24] if row["tag"] == "vowels"]
    assert finished.values("env/vowels/letters")[0] == pytest.approx(sum(letters) / len(letters))


def share_of_vowels(text: str) -> float:
    return sum(letter in "aeiou" for letter in text.strip().lower()) / max(1, len(text.strip()))
