"""Turns of a generation worker: requests that are recalled from one and finished by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.distributed import WorkerContext
from roll.rollout.groups import EngineCommand, FinishedGroup
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer.rows import Places, RunningRows, Sampler
from roll.workers.generation import GenerationWorker
from tests.strategies.hf_infer.helpers import random_prompts

ONE_STEP = {"slice_seconds": 0.0}


def start(folder: Path) -> GenerationWorker:
    role = WorkerConfig(
        name="actor_infer",
        model_args=ModelArguments(model_name_or_path=str(folder), dtype="fp32"),
        strategy_args=StrategyArguments("hf_infer", {"max_num_seqs": 4, "max_model_len": 64}),
    )
    worker = GenerationWorker(WorkerContext("actor_infer", role, 0, 1))
    worker.initialize()
    return worker


def finish(worker: GenerationWorker, requests: list[GenerationRequest]) -> dict[str, FinishedGroup]:
    report = worker.advance(EngineCommand(add=requests))
    groups = list(report.groups)
    while report.num_unfinished:
        report = worker.advance(EngineCommand())
        groups += report.groups
    return {group.request_id: group for group in groups}


@pytest.mark.long
def test_recalled_requests_are_finished_by_another_engine(model_folder):
    params = SamplingParams(30, temperature=1.5, seed=9)
    requests = [GenerationRequest(str(i), p, params, 3) for i, p in enumerate(random_prompts([4, 11, 7]))]
    first, second = start(model_folder), start(model_folder)
    whole = finish(second, requests)
    first.advance(EngineCommand(add=requests, **ONE_STEP))
    for _ in range(11):
        assert not first.advance(EngineCommand(**ONE_STEP)).groups, "the test wants every group unfinished"
    report = first.advance(EngineCommand(recall=["0", "2", "unknown"], work=False))
    assert [request.request_id for request in report.recalled] == ["0", "2"]
    assert report.num_unfinished == 3 - len(first._finished["1"]), "the other request stays"
    progress = [len(r.finished) + len(r.partial) for r in report.recalled]
    assert progress == [3, 0], "four rows: the first group and a sample of the second"
    again = finish(second, report.recalled) | finish(first, [])
    assert again.keys() == whole.keys()
    for name, group in whole.items():
        np.testing.assert_array_equal(again[name].token_ids, group.token_ids)
        np.testing.assert_allclose(again[name].log_probs, group.log_probs, atol=1e-5)
        assert again[name].texts == group.texts
        assert again[name].finish_reasons == group.finish_reasons
        assert again[name].weight_versions == group.weight_versions


class Poison(Exception):
    """The error of an engine that meets one of the requests named so."""


def poison(worker: GenerationWorker, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Let requests whose name begins with ``bad`` make a step of the engine fail: at their admission, after their
    third token, or by logits that are no numbers."""
    engine = worker.engine  # type: ignore[attr-defined]
    start_sample, sample = engine._start_sample, Sampler.sample
    record = RunningRows.record

    def bad_rows(rows: RunningRows) -> list[int]:
        return [i for i, s in enumerate(rows.samples) if s.request.request_id.startswith("bad")]

    def failing_start(group: Any, offset: int) -> None:
        start_sample(group, offset)
        if group.request.request_id.startswith("bad"):
            raise Poison("at admission")

    def failing_record(rows: RunningRows, *recorded: np.ndarray) -> np.ndarray:
        stopped = record(rows, *recorded)
        if any(rows.generated[row] >= 3 for row in bad_rows(rows)):
            raise Poison("after three tokens")
        return stopped

    def not_finite(sampler: Sampler, logits: torch.Tensor, places: Places) -> Any:
        logits = logits.clone()
        logits[bad_rows(sampler._rows)] = torch.nan
        return sample(sampler, logits, places)

    if place == "admission":
        monkeypatch.setattr(engine, "_start_sample", failing_start)
    elif place == "record":
        monkeypatch.setattr(RunningRows, "record", failing_record)
    else:
        monkeypatch.setattr(Sampler, "sample", not_finite)


@pytest.mark.parametrize("place", ["admission", "record", "logits"])
def test_a_request_that_breaks_the_engine_fails_alone(model_folder, monkeypatch, place):
    names = ["a", "bad 1", "b", "c", "bad 2", "d", "e"]
    params = SamplingParams(12, temperature=1.2, seed=4, top_log_probs=2)
    prompts = random_prompts([4, 11, 7, 5, 3, 9, 6])
    requests = [GenerationRequest(name, prompt, params, 2) for name, prompt in zip(names, prompts, strict=True)]
    worker = start(model_folder)
    whole = finish(worker, requests)
    poison(worker, monkeypatch, place)
    groups: dict[str, FinishedGroup] = {}
    commands = [EngineCommand(add=requests[:4], report_refusals=True, slice_seconds=0.0)]
    commands += [EngineCommand(add=[request], report_refusals=True, slice_seconds=0.0) for request in requests[4:]]
    for command in [*commands, *[EngineCommand(report_refusals=True)] * 200]:
        groups |= {group.request_id: group for group in worker.advance(command).groups}
    assert groups.keys() == set(names)
    assert not worker._open
    assert not worker._quarantine.has_work
    for name, group in groups.items():
        if name.startswith("bad"):
            assert (group.error or "").startswith({"logits": "sample "}.get(place, "Poison: "))
        else:
            np.testing.assert_array_equal(group.token_ids, whole[name].token_ids)
            np.testing.assert_allclose(group.log_probs, whole[name].log_probs, atol=1e-5)
            assert [len(top) for top in group.top_log_probs] == group.lengths.tolist()
    with pytest.raises((Poison, RuntimeError), match=r"at admission|after three|'bad 3' has failed: sample 0: the log"):
        finish(worker, [GenerationRequest("bad 3", prompts[0], params)])  # in training the run ends


def test_an_engine_that_fails_at_everything_is_not_quiet_about_it(model_folder, monkeypatch):
    worker = start(model_folder)

    def broken(*_: Any) -> Any:
        raise Poison("the device is gone")

    monkeypatch.setattr(Sampler, "sample", broken)
    with pytest.raises(Poison):
        worker.advance(EngineCommand(add=[GenerationRequest("a", [1, 2], SamplingParams(4))], report_refusals=True))
