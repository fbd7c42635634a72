"""Judges of the run's own: their engines answer the reward workers over HTTP, on devices that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipelines.conftest import Run
from tests.pipelines.judging import TEMPLATE, chance_of_yes
from tests.support.tiny_runs import TinyWorld, role

pytestmark = pytest.mark.e2e

JUDGED: dict[str, Any] = {
    "worker_cls": "llm_judge",
    "judge_prompt": TEMPLATE,
    "timeout": 60,
    "reward_kwargs": {"extract": "logprob", "top_logprobs": 1000},
}


@pytest.mark.long
def test_a_judge_on_a_role_and_one_in_a_reward_section(run: Run, world: TinyWorld, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = role("hf_infer", [0]) | {"model_args": {"model_name_or_path": str(world.model), "dtype": "fp32"}}
    changes = {
        "max_steps": 1,
        "rollout_dump_dir": str(tmp_path / "rollouts"),
        "is_offload_states": True,
        "reward_model": role("hf_infer", [0]),
        "reward_model.model_args.model_name_or_path": str(world.model),
        "reward_model.strategy_args.strategy_config": {"max_num_seqs": 16, "max_model_len": 256},
        "rewards": {
            "shared": JUDGED | {"tag_included": ["even"], "judge_model_type": "cluster"},
            "own": JUDGED | {"tag_included": ["odd"], "judge_model_type": "inference"} | own,
        },
    }
    finished = run(changes, output=tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(world.model)
    (row,) = finished.steps
    for name in ("shared", "own"):
        assert row[f"reward/{name}/error_rate"] == 0.0
        assert row[f"reward/{name}/tries"] <= 1.0
    samples = finished.samples(0)
    assert {sample["domain"] for sample in samples} == {"shared", "own"}
    for sample in samples[:3]:
        expected = chance_of_yes(model, tokenizer, sample["response"].strip())
        assert sample["score"] == pytest.approx(expected, abs=1e-4)
    assert len({sample["score"] for sample in samples}) > 1
    assert row["time/reward_model/offload/total"] > 0
    assert row["time/judge.own/offload/total"] > 0
