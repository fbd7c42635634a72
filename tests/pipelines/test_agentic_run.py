"""Whole agentic runs: a policy learns over turns, faults of environments cost no step, a killed run goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from roll.tracking import METRICS_NAME, read_metrics
from tests.pipelines.conftest import Run
from tests.pipelines.judging import TEMPLATE, chance_of_yes
from tests.support.subprocess_runs import Start
from tests.support.tiny_runs import FinishedRun, TinyWorld, agentic_settings, load_changed, role, training_args

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


def episodes(run: FinishedRun) -> dict[tuple[int, int], Any]:
    """Episodes that the run trained on, by group and member: what was sampled in each turn, rewards and outcome."""
    found = {}
    for file in sorted((run.output / "rollouts").glob("train-*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            turns = [(turn["response_ids"], turn["reward"]) for turn in row["turns"]]
            found[row["group"], row["member"]] = turns, row["score"], row["outcome"]
    return found


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
    rows = read_metrics(finished.logs / METRICS_NAME)
    before, after = (row["val/letters/score/mean"] for row in rows if "val/letters/score/mean" in row)
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


@pytest.mark.default_rows("synchronous")  # asynchronous ones: tests/faults/test_restarts.py
@pytest.mark.parametrize("ratio", [0, 1], ids=["synchronous", "asynchronous"])
def test_faults_of_environments_cost_no_step(run: Run, ratio: int, tmp_path: Path) -> None:
    """Some raise, some hang, some are slow, some end their process: all steps are done, every episode is accounted
    for."""
    changes = {"max_steps": 3, "async_generation_ratio": ratio, "rollout_dump_dir": str(tmp_path / "rollouts")}
    finished = run(FAULTY | changes, "agentic", tmp_path)
    assert len(finished.steps) == 3
    found = episodes(finished)
    assert len(found) == 3 * 16
    outcomes = {outcome for _, _, outcome in found.values()}
    assert "terminated" in outcomes and outcomes <= {"terminated", "environment_error"}
    drawn, used, failed, ended, retried = (
        sum(finished.values(f"scheduler/{name}"))
        for name in (
            *("collect_query_count", "query_use_count", "group_filter_count"),
            *("episodes_ended", "episodes_retried"),
        )
    )
    assert used == 12 and failed > 0 and retried > 0
    if not ratio:
        assert outcomes == {"terminated"}, "a group that only fails is replaced"
        assert drawn == used + failed and ended == 4 * drawn
        assert retried >= 4 * failed, "a neighbour of one that ended its process is played again too, and succeeds"
    assert finished.values("env/process_deaths")[-1] > 0
    assert finished.values("agent/retokenized_tokens") == [0.0] * 3


@pytest.mark.default_rows("asynchronous")
@pytest.mark.parametrize("ratio", [0, 1], ids=["synchronous", "asynchronous"])
def test_a_killed_run_goes_on(start: Start, run: Run, world: TinyWorld, tmp_path: Path, ratio: int) -> None:
    """From its newest checkpoint. A synchronous run plays the episodes of an uninterrupted one; an asynchronous one
    loses and doubles no group."""
    changes = LETTERS | {"max_steps": 5, "save_steps": 2, "async_generation_ratio": ratio}

    def dumped(folder: Path) -> dict[str, Any]:
        return changes | {"rollout_dump_dir": str(folder / "rollouts")}

    slow = {"custom_envs.letters.env_config": {"slow": 0.02}, "resume_from_checkpoint": True}
    load_changed(agentic_settings(world, tmp_path), dumped(tmp_path) | slow)
    driver = start(tmp_path / "input" / "config.yaml", tmp_path)
    driver.wait_for(lambda: driver.steps_done() >= 3)
    driver.process.send_signal(signal.SIGKILL)
    driver.process.communicate(timeout=60)
    assert driver.steps_done() < 5
    resumed = run(dumped(tmp_path) | {"resume_from_checkpoint": True}, "agentic", tmp_path)
    assert [row["step"] for row in resumed.steps] == list(range(5))
    found = episodes(resumed)
    assert len(found) == 5 * 16
    assert sorted(found) == [(group, member) for group in range(20) for member in range(4)]
    if not ratio:
        whole = tmp_path / "whole"
        assert found == episodes(run(dumped(whole), "agentic", whole))


STRATEGIES = {
    "FSDP2": ("fsdp2_train", {}),
    "ZeRO-2": ("deepspeed_train", {"zero_optimization": {"stage": 2}}),
    "Megatron, two tensor ranks": ("megatron_train", {"tensor_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def two_steps(run: Run) -> Any:
    """Of the same episodes: recorded by the first strategy, replayed by the others, so that no sample differs. They
    come before the first validation."""
    recorded = run(
        {
            "max_steps": 2,
            "eval_steps": 1,
            "val_batch_size": 4,
            "val_env_manager": {"num_env_groups": 1, "group_size": 4, "tags": ["game"]},
            "val_before_train": False,
            "rollout_mock": {"enable": True, "mode": "dump"},
            "actor_train.device_mapping": [0, 1],
            "actor_train.training_args": training_args(8, 1),
            "enable_old_logprobs_recompute": True,
        },
        "agentic",
    )
    validated = [row["step"] for row in read_metrics(recorded.logs / METRICS_NAME) if "val/game/score/mean" in row]
    assert validated == [1, 2]
    return recorded


@pytest.mark.default_rows("Megatron*")
@pytest.mark.parametrize("name", list(STRATEGIES)[1:])
def test_every_strategy_learns_the_same_from_episodes(run: Run, two_steps: FinishedRun, name: str) -> None:
    strategy, config = STRATEGIES[name]
    ranks = 1 if "tensor" in name else 2
    replayed = run(
        {
            "max_steps": 2,
            "rollout_mock": {"enable": True, "mode": "mock", "dump_dir": str(two_steps.output / "rollouts")},
            "actor_train.device_mapping": [0, 1],
            "actor_train.training_args": training_args(8, 2 // ranks),
            "actor_train.strategy_args": {"strategy_name": strategy, "strategy_config": config},
            "enable_old_logprobs_recompute": True,
        },
        "agentic",
    )
    for metric in ("actor/loss", "actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        if metric in two_steps.steps[0]:
            assert replayed.values(metric) == pytest.approx(two_steps.values(metric), rel=2e-4, abs=2e-5), metric
    assert any(value > 0 for value in two_steps.values("actor/grad_norm"))


def test_turns_share_their_beginnings_in_training(run: Run) -> None:
    """Eight turns of 16 episodes, a row each, with actor, reference and critic: the same numbers, a third of the
    tokens."""
    learns = training_args(32, 4)
    settings = {
        "custom_envs": {
            "rules": {"env_type": f"{HERE}.Rules", "max_steps": 8, "max_tokens_per_step": 8, "samples": "step"}
            | {"env_config": {"turns": 8}},
        },
        "train_env_manager.tags": ["rules"],
        "sequence_length": 512,
        "enable_old_logprobs_recompute": True,
        "estimator": "turn_gae",
        "ppo_epochs": 2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.05,
        "entropy_loss_coef": 0.01,
        "reference": role("fsdp2_infer", [0], infer_batch_size=32),
        "critic": role("fsdp2_train", [0], training_args=learns, infer_batch_size=32),
        "actor_train.training_args": learns,
        "actor_train.infer_batch_size": 32,
    }
    recorded = run(settings | {"rollout_mock": {"enable": True, "mode": "dump"}}, "agentic")
    replays = {"rollout_mock": {"enable": True, "mode": "mock", "dump_dir": str(recorded.output / "rollouts")}}
    sharing = {f"{name}.use_prefix_sharing": True for name in ("actor_train", "reference", "critic")}
    (alone,), (shared,) = recorded.steps, run(settings | replays | sharing, "agentic").steps
    names = [name for name in alone if name.startswith(("actor/", "critic/")) and "time" not in name]
    assert {"actor/kl_loss", "actor/entropy", "actor/grad_norm", "critic/loss", "critic/grad_norm"} <= set(names)
    assert min(alone["actor/grad_norm"], alone["critic/grad_norm"]) > 1e-3
    counted = [name for name in names if name.endswith(("tokens_per_micro_batch", "padding_ratio"))]
    for name in sorted(set(names) - set(counted)):
        assert shared[name] == pytest.approx(alone[name], rel=2e-4, abs=2e-5), name
    for name in ("actor", "critic"):
        tokens = [
            step[f"{name}/tokens_per_micro_batch"] * (1 - step[f"{name}/padding_ratio"]) for step in (alone, shared)
        ]
        assert tokens[0] > 3 * tokens[1] > 0


def test_a_model_of_the_run_judges_episodes(run: Run, world: TinyWorld, tmp_path: Path) -> None:
    """The role ``reward`` scores whole episodes of an environment: as its model says, of the text that was played."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"model_type": "cluster", "prompt": TEMPLATE, "extract": "logprob", "top_logprobs": 1000, "timeout": 60}
    verifier = {"worker_cls": "llm_judge", "reward_kwargs": options}
    changes = LETTERS | {
        "custom_envs.letters.verifier": verifier,
        "reward": role("hf_infer", [0]),
        "reward.model_args.model_name_or_path": str(world.model),
        "reward.strategy_args.strategy_config": {"max_num_seqs": 16, "max_model_len": 256},
        "is_offload_states": True,
        "rollout_dump_dir": str(tmp_path / "rollouts"),
        "max_steps": 1,
    }
    finished = run(changes, "agentic")
    model: Any = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(world.model)
    rows = [json.loads(line) for line in (tmp_path / "rollouts/train-000000.jsonl").open()]
    for row in rows[:3]:
        first, second = row["turns"]
        text = first["response"] + second["prompt"] + second["response"]
        expected = chance_of_yes(model, tokenizer, text.strip())
        assert row["metrics"]["verifier_score"] == pytest.approx(expected, abs=1e-4)
        assert row["score"] == pytest.approx(sum(turn["reward"] for turn in row["turns"]), abs=1e-6)
    assert len({row["metrics"]["verifier_score"] for row in rows}) > 1
    assert finished.steps[0]["time/reward/offload/total"] > 0
