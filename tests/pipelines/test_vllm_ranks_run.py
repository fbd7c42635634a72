"""A run whose vLLM engines have two ranks each, of which one is lost: ``make test-vllm-parallel``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from roll.distributed.guard import descendants
from tests.support.engines import whole_engines
from tests.support.subprocess_runs import Driver, Start, left_of
from tests.support.tiny_runs import GENERATING, HERE, FinishedRun, TinyWorld, load_changed, rlvr_settings, role

pytestmark = [pytest.mark.e2e, pytest.mark.long, whole_engines]

SECONDS = 600
GAP = 1e-5  # as in test_vllm_run


@pytest.mark.timeout(1800)
def test_an_engine_that_lost_a_rank_comes_back(start: Start, wide_heads: TinyWorld, tmp_path: Path) -> None:
    engines = role("vllm", [1, 2, 3, 4], generating_args=GENERATING)
    engines["strategy_args"]["strategy_config"] = {"tensor_parallel_size": 2, "max_num_seqs": 8}
    changes = {
        "max_steps": 5000,
        "num_gpus_per_node": 5,
        "rpc_timeout": 600,
        "actor_infer": engines | {"worker_cls": f"{HERE}.faulty_workers.EngineLosingARank"},
    }
    load_changed(rlvr_settings(wide_heads, tmp_path), changes)
    driver = start(tmp_path / "input" / "config.yaml", tmp_path)
    first = driver.wait_for(lambda: len(ranks := _ranks(driver, 0)) == 2 and ranks, SECONDS)
    driver.wait_for(lambda: driver.last("scheduler/engines") == 1, SECONDS)
    mark = driver.mark("actor_infer-1")
    assert len(_ranks(driver, 1)) == 2 and not set(first) & set(_ranks(driver, 0)), "the ranks of one engine are gone"
    driver.wait_for(lambda: driver.last("scheduler/engines") == 2, SECONDS)
    assert len(_ranks(driver, 0)) == len(_ranks(driver, 1)) == 2
    back = driver.steps_done()
    driver.wait_for(lambda: driver.steps_done() > back + 2, SECONDS)
    os.killpg(driver.process.pid, signal.SIGINT)
    driver.finish(60)
    assert left_of(mark) == []
    done = FinishedRun(tmp_path)
    assert done.values("scheduler/engine_deaths")[-1] == 1 and done.values("scheduler/reissued")[-1] > 0
    assert len(set(done.values("system/samples"))) == 1, "every step has its whole batch"
    assert max(done.values("actor/train_infer_log_diff_abs_max")) < GAP
    assert "rank 1 of the engine (pid " in (tmp_path / "logs" / "workers" / "actor_infer-0.log").read_text()


def _ranks(driver: Driver, engine: int) -> list[int]:
    """Processes that the worker of an engine has forked. Their titles do not tell them: setproctitle changes nothing
    where the first variable of the environment, whose order Ray draws anew in each run, was set again."""
    worker = driver.worker_pid(f"actor_infer-{engine}")
    started = descendants(worker) if worker else []
    return [pid for pid in started if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()]
