"""Domains scored by a reward model on its own role: the scores of a run are those of the model alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2ForSequenceClassification,
)

from tests.pipelines.conftest import Run
from tests.pipelines.test_rm_run import chat_score
from tests.support.tiny_runs import HERE, TinyWorld, role

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def reward_model(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the policy's tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    config = AutoConfig.from_pretrained(world.model, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_scores_are_those_of_the_model_alone(run: Run, world: TinyWorld, reward_model: Path, tmp_path: Path) -> None:
    model = role("hf_infer", [1], infer_batch_size=4)
    model["model_args"] |= {"model_name_or_path": str(reward_model), "model_type": "auto_sequence_classification"}
    changes: dict[str, Any] = {
        "rollout_dump_dir": str(tmp_path / "rollouts"),
        "reward_model": model,
        "rewards": {
            "preference": {"worker_cls": "reward_model", "tag_included": ["even"], "reward_kwargs": {"squash": "tanh"}},
            "both": {
                "tag_included": ["odd"],
                "components": {
                    "reward_model": {"weight": 0.5},
                    "digits": {"worker_cls": f"{HERE}.rewards.digit_share"},
                },
            },
        },
        "validation": {"data_args": {"file_name": [str(world.validation)], "messages": "messages"}},
        "eval_steps": 2,
    }
    finished = run(changes, output=tmp_path)
    questions = {}
    for line in (*world.train.open(), *world.validation.open()):
        row = json.loads(line)
        questions[row["id"]] = row["messages"]
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model_alone = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    domains = set()
    for row in finished.steps:
        samples = [json.loads(line) for line in (tmp_path / f"rollouts/train-{row['step']:06d}.jsonl").open()]
        raw = []
        for sample in samples:
            domains.add(sample["domain"])
            (question,) = questions[sample["prompt_id"].partition("@")[0]]
            with torch.no_grad():
                score = float(chat_score(model_alone, tokenizer, question["content"], sample["response"]))
            raw.append(score)
            digits = sum(map(str.isdigit, sample["response"])) / max(len(sample["response"]), 1)
            expected = math.tanh(score) if sample["domain"] == "preference" else 0.5 * score + digits
            assert sample["score"] == pytest.approx(expected, abs=1e-4)
        of = [score for score, sample in zip(raw, samples, strict=True) if sample["domain"] == "both"]
        if of:
            assert row["reward/both/reward_model/raw"] == pytest.approx(sum(of) / len(of), abs=1e-4)
            assert row["reward/both/reward_model/error_rate"] == 0.0
    assert domains == {"preference", "both"}
