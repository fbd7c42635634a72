"""Whole agentic runs: a policy learns over turns, faults of environments cost no step, a model of the run judges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipelines.conftest import Run
from tests.pipelines.judging import TEMPLATE, chance_of_yes
from tests.support.tiny_runs import TinyWorld, role, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]

HERE = "tests.pipelines.agentic_environments"
LETTERS = {
    "custom_envs": {
        "letters": {"env_type": f"{HERE}.Letters", "max_steps": 2, "max_tokens_per_step": 8},
    },
    "train_env_manager.tags": ["letters"],
    "sequence_length": 128,
    "actor_infer.strategy_args.strategy_config": {"prefix_cache_tokens": 4096},
}
COUNTED = ("agent/retokenized_tokens", "agent/trained_once_violations", "agent/breaks", "agent/foreign_responses")


def test_a_policy_learns_over_turns(run: Run) -> None:
    """Vowels pay in both of two turns of a conversation. What is trained is what was sampled."""
    finished = run(
        LETTERS
        | {
            "max_steps": 16,
            "eval_steps": 16,
            "rollout_batch_size": 64,
            "val_batch_size": 32,
            "train_env_manager.group_size": 8,
            "train_env_manager.num_env_groups": 8,
            "val_env_manager": {"num_env_groups": 8, "group_size": 4, "tags": ["letters"]},
            "actor_train.training_args": training_args(32, 2, learning_rate=5e-3),
        },
        "agentic",
    )
    assert all(0 < hit < 1 for hit in finished.values("engine/prefix_hit")), "second turns have the first in the cache"
    returns = finished.values("episode/letters/return")
    assert sum(returns[-3:]) > 1.5 * sum(returns[:3])
    before, after = (row["val/letters/score/mean"] for row in finished.with_metric("val/letters/score/mean"))
    assert after > 1.5 * before
    for name in COUNTED:
        assert finished.values(name) == [0.0] * 16, name
    assert min(finished.values("episode/turns")) == 2.0


FAULTY = LETTERS | {
    "custom_envs.letters.env_type": f"{HERE}.Faulty",
    "custom_envs.letters.step_timeout": 2.0,
    "train_env_manager.max_env_num_per_worker": 4,
    "rpc_timeout": 300,
}


@pytest.mark.matrix  # where others have the processors, steps time out and are taken again for minutes
def test_faults_of_environments_cost_no_step(run: Run) -> None:
    """Some raise, some hang, some are slow, some end their process: all steps are done, every episode is accounted
    for. Asynchronous ones: tests/faults/test_restarts.py."""
    finished = run(FAULTY | {"max_steps": 2}, "agentic")
    rows = [row for step in range(2) for row in finished.samples(step)]
    assert len({(row["group"], row["member"]) for row in rows}) == len(rows) == 2 * 16
    assert {row["outcome"] for row in rows} == {"terminated"}, "a group that only fails is replaced"
    names = ("collect_query_count", "query_use_count", "group_filter_count", "episodes_ended", "episodes_retried")
    drawn, used, failed, ended, retried = (sum(finished.values(f"scheduler/{name}")) for name in names)
    assert used == 8 and failed > 0
    assert drawn == used + failed and ended == 4 * drawn
    assert retried >= 4 * failed, "a neighbour of one that ended its process is played again too, and succeeds"
    assert finished.values("env/process_deaths")[-1] > 0
    assert finished.values("agent/retokenized_tokens") == [0.0] * 2


def test_a_model_of_the_run_judges_episodes(run: Run, world: TinyWorld) -> None:
    """The role ``reward`` scores whole episodes of an environment: as its model says, of the text that was played."""
    options = {"model_type": "cluster", "prompt": TEMPLATE, "extract": "logprob", "top_logprobs": 1000, "timeout": 60}
    verifier = {"worker_cls": "llm_judge", "reward_kwargs": options}
    changes = LETTERS | {
        "custom_envs.letters.verifier": verifier,
        "reward": role("hf_infer", [0]),
        "reward.model_args.model_name_or_path": str(world.model),
        "reward.strategy_args.strategy_config": {"max_num_seqs": 16, "max_model_len": 256},
        "is_offload_states": True,
        "max_steps": 1,
    }
    finished = run(changes, "agentic")
    model: Any = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(world.model)
    rows = finished.samples(0)
    for row in rows[:3]:
        first, second = row["turns"]
        text = first["response"] + second["prompt"] + second["response"]
        expected = chance_of_yes(model, tokenizer, text.strip())
        assert row["metrics"]["verifier_score"] == pytest.approx(expected, abs=1e-4)
        assert row["score"] == pytest.approx(sum(turn["reward"] for turn in row["turns"]), abs=1e-6)
    assert len({row["metrics"]["verifier_score"] for row in rows}) > 1
    assert finished.steps[0]["time/reward/offload/total"] > 0
