"""Records of every pipeline's runs for reports: samples, phases, calls, and the report itself, however they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.report.run_files import REPORT_NAME, Run, read_run
from tests.pipelines.conftest import Run as Start
from tests.support.tiny_runs import FinishedRun, untimed

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def text_of(block: dict[str, Any], sample: dict[str, Any]) -> str:
    return ascii_of("".join(block["pieces"][place] for place in sample["tokens"]))


def ascii_of(text: str) -> str:
    """A letter of several bytes may come from several tokens, none of which is a letter by itself."""
    return "".join(letter for letter in text if letter.isascii())


@pytest.fixture(scope="module")
def rlvr(run: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, Run]:
    folder = tmp_path_factory.mktemp("dumped")
    keys = {"rollout_dump_dir": str(folder / "rollouts"), "memory_steps": 1, "sample_log.mismatch_steps": 2}
    done = run(keys)
    return done, read_run(done.output)


def test_samples_are_those_of_the_run(rlvr: tuple[FinishedRun, Run]) -> None:
    done, read = rlvr
    blocks = list(read.blocks())
    assert [(block["step"], block["kind"]) for block in blocks] == [(0, "train"), (1, "train")]
    dump = Path(read.config["rollout_dump_dir"])
    for block in blocks:
        rows = [json.loads(line) for line in (dump / f"train-{block['step']:06d}.jsonl").read_text().splitlines()]
        assert len(rows) == len(block["samples"]) == 16
        for row, sample in zip(rows, block["samples"], strict=True):
            assert block["prompts"][sample["prompt"]]["text"] == row["prompt"]
            assert sample["score"] == pytest.approx(row["score"], rel=1e-5)
            assert all(sample[name] == row[name] for name in ("finish_reason", "response_tokens"))
            assert ascii_of(row["response"]) in text_of(block, sample)
            assert sample["versions"] == block["step"]
        # Step 0 had a pass of its own: float32 on both sides, a hundred-thousandth is the record's unit.
        assert all(("mismatch" in sample) == (block["step"] == 0) for sample in block["samples"])
        assert all(abs(difference) <= 2 for sample in block["samples"] for difference in sample.get("mismatch", ()))
        scores = [sample["score"] for sample in block["samples"]]
        assert sum(scores) / 16 == pytest.approx(done.values("critic/score/mean")[block["step"]], rel=1e-5)


def test_phases_and_calls(rlvr: tuple[FinishedRun, Run]) -> None:
    done, read = rlvr
    rows = {row["step"]: row for row in read.timeline}
    for row in done.steps:
        timed = {name: end - begin for name, begin, end in rows[row["step"]]["phases"]}
        assert timed["step_train"] == pytest.approx(row["time/step_train"], abs=0.01)
    calls = {(one.role, one.rank): {name for name, _, _ in one.spans} for one in read.calls}
    assert "step" in calls["actor_train", 0]
    assert "advance" in calls["actor_infer", 0]
    begin, end = rows[0]["begin"], rows[1]["end"]
    train = next(one for one in read.calls if one.role == "actor_train")
    assert any(begin < first < last < end for name, first, last in train.spans if name == "step")
    assert read.about["outcome"] == "finished"
    assert (done.output / REPORT_NAME).stat().st_size > 10_000


def test_the_record_changes_no_metric(run: Start, rlvr: tuple[FinishedRun, Run]) -> None:
    without = run({"sample_log.enabled": False, "memory_steps": 1})
    assert [untimed(row) for row in without.steps] == [untimed(row) for row in rlvr[0].steps]  # the pass changes none


def test_a_run_that_fails_has_its_report(run: Start, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no sample could be scored"):
        run({"rewards.digits.worker_cls": "benchmarks.pathologies.parts.always_fails"}, output=tmp_path)
    read = read_run(tmp_path)
    assert "no sample could be scored" in read.about["outcome"]
    assert (tmp_path / REPORT_NAME).is_file()
