"""Evaluations of several models and checkpoints with one engine start, killed and continued."""

from __future__ import annotations

import json
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from roll.pipelines.evaluate.samples import RESULTS, SAMPLES, read_samples
from roll.tracking import METRICS_NAME, read_metrics
from tests.config.good import changed
from tests.faults.dying_workers import DEATHS_ENV
from tests.pipelines.conftest import Run
from tests.serving.conftest import Serving
from tests.support.subprocess_runs import Start
from tests.support.tiny_runs import GENERATING, FinishedRun, TinyWorld, rlvr_settings, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROMPTS = 8
VALIDATION: dict[str, Any] = {"generating_args": {**GENERATING, "num_return_sequences": 4}, "greedy": False}


def evaluation(world: TinyWorld, models: dict[str, Path], **keys: Any) -> dict[str, Any]:
    """Changes of an RLVR configuration."""
    data = {"file_name": [str(world.validation)], "messages": "messages"}
    return {
        "pipeline": "evaluate",
        "validation": {"data_args": data, **VALIDATION},
        "evaluate": {"models": {name: str(path) for name, path in models.items()}, **keys},
    }


def samples(run: FinishedRun, model: str) -> list[tuple[Any, ...]]:
    rows = [row for row in read_samples(run.output / "evaluation" / SAMPLES) if row["model"] == model]
    return sorted((row["pass"], row["order"], row["sample"], row["response"], row["score"]) for row in rows)


def results(run: FinishedRun) -> dict[str, Any]:
    return json.loads((run.output / "evaluation" / RESULTS).read_text())


@pytest.fixture(scope="module")
def other(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same architecture with other weights."""
    return changed_model(world.model, tmp_path_factory.mktemp("models") / "other")


def changed_model(model: Path, folder: Path) -> Path:
    """A copy in ``folder`` with noise on every weight."""
    shutil.copytree(model, folder)
    torch.manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


@pytest.fixture(scope="module")
def both(run: Run, world: TinyWorld, other: Path) -> FinishedRun:
    return run(
        evaluation(world, {"first": world.model, "second": other}, temperatures=[1.0, 0.5, 0], baseline="second")
    )


def test_weights_swapped_in_answer_as_those_loaded_at_the_start(
    run: Run, world: TinyWorld, other: Path, both: FinishedRun
) -> None:
    swapped = run(evaluation(world, {"second": other, "first": world.model}, temperatures=[1.0, 0.5, 0]))
    assert len(samples(both, "first")) == PROMPTS * (4 + 4 + 1)
    assert samples(both, "first") != samples(both, "second")
    for model in ("first", "second"):
        assert samples(swapped, model) == samples(both, model)
    found = results(both)["metrics"]
    assert found["second"] == results(swapped)["metrics"]["second"], "the second is the baseline in both"
    compared = found["first"]
    assert (
        compared["compare/second/t1/wins"] + compared["compare/second/t1/losses"] + compared["compare/second/t1/ties"]
        == PROMPTS
    )
    logged = [row for row in read_metrics(both.logs / "evaluation" / METRICS_NAME) if "val/t1/accuracy" in row]
    assert [row["val/t1/reward"] for row in logged] == [found[name]["val/t1/reward"] for name in ("first", "second")]
    assert not list((both.logs / "evaluation" / "workers").glob("actor_train*"))


@pytest.mark.matrix
def test_a_killed_evaluation_continues_where_it_was_and_misses_its_threshold(
    start: Start, run: Run, world: TinyWorld, other: Path, both: FinishedRun, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    models = {"first": world.model, "second": other}
    thresholds = {"first/val_correct/all/mean": 0.99, "second/val/t1/reward": 0.0}
    changes = evaluation(world, models, temperatures=[1.0, 0.5, 0], baseline="second", thresholds=thresholds) | {
        "val_batch_size": 2,
        "rewards.digits.worker_cls": "tests.pipelines.rewards.slow_digit_share",
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(changed(changes, rlvr_settings(world, output))))
    driver = start(file, output)
    written = output / "evaluation" / SAMPLES
    before = driver.wait_for(lambda: written.exists() and written.read_text().count("\n") > 4 and written.read_bytes())
    os.killpg(driver.process.pid, signal.SIGKILL)
    driver.process.wait()
    left = written.read_bytes()
    assert left.startswith(before) and left.count(b"\n") < 2 * PROMPTS * 9
    driver = start(file, output)
    status, errors = driver.finish(240)
    assert status == 3, errors
    finished = FinishedRun(output)
    assert written.read_bytes().startswith(before), "what was there has not been asked again"
    for model in models:
        assert samples(finished, model) == samples(both, model)
    below = ["first: val_correct/all/mean is 0.0000, below 0.99"]
    assert results(finished) == results(both) | {"below_threshold": below}


def test_episodes_are_those_of_a_training_runs_validation(run: Run) -> None:
    """The exported model and its checkpoint play what the run itself played after its last step, token for token."""
    players = {"num_env_groups": 2, "group_size": 2, "tags": ["game"], "generating_args": GENERATING}
    changes = {"val_env_manager": players, "val_batch_size": 8}
    arguments = training_args(8, 2, 3e-3) | {"save_hf_model": True}
    more = {"max_steps": 1, "save_steps": 1, "eval_steps": 1, "actor_train.training_args": arguments}
    trained = run(changes | more, "agentic")
    models = {"run": str(trained.output), "exported": str(trained.output / "model")}
    done = run(changes | {"pipeline": "agentic_rollout", "evaluate": {"models": models}}, "agentic")
    assert samples(done, "run-1") == samples(done, "exported") and len(samples(done, "exported")) == 8
    last = trained.with_metric("val/score/mean")[-1]
    found = results(done)["metrics"]["exported"]
    assert found["val/episodes/reward"] == pytest.approx(last["val/score/mean"], abs=1e-9)
    rows = list(read_samples(done.output / "evaluation" / SAMPLES))
    assert {row["prompt_id"] for row in rows} == {f"game/{number}" for number in range(4)}
    assert all(row["turns"] and row["numbers"]["turns"] == len(row["turns"]) for row in rows)


@pytest.mark.matrix
def test_against_a_model_that_is_served_elsewhere(
    run: Run, world: TinyWorld, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By chats over HTTP: greedily it answers as engines of this run let it, and the others are compared with it."""
    serving = Serving(other, max_open_requests=100, api_key="sesame")
    monkeypatch.setenv("SERVICE_KEY", "sesame")
    keys = {"against": f"{serving.server.url}/v1#tiny", "against_api_key_env": "SERVICE_KEY"}
    changes = evaluation(world, {"first": world.model, "second": other}, temperatures=[1.0, 0], **keys)
    sampling = {name: value for name, value in GENERATING.items() if name != "stop_token_ids"}
    changes["validation"] |= {"generating_args": {**sampling, "num_return_sequences": 4, "max_new_tokens": 8}}
    done = run(changes)
    serving.close()
    served, engines = samples(done, "against"), samples(done, "second")
    assert [row for row in served if row[0] == "greedy"] == [row for row in engines if row[0] == "greedy"]
    assert len({row[3] for row in served if row[0] == "t1"}) > PROMPTS, "samples of a prompt differ"
    found = results(done)
    assert found["baseline"] == "against"
    assert "compare/against/t1/difference" in found["metrics"]["first"]


@pytest.mark.matrix
def test_the_only_engine_is_killed_and_started_again(
    run: Run, world: TinyWorld, both: FinishedRun, tmp_path: Path
) -> None:
    """With the weights that it began with, as nothing exchanges them; the samples are those of an engine that lived."""
    changes = evaluation(world, {"first": world.model}, temperatures=[1.0, 0])
    changes["actor_infer.worker_cls"] = "tests.faults.dying_workers.DyingEngine"
    changes["actor_infer.system_envs"] = {DEATHS_ENV: str(tmp_path / "deaths")}
    (tmp_path / "deaths").write_text("2")
    done = run(changes)
    assert (tmp_path / "deaths").read_text() == ""
    assert samples(done, "first") == [row for row in samples(both, "first") if row[0] in ("t1", "greedy")]


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra harness)")
def test_tasks_of_lm_eval_inside_training(run: Run, world: TinyWorld, tmp_path: Path) -> None:
    """They ask the weights of each validation."""
    questions, tasks = tmp_path / "questions.jsonl", tmp_path / "tasks"
    questions.write_text(
        "".join(json.dumps({"question": f"{number} eggs", "answer": "?"}) + "\n" for number in range(4))
    )
    tasks.mkdir()
    task = {
        "task": "tiny_eggs",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "0",
        "doc_to_choice": [" 3", " 12 and more"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tasks / "eggs.yaml").write_text(yaml.safe_dump(task))
    harness = {"name": "lm_eval", "tasks": ["tiny_eggs"], "arguments": [f"--include_path={tasks}"]}
    data = {"file_name": [str(world.validation)], "messages": "messages"}
    validation = {"data_args": data, **VALIDATION, "before_train": False, "harness": harness}
    done = run({"eval_steps": 1, "validation": validation, "actor_train.training_args": training_args(8, 2, 1e-2)})
    name = "lm_eval/tiny_eggs/acc"
    found = {row["step"]: row for row in done.with_metric(name)}
    assert list(found) == [1, 2] and all(0 <= row[name] <= 1 for row in found.values())
    samples = sorted((done.output / "validation" / "lm_eval").rglob("samples_*.jsonl"))
    said = [json.loads(file.read_text().splitlines()[0])["resps"] for file in samples]
    assert len(said) == 2 and said[0] != said[1], "the weights of two steps"
    assert all("val_correct/all/mean" in row for row in found.values())
