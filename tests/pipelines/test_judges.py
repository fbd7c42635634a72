"""Judges of the run's own: their engines answer the reward workers over HTTP, without the processes and in a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.config.loader import LoadedConfig
from roll.config.rewards import JUDGE_ROLE
from roll.distributed import WorkerContext, WorkerDied
from roll.pipelines.clusters import JudgeService
from roll.pipelines.files import load_tokenizer
from roll.rewards import RewardSample
from roll.rollout.rewarding import RewardSettings, RewardWorker
from tests.config.good import changed, load
from tests.pipelines.conftest import Run
from tests.pipelines.judging import TEMPLATE, chance_of_yes
from tests.serving.local_cluster import LocalCluster
from tests.support.tiny_runs import TinyWorld, role


def loaded_with_judge(world: TinyWorld, folder: Path) -> LoadedConfig[Any]:
    quick = {"backoff": 0.001, "max_retries": 0, "extract": "logprob", "top_logprobs": 448}
    judged = {"worker_cls": "llm_judge", "judge_model_type": "cluster", "judge_prompt": TEMPLATE, "timeout": 60}
    changes = {
        "prompt_length": 64,
        "response_length": 36,
        "reward_model": role("hf_infer", [0, 1]),
        "reward_model.model_args.model_name_or_path": str(world.model),
        "rewards": {
            "judged": judged | {"reward_kwargs": quick, "tag_included": ["a"]},
            "math": {"worker_cls": "math_rule", "tag_included": ["b"]},
        },
    }
    return load(folder, changed(changes))


@contextmanager
def opened(loaded: LoadedConfig[Any]) -> Iterator[tuple[JudgeService, LocalCluster]]:
    service = JudgeService(loaded.config, loaded.plan, JUDGE_ROLE)
    cluster = LocalCluster(loaded.plan.roles[JUDGE_ROLE].section, world_size=2)
    arguments = cluster.role.model_args
    service.open(cluster, load_tokenizer(arguments.model_name_or_path, False))  # type: ignore[arg-type]
    try:
        yield service, cluster
    finally:
        service.close()
        cluster.close()


def test_engines_of_the_role_answer_a_reward_worker(world: TinyWorld, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(world.model)
    loaded = loaded_with_judge(world, tmp_path)
    with opened(loaded) as (service, cluster):
        # 2 x 100 tokens and 2,048 for the template do not fit the tiny model's 2,048 positions.
        assert cluster.role.strategy_args.strategy_config == {"max_model_len": 2048, "load_format": "auto"}
        section = loaded.plan.roles["rewards.judged"].section
        settings = RewardSettings(service.address)
        worker = RewardWorker(WorkerContext("rewards.judged", section, rank=0, world_size=1, settings=settings))
        worker.initialize()
        samples = [RewardSample("p", f"answer {number}", "4") for number in range(6)]
        for sample, result in zip(samples, worker.score(samples), strict=True):
            assert result.score == pytest.approx(chance_of_yes(model, tokenizer, sample.response), abs=1e-4)
        service.check()
        service.pause()
        assert all(not worker.engine.num_unfinished for worker in cluster.workers)
        service.resume()
        assert worker.score([RewardSample("p", "another", "4")])[0].score is not None
        settings = RewardSettings({**service.address, "judge_api_key": "guessed"})
        other = RewardWorker(WorkerContext("rewards.judged", section, rank=0, world_size=1, settings=settings))
        other.initialize()
        assert "status 401" in (other.score([RewardSample("p", "unasked", "4")])[0].error or "")
        cluster.dead = {0, 1}
        lost = worker.score([RewardSample("p", "too late", "4")])[0]
        assert lost.score is None
        assert "status 503" in (lost.error or "")
        with pytest.raises(WorkerDied):
            service.check()
        worker.close()
        other.close()


JUDGED: dict[str, Any] = {
    "worker_cls": "llm_judge",
    "judge_prompt": TEMPLATE,
    "timeout": 60,
    "reward_kwargs": {"extract": "logprob", "top_logprobs": 1000},
}


@pytest.mark.e2e
@pytest.mark.long
def test_a_judge_on_a_role_and_one_in_a_reward_section(run: Run, world: TinyWorld) -> None:
    own = role("hf_infer", [0]) | {"model_args": {"model_name_or_path": str(world.model), "dtype": "fp32"}}
    changes = {
        "max_steps": 1,
        "is_offload_states": True,
        "reward_model": role("hf_infer", [0]),
        "reward_model.model_args.model_name_or_path": str(world.model),
        "reward_model.strategy_args.strategy_config": {"max_num_seqs": 16, "max_model_len": 256},
        "rewards": {
            "shared": JUDGED | {"tag_included": ["even"], "judge_model_type": "cluster"},
            "own": JUDGED | {"tag_included": ["odd"], "judge_model_type": "inference"} | own,
        },
    }
    finished = run(changes)
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
