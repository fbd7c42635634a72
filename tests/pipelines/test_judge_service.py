"""A judge on the run's own role, without the processes: real engines in threads answer a real reward worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.loader import LoadedConfig
from roll.config.rewards import JUDGE_ROLE
from roll.distributed import WorkerContext, WorkerDied
from roll.pipelines.clusters import JudgeService
from roll.pipelines.files import load_tokenizer
from roll.rewards import RewardSample
from roll.workers.reward import RewardSettings, RewardWorker
from tests.config.good import changed, load
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(world.model)
    loaded = loaded_with_judge(world, tmp_path)
    with opened(loaded) as (service, cluster):
        # 2 x 100 tokens and 2,048 for the template do not fit the tiny model's 2,048 positions.
        assert cluster.role.strategy_args.strategy_config == {"max_model_len": 2048, "load_format": "auto"}
        section = loaded.plan.roles["rewards.judged"].section
        settings = RewardSettings(**service.address)
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
        settings = replace(settings, judge_api_key="guessed")
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
